/* A system-wide context, attached as 3.1.7 does it: by the CPU that the caller runs on. */
#include "spec.h"

#include <sched.h>
#include <sys/syscall.h>

int main(void)
{
	pid_t core = (pid_t)setting("UMPIRE_TEST_CORE", "0");
	pfarg_load_t target = { 0, 0 };
	pfarg_setdesc_t set;
	pfarg_pmd_t pmd;
	cpu_set_t before, one;
	int fd = create(PFM_FL_SYSTEM_WIDE), by_number = create(PFM_FL_SYSTEM_WIDE);

	memset(&set, 0, sizeof(set));
	set.set_flags = PFM_SETFL_EXCL_IDLE;
	CALL(pfm_create_evtsets(fd, &set, 1));
	program(fd, 0, 0, 0);
	MUST(sched_getaffinity(0, sizeof(before), &before) == 0, "errno %d", errno);
	target.load_pid = (pid_t)syscall(SYS_gettid);
	if (CPU_COUNT(&before) > 1)
		FAILS(pfm_load_context(fd, &target), EINVAL);
	CPU_ZERO(&one);
	CPU_SET((size_t)core, &one);
	if (sched_setaffinity(0, sizeof(one), &one) == 0) {
		CALL(pfm_load_context(fd, &target));
		puts("loaded by affinity");
	} else {
		/* This process may not run on the host CPU of that number. */
		target.load_pid = core;
		CALL(pfm_load_context(fd, &target));
		puts("loaded by number");
	}
	target.load_pid = 1000000000;
	FAILS(pfm_load_context(by_number, &target), ESRCH);
	CALL(pfm_start(fd, NULL));
	rest(100);
	CALL(pfm_stop(fd));
	memset(&pmd, 0, sizeof(pmd));
	CALL(pfm_read_pmds(fd, &pmd, 1));
	printf("core %d, PMD 0: %#llx\n", core, (unsigned long long)pmd.reg_value);
	CALL(pfm_unload_context(fd));
	/* Detached, it can be attached again, and another one in its place. */
	target.load_pid = core;
	CALL(pfm_load_context(by_number, &target));
	return 0;
}
