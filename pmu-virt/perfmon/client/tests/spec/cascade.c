/* Cascading (3.7.2): after a period of one event, another one is counted. */
#include "spec.h"

int main(void)
{
	pfarg_setdesc_t sets[2];
	pfarg_setinfo_t infos[2];
	pfarg_pmc_t pmc;
	pfarg_pmd_t pmds[2];
	int fd = create(0);

	memset(sets, 0, sizeof(sets));
	sets[0].set_flags = PFM_SETFL_OVFL_SWITCH | PFM_SETFL_EXPL_NEXT;
	sets[0].set_id_next = 9;
	sets[1].set_id = 9;
	CALL(perfmonctl(fd, PFM_CREATE_EVTSETS, sets, 2));
	program(fd, 0, 0, 0);
	memset(&pmc, 0, sizeof(pmc));
	memset(pmds, 0, sizeof(pmds));
	pmc.reg_num = pmds[1].reg_num = 1;
	pmc.reg_set = pmds[1].reg_set = 9;
	pmc.reg_value = event(1);
	CALL(perfmonctl(fd, PFM_WRITE_PMCS, &pmc, 1));
	load(fd, vcpu());
	CALL(perfmonctl(fd, PFM_START, NULL, 0));
	rest(300);
	CALL(perfmonctl(fd, PFM_UNLOAD_CONTEXT, NULL, 0));
	memset(infos, 0, sizeof(infos));
	infos[1].set_id = 9;
	CALL(perfmonctl(fd, PFM_GETINFO_EVTSETS, infos, 2));
	CALL(perfmonctl(fd, PFM_READ_PMDS, pmds, 2));
	printf("set 0: %llu runs; set 9: %llu runs, %llu\n", (unsigned long long)infos[0].set_runs,
	       (unsigned long long)infos[1].set_runs, (unsigned long long)pmds[1].reg_value);
	MUST(infos[0].set_switch_pmds[0] == 1, "PMDs %#llx switched",
	     (unsigned long long)infos[0].set_switch_pmds[0]);
	MUST(infos[1].set_runs == 1, "set 9 has %llu runs", (unsigned long long)infos[1].set_runs);
	MUST(pmds[1].reg_value > 0, "nothing was counted after the switch");

	/* A chain that leads nowhere is found when the context is loaded. */
	CALL(perfmonctl(fd, PFM_DELETE_EVTSETS, &sets[1], 1));
	{
		pfarg_load_t target = { vcpu(), 0 };

		FAILS(perfmonctl(fd, PFM_LOAD_CONTEXT, &target, 1), EINVAL);
	}
	return 0;
}
