/* The end of a vCPU (3.3.6): a message, after which the context is detached. */
#include "spec.h"

int main(void)
{
	pid_t ending = (pid_t)setting("UMPIRE_TEST_ENDING", NULL);
	pfm_msg_t messages[4];
	pfarg_pmd_t pmd;
	ssize_t size;
	int fd = create(0);

	program(fd, 0, 0, 0);
	load(fd, ending);
	CALL(pfm_start(fd, NULL));
	/* Room for more than comes: what is there is returned. */
	size = read(fd, messages, sizeof(messages));
	MUST(size == sizeof(messages[0]), "read returned %zd, errno %d", size, errno);
	MUST(messages[0].msg_type == PFM_END_MSG, "type %u", messages[0].msg_type);
	memset(&pmd, 0, sizeof(pmd));
	CALL(pfm_read_pmds(fd, &pmd, 1));
	printf("vCPU %d ended, PMD 0: %#llx\n", ending, (unsigned long long)pmd.reg_value);
	FAILS(pfm_restart(fd), EBUSY);
	FAILS(pfm_start(fd, NULL), EBUSY);
	FAILS(pfm_stop(fd), EBUSY);
	FAILS(pfm_unload_context(fd), EBUSY);
	return 0;
}
