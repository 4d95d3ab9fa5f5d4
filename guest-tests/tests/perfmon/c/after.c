/*
 * Counts that are read after the VM's end (3.3.6, 3.1.4): what a context has counted does
 * not go with the thread that it was attached to. UMPIRE_TEST_THREAD is the number of the
 * thread that runs vCPU 0 (3.1.7).
 */
#include "spec.h"

static pfarg_pmd_t read_counter(int fd, uint16_t set)
{
	pfarg_pmd_t pmd;

	memset(&pmd, 0, sizeof(pmd));
	pmd.reg_set = set;
	CALL(pfm_read_pmds(fd, &pmd, 1));
	return pmd;
}

int main(void)
{
	int fd = create(0), detached = create(0), other;
	pfarg_pmd_t last, again, pmd;
	pfarg_setinfo_t info, before;
	pfarg_setdesc_t set;
	struct pollfd polled;
	pfarg_load_t load = { 0, 0 };

	memset(&set, 0, sizeof(set));
	memset(&before, 0, sizeof(before));
	set.set_id = 3;
	before.set_id = info.set_id = 3;
	CALL(pfm_create_evtsets(fd, &set, 1));
	program(fd, 0, 0, 0);
	program(fd, 0, 3, 0);
	program(detached, 0, 0, 0);
	load.load_pid = (pid_t)setting("UMPIRE_TEST_THREAD", NULL);
	CALL(pfm_load_context(fd, &load));
	CALL(pfm_start(fd, NULL));
	puts("counting");
	fflush(stdout);
	/* It ends without anybody reading its message first. */
	polled.fd = fd;
	polled.events = 0;
	MUST(poll(&polled, 1, 30000) == 1 && polled.revents & POLLHUP, "no end: %#x", polled.revents);
	last = read_counter(fd, 0);
	MUST(last.reg_value != -period(), "it has counted nothing");
	message(fd, PFM_MSG_END);
	again = read_counter(fd, 0);
	MUST(!memcmp(&again, &last, sizeof(last)), "%#llx", (unsigned long long)again.reg_value);
	pmd = read_counter(fd, 3);
	MUST(pmd.reg_value == -period(), "%#llx", (unsigned long long)pmd.reg_value);
	pmd = read_counter(detached, 0);
	MUST(pmd.reg_value == -period(), "%#llx", (unsigned long long)pmd.reg_value);
	CALL(pfm_getinfo_evtsets(fd, &before, 1));
	MUST(before.set_runs == 0, "%llu runs", (unsigned long long)before.set_runs);
	MUST(!*pfm_strerror_last(), "a reason after success: %s", pfm_strerror_last());
	memset(&info, 0, sizeof(info));
	info.set_id = 9;
	FAILS(pfm_getinfo_evtsets(fd, &info, 1), EINVAL);
	MUST(PFM_SET_HAS_ERROR(info.set_flags) == PFM_SET_RETFL_NOSET, "%#x", info.set_flags);
	FAILS(pfm_start(fd, NULL), EBUSY);
	FAILS(pfm_stop(detached), EBUSY);
	FAILS(pfm_restart(fd), EBUSY);
	FAILS(pfm_unload_context(fd), EBUSY);
	FAILS(pfm_load_context(fd, &load), ESRCH);
	FAILS(pfm_write_pmds(fd, &pmd, 1), ENOSYS);
	FAILS(pfm_read_pmds(fd, NULL, 1), EFAULT);
	/* Another descriptor of it, and none. */
	other = dup(fd);
	again = read_counter(other, 0);
	MUST(again.reg_value == last.reg_value, "%#llx", (unsigned long long)again.reg_value);
	MUST(close(fd) == 0, "errno %d", errno);
	FAILS(pfm_read_pmds(fd, &pmd, 1), ENOSYS);
	again = read_counter(other, 0);
	MUST(again.reg_value == last.reg_value, "%#llx", (unsigned long long)again.reg_value);
	printf("PMD 0: %#llx\n", (unsigned long long)last.reg_value);
	return 0;
}
