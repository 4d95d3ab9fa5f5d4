//! What the tables do not have: the frame of the header, its macros, the calls.

pub(crate) const BEGIN: &str = r#"/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The perfmon2 interface (HPL-2004-200 (R.1), version 0.6) as Umpire serves it:
 * docs/reference/perfmon-wire.md. A thread of the specification is a vCPU, a CPU core is a
 * thread of Umpire that runs vCPUs. Numbers behind the comments are sections of
 * the specification.
 *
 * Generated from the tables in pmu-virt/perfmon/abi: do not edit.
 */
#ifndef UMPIRE_PERFMON_H
#define UMPIRE_PERFMON_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h> /* struct timespec is POSIX: with -std=c99, define _POSIX_C_SOURCE */

#ifdef __cplusplus
extern "C" {
#endif
"#;

pub(crate) const MACROS: &str = r"
/* Elements of the vectors of bits (3.1.2, 3.1.17). */
#define PFM_MAX_PMC_BITVECTOR (((PFM_MAX_PMCS) + 64 - 1) / 64)
#define PFM_MAX_PMD_BITVECTOR (((PFM_MAX_PMDS) + 64 - 1) / 64)

/* Whether reg_flags or set_flags tell of an error (3.1.2, 3.1.10). */
#define PFM_REG_HAS_ERROR(flags) ((flags) & PFM_REG_RETFL_MASK)
#define PFM_SET_HAS_ERROR(flags) ((flags) & PFM_SET_RETFL_MASK)

/* The two halves of a version (3.1.17). */
#define PFM_VERSION_MAJOR(m) (((m) >> 16) & 0xffff)
#define PFM_VERSION_MINOR(m) ((m) & 0xffff)

/* How the value of a PMD was counted, from reg_flags after PFM_READ_PMDS. */
#define PFM_REG_PROV(flags) (((flags) & PFM_REG_RETFL_PROV_MASK) >> PFM_REG_RETFL_PROV_SHIFT)

/* A UUID (3.5.2). */
typedef unsigned char pfm_uuid_t[16];
";

pub(crate) const UNION: &str = r"
/* A message of any type (3.3.2). */
typedef union {
	uint32_t msg_type; /* PFM_MSG_* */
	pfm_ovfl_msg_t pfm_ovfl_msg;
} pfm_msg_t;
";

pub(crate) const END: &str = r#"
/*
 * Calls (3.1, 6.1). 0, or -1 with errno. They speak to the socket that the
 * environment variable UMPIRE_PERFMON names.
 */
int perfmonctl(int fd, int cmd, void *arg, int nargs);
int pfm_create_context(pfarg_ctx_t *ctx, int n);
int pfm_write_pmcs(int fd, pfarg_pmc_t *pmcs, int n);
int pfm_write_pmds(int fd, pfarg_pmd_t *pmds, int n);
int pfm_read_pmds(int fd, pfarg_pmd_t *pmds, int n);
int pfm_start(int fd, pfarg_start_t *start);
int pfm_stop(int fd);
int pfm_load_context(int fd, pfarg_load_t *load);
int pfm_unload_context(int fd);
int pfm_restart(int fd);
int pfm_create_evtsets(int fd, pfarg_setdesc_t *setdesc, int n);
int pfm_delete_evtsets(int fd, pfarg_setdesc_t *setdesc, int n);
/* 6.1.7 has pfarg_setdesc_t here, by mistake: 3.1.12 defines the argument. */
int pfm_getinfo_evtsets(int fd, pfarg_setinfo_t *setinfo, int n);
int pfm_getinfo_pmcs(pfarg_pmcinfo_t *pmcs, int n);
int pfm_getinfo_pmds(pfarg_pmdinfo_t *pmds, int n);
/*
 * Of Umpire: the sampling formats (3.5.2). Elements beyond them become 0. E2BIG: there are
 * more formats; n of them are told.
 */
int pfm_getinfo_fmts(pfarg_fmtinfo_t *fmts, int n);
int pfm_get_config(pfarg_config_t *cfg);
int pfm_set_config(pfarg_config_t *cfg);

/*
 * Of Umpire: which registers have a counter of this VM count an event. Its name is one that
 * umpire events takes: cycles:u, r5300c0, cpu/event=0xc0/, and skl::INST_RETIRED:ANY_P where
 * there is libpfm4. It returns how many PMCs there are for it, at least 1, and fills the first
 * n elements of pmcs (NULL with n = 0) as PFM_WRITE_PMCS takes them, the best first. Each counts
 * by itself, in the PMD of the same number. -1 with errno, EINVAL: the event stands for nothing
 * here, see pfm_subcode_last() and pfm_strerror_last(). EOPNOTSUPP: the library does not know
 * this PMU. EFAULT: an address is bad, or n negative. Whether somebody counts the event a write
 * or a load says. Not for signal handlers.
 */
int pfm_event_encode(const char *event, pfarg_pmc_t *pmcs, int n);

/*
 * Of Umpire: PFM_READ_PMDS on each of nfds contexts, and the sums of their values, each with
 * the provenance that says least. With a context loaded on every vCPU, also on those that have
 * not started yet, they are the counts of the VM. If one cannot be read, it fails as that read
 * does. Not for signal handlers.
 */
int pfm_read_pmds_sum(const int *fds, int nfds, pfarg_pmd_t *pmds, int n);

/*
 * Why the last call of this thread failed: one line, "" if it did not, and a PFM_SUBCODE_*.
 * The text is valid until the thread's next call.
 */
const char *pfm_strerror_last(void);
int pfm_subcode_last(void);

/* Other names that the specification itself uses, in the sections at the right. */
#ifndef PFM_NO_COMPAT
#define PFM_CONTEXT_CREATE PFM_CREATE_CONTEXT /* 3.5.3 */
#define PFM_CONTEXT_UNLOAD PFM_UNLOAD_CONTEXT /* 3.1.7 */
#define PFM_OVFL_NO_MSG PFM_FL_OVFL_NO_MSG /* 3.4.3 */
#define PFM_FL_OVFL_BLOCK PFM_FL_NOTIFY_BLOCK /* 3.5.14 */
#define PFM_OVFLMSG PFM_MSG_OVFL /* 3.3.3 */
#define PFM_OVFL_MSG PFM_MSG_OVFL /* 3.6.5 */
#define PFM_ENDMSG PFM_MSG_END /* 3.3.3 */
#define PFM_END_MSG PFM_MSG_END /* 3.3.6 */
#define DOUBLE_FMT_MASK_WHEN_FULL PFM_DOUBLE_FMT_MASK_WHEN_FULL /* 6.3.1 */
#define ctx_smpl_uuid ctx_smpl_buf_id /* 3.5.2 */
#define ct_smpl_buf_size ctx_smpl_buf_size /* 3.5.4 */
#define reg_last_reset reg_last_reset_val /* 3.4.2 */
#define set_active_duration set_act_duration /* 3.1.12 */
#define cf_sys_group cf_sys_gid /* 4.2 */
#define cf_thread_group cf_thread_gid /* 4.2 */
#define hdr_cur_pos hdr_cur_offs /* 3.6.5 */
typedef pfm_msg_t pfmon_msg_t; /* 3.3.3 */
#endif

#ifdef __cplusplus
}
#endif

#endif /* UMPIRE_PERFMON_H */
"#;
