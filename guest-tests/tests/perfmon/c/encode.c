/*
 * An event by its name: `encode EVENT N`. Each of the N PMCs that there are for it counts, on
 * both vCPUs, and the VM's count is the sum of theirs.
 */
#include "spec.h"

#define MOST 16

int main(int argc, char **argv)
{
	pfarg_pmc_t pmcs[MOST];
	int n, i, cpu, tries;

	MUST(argc == 3, "encode EVENT N");
	n = pfm_event_encode(argv[1], pmcs, MOST);
	MUST(n == atoi(argv[2]), "%d PMCs: %s", n, pfm_strerror_last());
	for (i = 0; i < n; i++) {
		int fds[2] = { create(0), create(0) };
		uint64_t sum = 0;
		pfarg_pmd_t pmd;

		printf("PMC %u: %#llx\n", pmcs[i].reg_num, (unsigned long long)pmcs[i].reg_value);
		for (cpu = 0; cpu < 2; cpu++) {
			memset(&pmd, 0, sizeof(pmd));
			pmd.reg_num = pmcs[i].reg_num;
			CALL(pfm_write_pmcs(fds[cpu], &pmcs[i], 1));
			CALL(pfm_write_pmds(fds[cpu], &pmd, 1));
			load(fds[cpu], cpu);
			CALL(pfm_start(fds[cpu], NULL));
			for (tries = 0; tries < 10000 && !pmd.reg_value; tries++) {
				rest(1);
				CALL(pfm_read_pmds(fds[cpu], &pmd, 1));
			}
			CALL(pfm_stop(fds[cpu]));
			CALL(pfm_read_pmds(fds[cpu], &pmd, 1));
			MUST(pmd.reg_value > 0, "PMD %u does not count", pmd.reg_num);
			sum += pmd.reg_value;
		}
		CALL(pfm_read_pmds_sum(fds, 2, &pmd, 1));
		MUST(pmd.reg_value == sum, "%llu", (unsigned long long)pmd.reg_value);
		MUST(PFM_REG_PROV(pmd.reg_flags) == PFM_PROV_SIMULATED, "flags %#x", pmd.reg_flags);
		MUST(close(fds[0]) == 0 && close(fds[1]) == 0, "errno %d", errno);
	}
	/* What is not a counter's. */
	FAILS(pfm_event_encode("vm-exits", pmcs, MOST), EINVAL);
	MUST(strstr(pfm_strerror_last(), "PMD 64") != NULL, "%s", pfm_strerror_last());
	return 0;
}
