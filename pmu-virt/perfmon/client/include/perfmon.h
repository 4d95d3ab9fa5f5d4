/* SPDX-License-Identifier: Apache-2.0 OR MIT */
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

#define PFM_MAX_PMCS 128 /* PMC indices lie below this. */
#define PFM_MAX_PMDS 128 /* PMD indices lie below this. */
#define PFM_CREATE_CONTEXT 1 /* Command: create a context (3.1.1). */
#define PFM_WRITE_PMCS 2 /* Command: program PMC registers (3.1.2). */
#define PFM_WRITE_PMDS 3 /* Command: program PMD registers (3.1.3). */
#define PFM_READ_PMDS 4 /* Command: read PMD registers (3.1.4). */
#define PFM_START 5 /* Command: activate monitoring (3.1.5). */
#define PFM_STOP 6 /* Command: stop monitoring (3.1.6). */
#define PFM_LOAD_CONTEXT 7 /* Command: attach a context (3.1.7). */
#define PFM_UNLOAD_CONTEXT 8 /* Command: detach a context (3.1.8). */
#define PFM_RESTART 9 /* Command: go on after a notification (3.1.9). */
#define PFM_CREATE_EVTSETS 10 /* Command: create or change event sets (3.1.10). */
#define PFM_DELETE_EVTSETS 11 /* Command: delete event sets (3.1.11). */
#define PFM_GETINFO_EVTSETS 12 /* Command: ask about event sets (3.1.12). */
#define PFM_GETINFO_PMCS 13 /* Command: ask about PMC registers (3.1.13). */
#define PFM_GETINFO_PMDS 14 /* Command: ask about PMD registers (3.1.14). */
#define PFM_SET_CONFIG 15 /* Command: change properties of the interface (3.1.16). */
#define PFM_GET_CONFIG 16 /* Command: ask for properties of the interface (3.1.17). */
#define PFM_TRY_LOAD 277 /* Command of Umpire: attach a context, EAGAIN where that waits for an owner's answer. */
#define PFM_GETINFO_FMTS 272 /* Command of Umpire: ask for the sampling formats (3.5.2). */
#define PFM_FL_NOTIFY_BLOCK 0x1 /* Context flag: a notification takes the vCPU off its core. */
#define PFM_FL_SYSTEM_WIDE 0x2 /* Context flag: for a core, not for a vCPU. */
#define PFM_FL_OVFL_NO_MSG 0x80 /* Context flag: overflows signal, without a message. */
#define PFM_FL_PREEMPTIBLE 0x10000 /* Context flag of Umpire: others may take its counters for a time (6.5). */
#define PFM_FL_NO_ASK 0x20000 /* Context flag of Umpire: a load that finds no room fails at once; no owner of reserved counters is asked. */
#define PFM_REGFL_OVFL_NOTIFY 0x1 /* PMC flag: an overflow notifies. */
#define PFM_REGFL_RANDOM 0x2 /* PMC flag: reset values are randomised. */
#define PFM_REGFL_NO_64BIT_EMUL 0x4 /* PMC flag: the counter is as wide as the hardware's (6.2.1). */
#define PFM_REGFL_READ_RESET 0x8 /* PMD flag of PFM_READ_PMDS: reset after reading (6.2.2). */
#define PFM_REG_RETFL_NOTAVAIL 0x80000000U /* Return flag: there is no such register. */
#define PFM_REG_RETFL_EINVAL 0x40000000 /* Return flag: the value is not valid. */
#define PFM_REG_RETFL_NOSET 0x20000000 /* Return flag: there is no such event set. */
#define PFM_REG_RETFL_MASK 0xe0000000U /* All return flags that tell of an error. */
#define PFM_REG_RETFL_PROV_MASK 0xf000000 /* Return field of Umpire: how the value was counted. */
#define PFM_REG_RETFL_PROV_SHIFT 24 /* Place of this field. */
#define PFM_PROV_NONE 0 /* How counted: it is no counter. */
#define PFM_PROV_EXACT 1 /* How counted: every event was seen. */
#define PFM_PROV_HARDWARE 2 /* How counted: by a physical counter. */
#define PFM_PROV_SCALED 3 /* How counted: extrapolated by the counter's source. */
#define PFM_PROV_DERIVED 4 /* How counted: computed from another quantity. */
#define PFM_PROV_SIMULATED 5 /* How counted: made up, by a declared rate or as ticks of virtual time. */
#define PFM_PROV_NOT_COUNTED 6 /* How counted: nobody has counted yet; the value is the one that was written. */
#define PFM_PROV_LOST 7 /* How counted: somebody did, but not all the time that it was to count. */
#define PFM_REG_TYPE_PMC 0x1 /* Register type: a PMC of the processor. */
#define PFM_REG_TYPE_MSR 0x2 /* Register type: an MSR; the index is its address. */
#define PFM_REG_TYPE_SPR 0x3 /* Register type: a special purpose register. */
#define PFM_REG_TYPE_IBR 0x4 /* Register type: an instruction breakpoint register. */
#define PFM_REG_TYPE_DBR 0x5 /* Register type: a data breakpoint register. */
#define PFM_REG_TYPE_PMD 0x6 /* Register type: a PMD of the processor. */
#define PFM_REG_TYPE_VIRTUAL 0x100 /* Register type of Umpire: a quantity of the VMM (3.2.2). */
#define PFM_REG_IDX_NONE 0xffffffffffffffffULL /* Register index: the type alone describes it. */
#define PFM_SETFL_OVFL_SWITCH 0x1 /* Set flag: overflows switch to the next set. */
#define PFM_SETFL_TIME_SWITCH 0x2 /* Set flag: a timeout switches to the next set. */
#define PFM_SETFL_EXPL_NEXT 0x4 /* Set flag: set_id_next says which one is next. */
#define PFM_SETFL_EXCL_IDLE 0x8 /* Set flag: time in which no vCPU runs is not monitored. */
#define PFM_SETFL_EXCL_KERNEL_ONLY_THREADS 0x10 /* Set flag that is refused: a core runs vCPUs only (6.2.3). */
#define PFM_SET_RETFL_EINVAL 0x40000000 /* Return flag: the set's description is not valid. */
#define PFM_SET_RETFL_NOSET 0x20000000 /* Return flag: there is no such event set. */
#define PFM_SET_RETFL_MASK 0x60000000 /* All return flags of sets. */
#define PFM_MSG_OVFL 0x1 /* Message: counters overflowed. */
#define PFM_MSG_END 0x2 /* Message: the vCPU or the VM has ended; the context is detached. */
#define PFM_MSG_PREEMPTED 0x100 /* Message of Umpire: the context's counters were taken (6.5). */
#define PFM_MSG_RESTORED 0x101 /* Message of Umpire: it has them again; tells the blind spot. */
#define PFM_MSG_THROTTLED 0x102 /* Message of Umpire: too many overflows, monitoring is masked (4.4.4). */
#define PFM_FMTFL_NOSET 0x1 /* Format flag: contexts that use it have set 0 only (3.5.7). */
#define PFM_GROUP_ANY 0xffffffffU /* Group: any user. */
#define PFM_VERSION 6 /* Version of the specification, major number in bits 31:16: 0.6. */
#define PFM_SUBCODE_NONE 0 /* Sub-code of Umpire: nothing more is known. */
#define PFM_SUBCODE_INVALID_EVENT 1 /* Sub-code of Umpire: the processor does not have the event. */
#define PFM_SUBCODE_INVALID_PICNUM 2 /* Sub-code of Umpire: there is no such counter or register. */
#define PFM_SUBCODE_INVALID_ATTRIBUTE 3 /* Sub-code of Umpire: there is no such attribute, or not for this event. */
#define PFM_SUBCODE_ATTRIBUTE_OUT_OF_RANGE 4 /* Sub-code of Umpire: the value of an attribute is not possible. */
#define PFM_SUBCODE_RESOURCE_UNAVAIL 5 /* Sub-code of Umpire: no counter is left, or somebody has taken it. */
#define PFM_SUBCODE_PIC_NOT_CAPABLE 6 /* Sub-code of Umpire: nobody here counts the event. */
#define PFM_SUBCODE_INVALID_FLAGS 7 /* Sub-code of Umpire: flags that there are not. */
#define PFM_SUBCODE_CONFLICTING_REQS 8 /* Sub-code of Umpire: what was asked for does not go together. */
#define PFM_SUBCODE_REQUIRES_PRIVILEGE 9 /* Sub-code of Umpire: the user may not. */
#define PFM_SUBCODE_BIND_FAILED 10 /* Sub-code of Umpire: there is nothing to attach to, or it cannot be reached. */
#define PFM_SUBCODE_HV_NO_ACCESS 11 /* Sub-code of Umpire: the VM's event filter denies the event. */
#define PFM_DFL_SMPL_NO_HDR 0x1 /* Default format: samples have no header. */
#define PFM_DFL_SMPL_IIP_HDR 0x2 /* Default format: the header is the instruction pointer alone. */
#define PFM_DFL_SMPL_VERSION 0x10000 /* Version of the default format, major number in bits 31:16. */
#define PFM_DOUBLE_FMT_MASK_WHEN_FULL 0x100 /* Double buffer: monitoring is masked when both halves are full. */
#define PFM_DOUBLE_SMPL_VERSION 0x10000 /* Version of the double buffer, major number in bits 31:16. */
#define PFM_DOUBLE_HALF_FREE 0 /* State of a half: nobody's, its samples were dealt with. */
#define PFM_DOUBLE_HALF_ACTIVE 1 /* State of a half: samples go there. */
#define PFM_DOUBLE_HALF_FULL 2 /* State of a half: the tool's, until PFM_RESTART. */
#define UMPIRE_COMPACT_VERSION 0x10000 /* Version of the compact format, major number in bits 31:16. */
#define UMPIRE_COMPACT_MAX_BLOCK 0x100000 /* Compact format: most bytes of a block. */
#define UMPIRE_COMPACT_SOURCE 1 /* Compact sample: set, PMD and event id follow. */
#define UMPIRE_COMPACT_PLACE 2 /* Compact sample: VM, vCPU and core follow. */
#define UMPIRE_COMPACT_RESET 4 /* Compact sample: the last reset value follows. */
#define UMPIRE_COMPACT_BODY 8 /* Compact sample: the vector of recorded PMDs follows. */
#define UMPIRE_COMPACT_TASK 16 /* Compact sample: the numbers of task and mapping follow. */
#define UMPIRE_COMPACT_CHAIN 32 /* Compact sample: the callers follow. */
#define UMPIRE_COMPACT_STACK 64 /* Compact sample: the top of the program's stack follows. */
#define UMPIRE_COMPACT_FL_TASK 0x1 /* Compact format: samples tell the guest's task, as far as it is known. */
#define UMPIRE_COMPACT_FL_CHAIN 0x2 /* Compact format: samples tell their callers, as far as these are known. */
#define UMPIRE_COMPACT_FL_STACK_MASK 0xffff0000U /* Compact format, beside UMPIRE_COMPACT_FL_CHAIN: so many bytes of the program's stack, a multiple of 8; 0: none. */
#define UMPIRE_COMPACT_FL_STACK_SHIFT 16 /* Place of this field. */

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

