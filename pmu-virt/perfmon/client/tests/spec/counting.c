/* A counting session: 3.1.1 to 3.1.8, and the errors of each. */
#include "spec.h"

int main(void)
{
	pfarg_pmc_t pmcs[2];
	pfarg_pmd_t pmds[2], again[2], bad[3];
	pfarg_load_t target;
	int fd, i;

	memset(pmcs, 0, sizeof(pmcs));
	memset(pmds, 0, sizeof(pmds));
	fd = create(0);
	for (i = 0; i < 2; i++) {
		pmcs[i].reg_num = pmds[i].reg_num = (uint16_t)i;
		pmcs[i].reg_value = event(i);
	}
	CALL(perfmonctl(fd, PFM_WRITE_PMCS, pmcs, 2));
	CALL(perfmonctl(fd, PFM_WRITE_PMDS, pmds, 2));
	CALL(perfmonctl(fd, PFM_READ_PMDS, pmds, 2));
	MUST(!pmds[0].reg_value && !pmds[1].reg_value, "a counter begins with a count");

	FAILS(perfmonctl(fd, PFM_START, NULL, 0), EBUSY);
	FAILS(perfmonctl(fd, PFM_STOP, NULL, 0), EBUSY);
	FAILS(perfmonctl(fd, PFM_WRITE_PMCS, pmcs, 0), EFAULT);
	FAILS(perfmonctl(fd, PFM_WRITE_PMCS, pmcs, -1), EFAULT);
	FAILS(perfmonctl(fd, PFM_WRITE_PMCS, pmcs, 1 << 24), EFAULT);
	FAILS(perfmonctl(fd, PFM_WRITE_PMCS, NULL, 1), EFAULT);
	FAILS(perfmonctl(fd, PFM_WRITE_PMCS, (void *)16, 1), EFAULT);
	FAILS(perfmonctl(fd, 99, NULL, 0), EINVAL);
	FAILS(perfmonctl(fd, -1, NULL, 0), EINVAL);
	FAILS(perfmonctl(-1, PFM_STOP, NULL, 0), EBADF);
	FAILS(perfmonctl(0, PFM_STOP, NULL, 0), EBADF);
	FAILS(perfmonctl(1000000000, PFM_STOP, NULL, 0), EBADF);
	FAILS(perfmonctl(0, PFM_CREATE_CONTEXT, NULL, 1), EFAULT);
	FAILS(perfmonctl(0, PFM_CREATE_CONTEXT, pmcs, 2), EINVAL);
	memset(&target, 0, sizeof(target));
	target.load_pid = vcpu();
	FAILS(perfmonctl(fd, PFM_LOAD_CONTEXT, &target, 2), EFAULT);
	target.load_pid = 1000000;
	FAILS(perfmonctl(fd, PFM_LOAD_CONTEXT, &target, 1), ESRCH);

	/* The middle one of three is bad: the first is read, the last is not. */
	memset(bad, 0, sizeof(bad));
	bad[1].reg_num = PFM_MAX_PMDS;
	FAILS(perfmonctl(fd, PFM_READ_PMDS, bad, 3), EINVAL);
	MUST(!PFM_REG_HAS_ERROR(bad[0].reg_flags), "flags %#x", bad[0].reg_flags);
	MUST(PFM_REG_HAS_ERROR(bad[1].reg_flags) == PFM_REG_RETFL_NOTAVAIL, "flags %#x",
	     bad[1].reg_flags);
	MUST(!PFM_REG_HAS_ERROR(bad[2].reg_flags), "flags %#x", bad[2].reg_flags);

	load(fd, vcpu());
	target.load_pid = vcpu();
	FAILS(perfmonctl(fd, PFM_LOAD_CONTEXT, &target, 1), EBUSY);
	FAILS(perfmonctl(fd, PFM_START, pmcs, 0), EFAULT);
	FAILS(perfmonctl(fd, PFM_START, NULL, 1), EFAULT);
	CALL(perfmonctl(fd, PFM_START, NULL, 0));
	rest(100);
	CALL(perfmonctl(fd, PFM_STOP, NULL, 0));
	CALL(perfmonctl(fd, PFM_READ_PMDS, pmds, 2));
	rest(20);
	memcpy(again, pmds, sizeof(again));
	CALL(perfmonctl(fd, PFM_READ_PMDS, again, 2));
	for (i = 0; i < 2; i++) {
		printf("PMD %d: %llu, counted by %u\n", i, (unsigned long long)pmds[i].reg_value,
		       PFM_REG_PROV(pmds[i].reg_flags));
		MUST(again[i].reg_value == pmds[i].reg_value, "PMD %d goes on after PFM_STOP", i);
	}
	CALL(perfmonctl(fd, PFM_UNLOAD_CONTEXT, NULL, 0));
	CALL(perfmonctl(fd, PFM_READ_PMDS, again, 2));
	MUST(again[0].reg_value == pmds[0].reg_value, "PFM_UNLOAD_CONTEXT loses counts");
	MUST(close(fd) == 0, "errno %d", errno);
	FAILS(perfmonctl(fd, PFM_STOP, NULL, 0), EBADF);
	return 0;
}
