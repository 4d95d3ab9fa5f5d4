/* A context is shared by fork (3.1.1), and ends with its last descriptor (3.1.15). */
#include "spec.h"

int main(void)
{
	pfarg_pmd_t pmd;
	pid_t child;
	int fd = create(0);

	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	load(fd, vcpu());
	memset(&pmd, 0, sizeof(pmd));
	child = fork();
	MUST(child >= 0, "errno %d", errno);
	if (child == 0) {
		CALL(pfm_start(fd, NULL));
		message(fd, PFM_MSG_OVFL);
		CALL(pfm_restart(fd));
		CALL(pfm_read_pmds(fd, &pmd, 1));
		MUST(close(fd) == 0, "errno %d", errno);
		FAILS(pfm_stop(fd), EBADF);
		_exit(0);
	}
	join(child);
	/* What the child closed is open here, and what it did is seen here. */
	message(fd, PFM_MSG_OVFL);
	CALL(pfm_restart(fd));
	CALL(pfm_stop(fd));
	CALL(pfm_read_pmds(fd, &pmd, 1));
	printf("PMD 0: %#llx\n", (unsigned long long)pmd.reg_value);
	/* The child is the last one to have it. */
	child = fork();
	if (child == 0) {
		rest(100);
		CALL(pfm_unload_context(fd));
		_exit(0);
	}
	MUST(close(fd) == 0, "errno %d", errno);
	FAILS(pfm_stop(fd), EBADF);
	join(child);
	/* Now the vCPU is free. */
	fd = create(0);
	load(fd, vcpu());
	return 0;
}