/* What a context is to be like (3.1.1). The sampling format's own argument follows it. */
typedef struct {
	uint32_t ctx_flags; /* PFM_FL_*. */
	int ctx_fd; /* On return: the descriptor of the context. */
	pfm_uuid_t ctx_smpl_buf_id; /* UUID of the sampling format; all 0: none. */
	size_t ctx_smpl_buf_size; /* On return: size of the sampling buffer in bytes; 0: there is none. */
} pfarg_ctx_t;

/* A PMC of a set, to be written (3.1.2). */
typedef struct {
	uint16_t reg_num; /* Index of the PMC. */
	uint16_t reg_set; /* Event set. */
	uint32_t reg_flags; /* PFM_REGFL_*; on return also PFM_REG_RETFL_*. */
	uint64_t reg_value; /* Value of the register. */
	uint64_t reg_reset_pmds[PFM_MAX_PMD_BITVECTOR]; /* PMDs to be reset when the counter overflows. */
	uint64_t reg_smpl_pmds[PFM_MAX_PMD_BITVECTOR]; /* PMDs to be recorded when the counter overflows. */
	uint64_t reg_smpl_eventid; /* Passed to the sampling format as it is. */
} pfarg_pmc_t;

/* A PMD of a set, to be written or read (3.1.3, 3.1.4). */
typedef struct {
	uint16_t reg_num; /* Index of the PMD. */
	uint16_t reg_set; /* Event set. */
	uint32_t reg_flags; /* PFM_REGFL_READ_RESET when reading; on return PFM_REG_RETFL_*. */
	uint64_t reg_value; /* Value of the register, 64 bits. */
	uint64_t reg_long_reset; /* Value to reload at PFM_RESTART. */
	uint64_t reg_short_reset; /* Value to reload at an overflow that needs no restart. */
	uint64_t reg_last_reset_val; /* On return of a read: the value that was loaded last. */
	uint64_t reg_ovflsw_thres; /* Overflows before the next set; on return of a read: those that are left. */
	uint64_t reg_random_mask; /* Bits of the random number that vary a reset value. */
	uint32_t reg_random_seed; /* Seed of the random numbers. */
} pfarg_pmd_t;

