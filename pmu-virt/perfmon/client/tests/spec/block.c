/* PFM_FL_NOTIFY_BLOCK: while a notification is outstanding, the vCPU does not run (3.1.9). */
#include "spec.h"

int main(void)
{
	pfarg_ctx_t context;
	pfarg_pmd_t pmd, again;
	int fd, round;

	memset(&context, 0, sizeof(context));
	context.ctx_flags = PFM_FL_OVFL_BLOCK | PFM_FL_SYSTEM_WIDE;
	FAILS(pfm_create_context(&context, 1), EINVAL);
	fd = create(PFM_FL_NOTIFY_BLOCK);
	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	load(fd, vcpu());
	CALL(pfm_start(fd, NULL));
	for (round = 0; round < 3; round++) {
		message(fd, PFM_MSG_OVFL);
		memset(&pmd, 0, sizeof(pmd));
		CALL(pfm_read_pmds(fd, &pmd, 1));
		rest(20);
		memset(&again, 0, sizeof(again));
		CALL(pfm_read_pmds(fd, &again, 1));
		printf("PMD 0: %#llx\n", (unsigned long long)pmd.reg_value);
		if (getenv("UMPIRE_TEST_REAL"))
			MUST(again.reg_value == pmd.reg_value, "it counts while it is masked");
		CALL(pfm_restart(fd));
	}
	/* Closing wakes it. */
	message(fd, PFM_MSG_OVFL);
	MUST(close(fd) == 0, "errno %d", errno);
	return 0;
}
