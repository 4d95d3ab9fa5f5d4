/* The separate calls of 6.1, and the properties of the interface (3.1.13 to 3.1.17). */
#include "spec.h"

int main(void)
{
	pfarg_ctx_t context;
	pfarg_config_t config;
	pfarg_pmc_t pmc;
	pfarg_pmd_t pmd;
	pfarg_start_t start = { 0 };
	pfarg_load_t target = { 0, 0 };
	pfarg_setdesc_t set;
	pfarg_setinfo_t info;
	int fd, i;

	memset(&config, 0xff, sizeof(config));
	CALL(pfm_get_config(&config));
	printf("version %u.%u, counters of %u bits, arguments of %zu bytes\n",
	       PFM_VERSION_MAJOR(config.cf_version), PFM_VERSION_MINOR(config.cf_version),
	       config.cf_counter_width, config.cf_arg_size_max);
	MUST(config.cf_version == PFM_VERSION, "version %#x", config.cf_version);
	MUST(config.cf_impl_pmcs[0] & 1, "there is no PMC 0");
	MUST(config.cf_impl_pmds[0] & 1, "there is no PMD 0");
	MUST(config.cf_arg_size_max >= 4096, "%zu", config.cf_arg_size_max);
	FAILS(perfmonctl(0, PFM_GET_CONFIG, &config, 2), EFAULT);
	FAILS(pfm_set_config(NULL), EFAULT);

	for (i = 0; i < PFM_MAX_PMCS; i++) {
		pfarg_pmcinfo_t pmcinfo;
		int there = config.cf_impl_pmcs[i / 64] >> i % 64 & 1;

		memset(&pmcinfo, 0, sizeof(pmcinfo));
		pmcinfo.reg_num = (uint16_t)i;
		if (there) {
			CALL(pfm_getinfo_pmcs(&pmcinfo, 1));
			printf("PMC %d: type %u, %#zx\n", i, pmcinfo.reg_type, pmcinfo.reg_index);
		} else {
			FAILS(pfm_getinfo_pmcs(&pmcinfo, 1), EINVAL);
			MUST(PFM_REG_HAS_ERROR(pmcinfo.reg_flags), "PMC %d has no flag", i);
		}
	}
	for (i = 0; i < 2; i++) {
		pfarg_pmdinfo_t pmdinfo;

		memset(&pmdinfo, 0, sizeof(pmdinfo));
		pmdinfo.reg_num = (uint16_t)i;
		CALL(pfm_getinfo_pmds(&pmdinfo, 1));
		MUST(pmdinfo.reg_def_value == 0, "a counter's default is %llu",
		     (unsigned long long)pmdinfo.reg_def_value);
	}

	memset(&context, 0, sizeof(context));
	FAILS(pfm_create_context(&context, 2), EINVAL);
	CALL(pfm_create_context(&context, 1));
	fd = context.ctx_fd;
	memset(&set, 0, sizeof(set));
	set.set_id = 3;
	CALL(pfm_create_evtsets(fd, &set, 1));
	memset(&info, 0, sizeof(info));
	info.set_id = 3;
	CALL(pfm_getinfo_evtsets(fd, &info, 1));
	CALL(pfm_delete_evtsets(fd, &set, 1));
	FAILS(pfm_getinfo_evtsets(fd, &info, 1), EINVAL);
	MUST(PFM_SET_HAS_ERROR(info.set_flags) == PFM_SET_RETFL_NOSET, "flags %#x", info.set_flags);
	memset(&pmc, 0, sizeof(pmc));
	memset(&pmd, 0, sizeof(pmd));
	pmc.reg_value = event(0);
	CALL(pfm_write_pmcs(fd, &pmc, 1));
	CALL(pfm_write_pmds(fd, &pmd, 1));
	target.load_pid = vcpu();
	CALL(pfm_load_context(fd, &target));
	FAILS(pfm_load_context(fd, &target), EBUSY);
	MUST(*pfm_strerror_last(), "EBUSY without a reason");
	CALL(pfm_start(fd, NULL));
	MUST(!*pfm_strerror_last(), "a reason after success: %s", pfm_strerror_last());
	CALL(pfm_stop(fd));
	CALL(pfm_start(fd, &start));
	rest(20);
	CALL(pfm_read_pmds(fd, &pmd, 1));
	printf("PMD 0: %llu\n", (unsigned long long)pmd.reg_value);
	CALL(pfm_stop(fd));
	CALL(pfm_unload_context(fd));
	FAILS(pfm_restart(fd), EBUSY);
	MUST(close(fd) == 0, "errno %d", errno);
	FAILS(pfm_stop(fd), EBADF);
	return 0;
}