/* Which set PFM_START activates first (3.1.5). */
typedef struct {
	uint16_t start_set; /* Event set. */
} pfarg_start_t;

/* Where to attach a context (3.1.7). */
typedef struct {
	pid_t load_pid; /* Number of the vCPU, or of the core for PFM_FL_SYSTEM_WIDE. */
	uint16_t load_set; /* Event set to load first. */
} pfarg_load_t;

/* An event set, to be created, changed or deleted (3.1.10, 3.1.11). */
typedef struct {
	uint16_t set_id; /* Its number. */
	uint16_t set_id_next; /* The set after it, with PFM_SETFL_EXPL_NEXT. */
	uint32_t set_flags; /* PFM_SETFL_*; on return also PFM_SET_RETFL_*. */
	struct timespec set_timeout; /* Time before the next set; on return the effective one. */
} pfarg_setdesc_t;

/* What became of an event set (3.1.12). */
typedef struct {
	uint16_t set_id; /* Its number. */
	uint16_t set_id_next; /* The set after it, with PFM_SETFL_EXPL_NEXT. */
	uint32_t set_flags; /* PFM_SETFL_*; on return also PFM_SET_RETFL_*. */
	uint64_t set_switch_pmds[PFM_MAX_PMD_BITVECTOR]; /* PMDs whose overflow caused the last switch from this set. */
	uint64_t set_runs; /* Times that it was the active set, since the context was created. */
	struct timespec set_timeout; /* What is left of its timeout. */
	struct timespec set_act_duration; /* Time for which it was active. */
} pfarg_setinfo_t;

