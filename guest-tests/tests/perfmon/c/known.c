/*
 * Counts that are known. PMC 0 and PMC 1 count events that come at fixed rates,
 * whatever the guest does: UMPIRE_TEST_RATE and UMPIRE_TEST_RATE2 in a
 * microsecond of the vCPU's time.
 */
#include "spec.h"

#define RUN_TIME 72

static uint64_t now(void)
{
	struct timespec time;

	MUST(clock_gettime(CLOCK_MONOTONIC, &time) == 0, "errno %d", errno);
	return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static void about(const char *what, uint64_t is, uint64_t least, uint64_t most)
{
	printf("%s: %llu, expected %llu to %llu\n", what, (unsigned long long)is,
	       (unsigned long long)least, (unsigned long long)most);
	MUST(is >= least && is <= most, "%s: %llu, expected %llu to %llu", what,
	     (unsigned long long)is, (unsigned long long)least, (unsigned long long)most);
}

/* PMD 0, PMD 1 and the vCPU's time. */
static void counts(int fd, uint64_t values[3])
{
	pfarg_pmd_t pmds[3];
	int i;

	memset(pmds, 0, sizeof(pmds));
	pmds[1].reg_num = 1;
	pmds[2].reg_num = RUN_TIME;
	CALL(pfm_read_pmds(fd, pmds, 3));
	for (i = 0; i < 3; i++)
		values[i] = pmds[i].reg_value;
	/* Where nobody has counted yet, it says so. */
	MUST(PFM_REG_PROV(pmds[0].reg_flags) ==
		     (values[0] ? PFM_PROV_SIMULATED : PFM_PROV_NOT_COUNTED),
	     "flags %#x", pmds[0].reg_flags);
}

int main(void)
{
	uint64_t rate = setting("UMPIRE_TEST_RATE", NULL), rate2 = setting("UMPIRE_TEST_RATE2", NULL);
	uint64_t first[3], last[3], began, took, overflows;
	int fd = create(0), i;

	/* Without overflows. */
	for (i = 0; i < 2; i++) {
		pfarg_pmc_t pmc;
		pfarg_pmd_t pmd;

		memset(&pmc, 0, sizeof(pmc));
		memset(&pmd, 0, sizeof(pmd));
		pmc.reg_num = pmd.reg_num = (uint16_t)i;
		pmc.reg_value = event(i);
		CALL(pfm_write_pmcs(fd, &pmc, 1));
		CALL(pfm_write_pmds(fd, &pmd, 1));
	}
	load(fd, vcpu());
	counts(fd, first);
	MUST(!first[0] && !first[1], "it counts before PFM_START");
	began = now();
	CALL(pfm_start(fd, NULL));
	rest(100);
	counts(fd, first);
	rest(100);
	counts(fd, last);
	CALL(pfm_stop(fd));
	took = now() - began;
	/* Two totals were rounded down, at the start and here. */
	about("PMD 1", last[1], last[0] * rate2 / rate - 1, last[0] * rate2 / rate + 1);
	about("PMD 0", last[0], 1, took * rate / 1000);
	/*
	 * What the VMM does at each beat of the guest's heart is the vCPU's time and not the
	 * guest's: an eighth, on a machine whose caches miss often.
	 */
	about("PMD 0 in the vCPU's time", last[0] - first[0],
	      (last[2] - first[2]) * rate / 1000 * 3 / 4,
	      (last[2] - first[2]) * rate / 1000 * 11 / 10);
	counts(fd, first);
	rest(20);
	counts(fd, last);
	MUST(first[0] == last[0] && first[1] == last[1], "it counts after PFM_STOP");
	MUST(last[2] > first[2], "the vCPU does not run");

	/* Every period is a message; PMD 1 counts through. */
	CALL(pfm_unload_context(fd));
	program(fd, 0, 0, PFM_REGFL_OVFL_NOTIFY);
	{
		pfarg_pmd_t pmd;

		memset(&pmd, 0, sizeof(pmd));
		pmd.reg_num = 1;
		CALL(pfm_write_pmds(fd, &pmd, 1));
	}
	load(fd, vcpu());
	began = now();
	CALL(pfm_start(fd, NULL));
	for (overflows = 0; overflows < 50; overflows++) {
		message(fd, PFM_MSG_OVFL);
		counts(fd, last);
		/* Masked: it has wrapped, and waits for its long reset. */
		MUST(last[0] < period(), "PMD 0 is %#llx", (unsigned long long)last[0]);
		MUST((overflows + 1) * period() <= last[1] * rate / rate2 + rate / rate2,
		     "%llu overflows of PMD 0, and PMD 1 is %llu", (unsigned long long)overflows + 1,
		     (unsigned long long)last[1]);
		CALL(pfm_restart(fd));
	}
	CALL(pfm_stop(fd));
	took = now() - began;
	counts(fd, last);
	about("PMD 1 of 50 overflows", last[1], 50 * period() * rate2 / rate - 1, took * rate2 / 1000);
	return 0;
}
