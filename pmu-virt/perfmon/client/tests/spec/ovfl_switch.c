/* Event sets that switch when a counter overflows (3.7.6). */
#include "spec.h"

int main(void)
{
	pfarg_setdesc_t sets[2];
	pfarg_setinfo_t infos[2];
	int fd = create(0), i;

	memset(sets, 0, sizeof(sets));
	for (i = 0; i < 2; i++) {
		sets[i].set_id = (uint16_t)i;
		sets[i].set_flags = PFM_SETFL_OVFL_SWITCH;
	}
	CALL(perfmonctl(fd, PFM_CREATE_EVTSETS, sets, 2));
	for (i = 0; i < 2; i++)
		program(fd, 0, (uint16_t)i, 0);
	load(fd, vcpu());
	memset(infos, 0, sizeof(infos));
	infos[1].set_id = 1;
	CALL(perfmonctl(fd, PFM_GETINFO_EVTSETS, infos, 2));
	MUST(infos[0].set_runs == 1, "the set that was loaded has %llu runs",
	     (unsigned long long)infos[0].set_runs);
	MUST(!infos[0].set_switch_pmds[0] && !infos[1].set_switch_pmds[0], "not reset by the load");
	CALL(perfmonctl(fd, PFM_START, NULL, 0));
	rest(300);
	CALL(perfmonctl(fd, PFM_UNLOAD_CONTEXT, NULL, 0));
	/* On input set_flags is reserved (3.1.12), and the sets' flags are in it. */
	FAILS(perfmonctl(fd, PFM_GETINFO_EVTSETS, infos, 2), EINVAL);
	infos[0].set_flags = infos[1].set_flags = 0;
	CALL(perfmonctl(fd, PFM_GETINFO_EVTSETS, infos, 2));
	for (i = 0; i < 2; i++) {
		printf("set %d: %llu runs\n", i, (unsigned long long)infos[i].set_runs);
		MUST(infos[i].set_runs > 1, "set %d does not come again", i);
		MUST(infos[i].set_switch_pmds[0] == 1, "PMDs %#llx switched",
		     (unsigned long long)infos[i].set_switch_pmds[0]);
		MUST(!infos[i].set_timeout.tv_sec && !infos[i].set_timeout.tv_nsec, "a timeout");
	}
	return 0;
}