/* What a PMC is (3.1.13). */
typedef struct {
	uint16_t reg_num; /* Index of the PMC. */
	uint16_t reg_type; /* PFM_REG_TYPE_*. */
	uint32_t reg_flags; /* On return PFM_REG_RETFL_*. */
	uint64_t reg_def_value; /* Value after creation of a context: nothing is measured. */
	uint64_t reg_rsvd_mask; /* Bits that keep their default. */
	size_t reg_index; /* Index or address of the actual register. */
} pfarg_pmcinfo_t;

/* What a PMD is (3.1.14). */
typedef struct {
	uint16_t reg_num; /* Index of the PMD. */
	uint16_t reg_type; /* PFM_REG_TYPE_*. */
	uint32_t reg_flags; /* On return PFM_REG_RETFL_*. */
	uint64_t reg_def_value; /* Value after creation of a context; 0 for counters. */
	uint64_t reg_rsvd_mask; /* Bits that keep their default. */
	size_t reg_index; /* Index or address of the actual register. */
} pfarg_pmdinfo_t;

/* What a sampling format is (3.5.2). The library for C makes it of FORMATS. */
typedef struct {
	pfm_uuid_t fmt_uuid; /* Its UUID; all 0: there are no more formats. */
	char fmt_name[32]; /* Its name, and bytes 0 behind it. */
	uint32_t fmt_flags; /* PFM_FMTFL_*. */
	uint32_t fmt_queue_depth; /* Messages that may wait in the queue of a context which uses it. */
	uint64_t fmt_arg_size; /* Bytes of its argument, which follows pfarg_ctx_t. */
} pfarg_fmtinfo_t;

