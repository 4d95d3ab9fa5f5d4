/* Event sets that switch by time (3.1.10 to 3.1.12, 3.7.6). */
#include "spec.h"

int main(void)
{
	pfarg_setdesc_t sets[3], bad[2];
	pfarg_setinfo_t infos[3];
	pfarg_pmd_t pmds[3];
	pfarg_start_t start;
	int fd = create(0), i;

	memset(sets, 0, sizeof(sets));
	for (i = 0; i < 3; i++) {
		/* Set 0 exists and is changed; numbers may have holes. */
		sets[i].set_id = (uint16_t)(5 * i);
		sets[i].set_flags = PFM_SETFL_TIME_SWITCH;
		sets[i].set_timeout.tv_nsec = 1000001;
	}
	CALL(perfmonctl(fd, PFM_CREATE_EVTSETS, sets, 3));
	for (i = 0; i < 3; i++)
		MUST(sets[i].set_timeout.tv_sec > 0 || sets[i].set_timeout.tv_nsec >= 1000001,
		     "the effective timeout is %ld ns", sets[i].set_timeout.tv_nsec);
	for (i = 0; i < 3; i++)
		program(fd, 0, (uint16_t)(5 * i), 0);

	memset(bad, 0, sizeof(bad));
	FAILS(perfmonctl(fd, PFM_DELETE_EVTSETS, bad, 1), EINVAL);
	MUST(PFM_SET_HAS_ERROR(bad[0].set_flags), "set 0 was deleted");
	bad[0].set_id = 77;
	FAILS(perfmonctl(fd, PFM_DELETE_EVTSETS, bad, 1), EINVAL);
	MUST(PFM_SET_HAS_ERROR(bad[0].set_flags) == PFM_SET_RETFL_NOSET, "flags %#x",
	     bad[0].set_flags);
	bad[1].set_id = 78;
	CALL(perfmonctl(fd, PFM_CREATE_EVTSETS, &bad[1], 1));
	CALL(perfmonctl(fd, PFM_DELETE_EVTSETS, &bad[1], 1));

	load(fd, vcpu());
	FAILS(perfmonctl(fd, PFM_CREATE_EVTSETS, sets, 1), EBUSY);
	FAILS(perfmonctl(fd, PFM_DELETE_EVTSETS, &sets[2], 1), EBUSY);
	start.start_set = 5;
	CALL(perfmonctl(fd, PFM_START, &start, 1));
	rest(200);
	CALL(perfmonctl(fd, PFM_STOP, NULL, 0));
	memset(infos, 0, sizeof(infos));
	memset(pmds, 0, sizeof(pmds));
	for (i = 0; i < 3; i++)
		infos[i].set_id = pmds[i].reg_set = (uint16_t)(5 * i);
	CALL(perfmonctl(fd, PFM_UNLOAD_CONTEXT, NULL, 0));
	CALL(perfmonctl(fd, PFM_GETINFO_EVTSETS, infos, 3));
	CALL(perfmonctl(fd, PFM_READ_PMDS, pmds, 3));
	for (i = 0; i < 3; i++) {
		printf("set %u: %llu runs, %ld.%09ld s, %llu\n", infos[i].set_id,
		       (unsigned long long)infos[i].set_runs, (long)infos[i].set_act_duration.tv_sec,
		       infos[i].set_act_duration.tv_nsec,
		       (unsigned long long)(pmds[i].reg_value + period()));
		MUST(infos[i].set_runs > 1, "set %u does not come again", infos[i].set_id);
		MUST(infos[i].set_flags == PFM_SETFL_TIME_SWITCH, "flags %#x", infos[i].set_flags);
		MUST(infos[i].set_act_duration.tv_sec || infos[i].set_act_duration.tv_nsec,
		     "set %u was never active", infos[i].set_id);
		MUST(!infos[i].set_switch_pmds[0], "PMDs that switched, though time did");
	}
	return 0;
}
