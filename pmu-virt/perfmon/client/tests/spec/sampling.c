/* Sampling with the default format: notification, mapping, parsing, restart (3.4, 3.6). */
#include "spec.h"

typedef struct {
	pfarg_ctx_t ctx;
	pfm_default_smpl_arg_t format;
} context_arg_t;

static void parse(const void *buffer, size_t size, int bodies)
{
	const pfm_default_smpl_hdr_t *header = buffer;
	const char *place = (const char *)(header + 1);
	size_t step = sizeof(pfm_default_smpl_entry_t) + 8 * (size_t)bodies, i;

	MUST(header->hdr_buf_size == size, "%zu, not %zu", header->hdr_buf_size, size);
	MUST(PFM_VERSION_MAJOR(header->hdr_version) == 1, "version %#x", header->hdr_version);
	MUST(header->hdr_count > 0, "a full buffer without a sample");
	MUST(header->hdr_cur_offs == sizeof(*header) + header->hdr_count * step,
	     "%zu samples, but the next one goes to %zu", header->hdr_count, header->hdr_cur_offs);
	for (i = 0; i < header->hdr_count; i++, place += step) {
		const pfm_default_smpl_entry_t *entry = (const void *)place;

		MUST(entry->ovfl_pmd == 0, "PMD %u overflowed", entry->ovfl_pmd);
		MUST(entry->set == 0, "in set %u", entry->set);
		MUST(entry->tid == vcpu(), "on vCPU %d", entry->tid);
		MUST(entry->last_reset_val == -period(), "the period was %llu",
		     (unsigned long long)-entry->last_reset_val);
		if (i < 3)
			printf("core %u, time stamp %llu, ip %#llx\n", entry->cpu,
			       (unsigned long long)entry->tstamp, (unsigned long long)entry->ip);
	}
	printf("%zu samples, full %llu times\n", header->hdr_count,
	       (unsigned long long)header->hdr_overflows);
}

int main(void)
{
	pfm_uuid_t uuid = PFM_DEFAULT_SMPL_UUID;
	context_arg_t arg;
	pfarg_pmc_t pmc;
	pfarg_pmd_t pmd;
	pfm_msg_t msg;
	uint64_t overflows;
	void *buffer;
	size_t size;
	int fd, round;

	memset(&arg, 0, sizeof(arg));
	memcpy(arg.ctx.ctx_smpl_uuid, uuid, sizeof(uuid));
	arg.format.buf_size = 16384;
	CALL(perfmonctl(0, PFM_CREATE_CONTEXT, &arg, 1));
	fd = arg.ctx.ctx_fd;
	size = arg.ctx.ctx_smpl_buf_size;
	MUST(size >= arg.format.buf_size, "%zu bytes", size);
	buffer = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
	MUST(buffer != MAP_FAILED, "errno %d", errno);

	memset(&pmc, 0, sizeof(pmc));
	memset(&pmd, 0, sizeof(pmd));
	pmc.reg_value = event(0);
	pmc.reg_flags = PFM_REGFL_OVFL_NOTIFY;
	pmc.reg_smpl_pmds[0] = 1 << 1;
	pmc.reg_reset_pmds[0] = 1 << 1;
	pmd.reg_value = pmd.reg_short_reset = pmd.reg_long_reset = -period();
	CALL(perfmonctl(fd, PFM_WRITE_PMCS, &pmc, 1));
	CALL(perfmonctl(fd, PFM_WRITE_PMDS, &pmd, 1));
	/* PMD 1 is recorded, and does not overflow itself. */
	memset(&pmc, 0, sizeof(pmc));
	memset(&pmd, 0, sizeof(pmd));
	pmc.reg_num = pmd.reg_num = 1;
	pmc.reg_value = event(1);
	CALL(perfmonctl(fd, PFM_WRITE_PMCS, &pmc, 1));
	CALL(perfmonctl(fd, PFM_WRITE_PMDS, &pmd, 1));
	load(fd, vcpu());
	CALL(perfmonctl(fd, PFM_START, NULL, 0));
	for (round = 0, overflows = 0; round < 3; round++) {
		msg = message(fd, PFM_MSG_OVFL);
		MUST(msg.pfm_ovfl_msg.msg_active_set == 0, "set %u", msg.pfm_ovfl_msg.msg_active_set);
		MUST(msg.pfm_ovfl_msg.msg_ovfl_pmds[0] & 1, "PMDs %#llx",
		     (unsigned long long)msg.pfm_ovfl_msg.msg_ovfl_pmds[0]);
		parse(buffer, size, 1);
		MUST(((pfm_default_smpl_hdr_t *)buffer)->hdr_overflows == ++overflows, "%llu",
		     (unsigned long long)overflows);
		CALL(perfmonctl(fd, PFM_RESTART, NULL, 0));
	}
	CALL(perfmonctl(fd, PFM_STOP, NULL, 0));
	CALL(perfmonctl(fd, PFM_UNLOAD_CONTEXT, NULL, 0));
	MUST(close(fd) == 0, "errno %d", errno);
	return 0;
}