/* Properties of the interface (3.1.16, 3.1.17). */
typedef struct {
	uint32_t cf_version; /* Version of the specification. */
	uint32_t cf_flags; /* Features; none is defined. */
	uint64_t cf_impl_pmcs[PFM_MAX_PMC_BITVECTOR]; /* PMCs that there are. */
	uint64_t cf_impl_pmds[PFM_MAX_PMD_BITVECTOR]; /* PMDs that there are. */
	gid_t cf_sys_gid; /* Group that may create contexts for cores, or PFM_GROUP_ANY. */
	gid_t cf_thread_gid; /* Group that may create contexts for vCPUs, or PFM_GROUP_ANY. */
	size_t cf_arg_size_max; /* Most bytes of a vector argument. */
	size_t cf_smpl_buf_size_max; /* Most bytes of all sampling buffers together. */
	uint16_t cf_counter_width; /* Bits of a hardware counter. */
} pfarg_config_t;

/* A message of any type (3.3.2), laid out as the largest of them, the overflow message. */
typedef struct {
	uint32_t msg_type; /* PFM_MSG_*. */
	uint16_t msg_active_set; /* The event set that was active. */
	uint16_t msg_generation; /* Counts the times that the context was loaded; a message of an earlier time is stale. */
	uint64_t msg_ovfl_pmds[PFM_MAX_PMD_BITVECTOR]; /* PMDs that overflowed. PFM_MSG_RESTORED: blind nanoseconds, then times that it was preempted. */
} pfm_ovfl_msg_t;

/* A message of any type (3.3.2). */
typedef union {
	uint32_t msg_type; /* PFM_MSG_* */
	pfm_ovfl_msg_t pfm_ovfl_msg;
} pfm_msg_t;

/* Argument of the default format and of the double buffer (3.6.2). */
typedef struct {
	size_t buf_size; /* Size of the buffer in bytes, its header included. */
	uint32_t buf_flags; /* PFM_DFL_SMPL_*. */
} pfm_default_smpl_arg_t;

/* Header of the default format's buffer (3.6.3). */
typedef struct {
	size_t hdr_count; /* Samples in the buffer. */
	size_t hdr_cur_offs; /* Where the next sample goes, from the beginning of the buffer. */
	uint64_t hdr_overflows; /* Times that the buffer was full. */
	size_t hdr_buf_size; /* Size of the buffer in bytes. */
	uint32_t hdr_version; /* Version of the format. */
	uint32_t hdr_flags; /* PFM_DFL_SMPL_*. */
} pfm_default_smpl_hdr_t;

/* Header of a sample of the default format (3.6.4). PMD values follow, in order of their index. */
typedef struct {
	pid_t pid; /* The VM: process id of its VMM. */
	pid_t tid; /* The vCPU. */
	uint16_t ovfl_pmd; /* The PMD that overflowed. */
	uint16_t set; /* The active set. */
	uint16_t cpu; /* The core. */
	uint64_t last_reset_val; /* What was loaded into the PMD last. */
	uint64_t tstamp; /* TSC of the host. */
	uintptr_t ip; /* Instruction pointer of the guest. */
} pfm_default_smpl_entry_t;

/* Header of the double buffer (6.3.1). Each half holds samples as the default format does. */
typedef struct {
	uint32_t hdr_version; /* Version of the format. */
	uint32_t hdr_flags; /* PFM_DFL_SMPL_* and PFM_DOUBLE_FMT_*. */
	size_t hdr_buf_size; /* Size of the buffer in bytes. */
	size_t hdr_half_size; /* Size of a half in bytes. */
	uint64_t hdr_overflows; /* Times that a half was full. */
	uint64_t hdr_lost; /* Samples that were overwritten before the tool had them, or found no room. */
	size_t hdr_offs[2]; /* Where each half begins, from the beginning of the buffer. */
	size_t hdr_count[2]; /* Samples in each half. */
	size_t hdr_cur_offs[2]; /* Where the next sample of each half goes, from the beginning of the buffer. */
	uint64_t hdr_filling[2]; /* Which filling each half has, counted from 1: of two full halves, the lower came first. */
	uint32_t hdr_state[2]; /* PFM_DOUBLE_HALF_* of each half. */
} pfm_double_smpl_hdr_t;

/* Argument of the compact format. */
typedef struct {
	size_t buf_size; /* Size of the buffer in bytes, its header included. */
	uint32_t block_size; /* Size of a block in bytes, a multiple of 8; 0: the format chooses. */
	uint32_t buf_flags; /* UMPIRE_COMPACT_FL_*. */
} umpire_compact_arg_t;

/* Header of the compact format's buffer. The writer's notes follow it; they mean nothing to readers. */
typedef struct {
	uint32_t hdr_version; /* Version of the format. */
	uint32_t hdr_flags; /* UMPIRE_COMPACT_FL_* of the argument. */
	size_t hdr_buf_size; /* Size of the buffer in bytes. */
	size_t hdr_blocks_offs; /* Where the first block begins, from the beginning of the buffer. */
	uint32_t hdr_block_size; /* Size of a block in bytes, its header included. */
	uint32_t hdr_blocks; /* Blocks that there are; block number s, from 1 on, is at place (s - 1) % hdr_blocks. */
	uint64_t hdr_sequence; /* Number of the block that is being written. */
	uint64_t hdr_samples; /* Samples that were written, since the buffer was made. */
} umpire_compact_hdr_t;

/* Header of a block of the compact format. Samples follow it. */
typedef struct {
	uint64_t blk_sequence; /* Its number, from 1 on; 0 while it is cleared. Another one after reading: it was overwritten meanwhile. */
	uint64_t blk_first; /* Samples that were written before its first one. */
	uint32_t blk_used; /* Bytes that are written, this header included. */
	uint32_t blk_count; /* Samples in it. */
} umpire_compact_block_t;

/* What a sample of the compact format is told by its difference to: the one before it in the block. */
typedef struct {
	uint64_t tstamp; /* TSC of the host. */
	uint64_t ip; /* Instruction pointer of the guest. */
	uint64_t last_reset_val; /* What was loaded into the PMD. */
	uint64_t eventid; /* reg_smpl_eventid. */
	uint64_t smpl_pmds[PFM_MAX_PMD_BITVECTOR]; /* PMDs that were recorded. */
	uint64_t task; /* Number of the guest's task; 0: not known. */
	uint64_t mapping; /* Number of its mapping; 0: not known. */
	pid_t pid; /* The VM. */
	pid_t tid; /* The vCPU. */
	uint16_t cpu; /* The core. */
	uint16_t set; /* The active set. */
	uint16_t ovfl_pmd; /* The PMD that overflowed. */
} umpire_compact_last_t;

/* UUIDs of the built-in sampling formats (3.6.1, 6.3.1). */
#define PFM_DEFAULT_SMPL_UUID { 0x4d, 0x72, 0xbe, 0xc0, 0x06, 0x64, 0x41, 0x43, 0x82, 0xb4, 0xd3, 0xfd, 0x27, 0x24, 0x3c, 0x97 }
#define PFM_DOUBLE_SMPL_UUID { 0x2f, 0x3c, 0x6b, 0x9e, 0x57, 0x0d, 0x4e, 0x8a, 0x9c, 0x11, 0x4a, 0x63, 0x70, 0xd8, 0xe5, 0x1b }
#define PFM_COMPACT_SMPL_UUID { 0xb8, 0x05, 0x7a, 0x1d, 0x3e, 0x92, 0x46, 0xcf, 0xa7, 0x64, 0x0e, 0x5d, 0xf1, 0x28, 0x93, 0x7c }

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
