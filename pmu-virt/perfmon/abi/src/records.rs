//! The structures, in one table.

use crate::field::{Field, FieldInfo, Record, Timespec};
use crate::table::{infos, layout};
use crate::{PMC_WORDS, PMD_WORDS};

records! {
    "What a context is to be like (3.1.1). The sampling format's own argument follows it."
    CtxArg = "pfarg_ctx_t" {
        "PFM_FL_*."
        flags: u32 = "uint32_t" "ctx_flags",
        "On return: the descriptor of the context."
        fd: i32 = "int" "ctx_fd",
        "UUID of the sampling format; all 0: none."
        format: [u8; 16] = "pfm_uuid_t" "ctx_smpl_buf_id",
        "On return: size of the sampling buffer in bytes; 0: there is none."
        buffer_size: u64 = "size_t" "ctx_smpl_buf_size",
    }

    "A PMC of a set, to be written (3.1.2)."
    PmcArg = "pfarg_pmc_t" {
        "Index of the PMC."
        num: u16 = "uint16_t" "reg_num",
        "Event set."
        set: u16 = "uint16_t" "reg_set",
        "PFM_REGFL_*; on return also PFM_REG_RETFL_*."
        flags: u32 = "uint32_t" "reg_flags",
        "Value of the register."
        value: u64 = "uint64_t" "reg_value",
        "PMDs to be reset when the counter overflows."
        reset_pmds: [u64; PMD_WORDS] = "uint64_t[PFM_MAX_PMD_BITVECTOR]" "reg_reset_pmds",
        "PMDs to be recorded when the counter overflows."
        smpl_pmds: [u64; PMD_WORDS] = "uint64_t[PFM_MAX_PMD_BITVECTOR]" "reg_smpl_pmds",
        "Passed to the sampling format as it is."
        eventid: u64 = "uint64_t" "reg_smpl_eventid",
    }

    "A PMD of a set, to be written or read (3.1.3, 3.1.4)."
    PmdArg = "pfarg_pmd_t" {
        "Index of the PMD."
        num: u16 = "uint16_t" "reg_num",
        "Event set."
        set: u16 = "uint16_t" "reg_set",
        "PFM_REGFL_READ_RESET when reading; on return PFM_REG_RETFL_*."
        flags: u32 = "uint32_t" "reg_flags",
        "Value of the register, 64 bits."
        value: u64 = "uint64_t" "reg_value",
        "Value to reload at PFM_RESTART."
        long_reset: u64 = "uint64_t" "reg_long_reset",
        "Value to reload at an overflow that needs no restart."
        short_reset: u64 = "uint64_t" "reg_short_reset",
        "On return of a read: the value that was loaded last."
        last_reset_val: u64 = "uint64_t" "reg_last_reset_val",
        "Overflows before the next set; on return of a read: those that are left."
        ovflsw_thres: u64 = "uint64_t" "reg_ovflsw_thres",
        "Bits of the random number that vary a reset value."
        random_mask: u64 = "uint64_t" "reg_random_mask",
        "Seed of the random numbers."
        random_seed: u32 = "uint32_t" "reg_random_seed",
    }

    "Which set PFM_START activates first (3.1.5)."
    StartArg = "pfarg_start_t" {
        "Event set."
        set: u16 = "uint16_t" "start_set",
    }

    "Where to attach a context (3.1.7)."
    LoadArg = "pfarg_load_t" {
        "Number of the vCPU, or of the core for PFM_FL_SYSTEM_WIDE."
        pid: i32 = "pid_t" "load_pid",
        "Event set to load first."
        set: u16 = "uint16_t" "load_set",
    }

    "An event set, to be created, changed or deleted (3.1.10, 3.1.11)."
    SetDesc = "pfarg_setdesc_t" {
        "Its number."
        id: u16 = "uint16_t" "set_id",
        "The set after it, with PFM_SETFL_EXPL_NEXT."
        next: u16 = "uint16_t" "set_id_next",
        "PFM_SETFL_*; on return also PFM_SET_RETFL_*."
        flags: u32 = "uint32_t" "set_flags",
        "Time before the next set; on return the effective one."
        timeout: Timespec = "struct timespec" "set_timeout",
    }

    "What became of an event set (3.1.12)."
    SetInfo = "pfarg_setinfo_t" {
        "Its number."
        id: u16 = "uint16_t" "set_id",
        "The set after it, with PFM_SETFL_EXPL_NEXT."
        next: u16 = "uint16_t" "set_id_next",
        "PFM_SETFL_*; on return also PFM_SET_RETFL_*."
        flags: u32 = "uint32_t" "set_flags",
        "PMDs whose overflow caused the last switch from this set."
        switch_pmds: [u64; PMD_WORDS] = "uint64_t[PFM_MAX_PMD_BITVECTOR]" "set_switch_pmds",
        "Times that it was the active set, since the context was created."
        runs: u64 = "uint64_t" "set_runs",
        "What is left of its timeout."
        timeout: Timespec = "struct timespec" "set_timeout",
        "Time for which it was active."
        act_duration: Timespec = "struct timespec" "set_act_duration",
    }

    "What a PMC is (3.1.13)."
    PmcInfo = "pfarg_pmcinfo_t" {
        "Index of the PMC."
        num: u16 = "uint16_t" "reg_num",
        "PFM_REG_TYPE_*."
        kind: u16 = "uint16_t" "reg_type",
        "On return PFM_REG_RETFL_*."
        flags: u32 = "uint32_t" "reg_flags",
        "Value after creation of a context: nothing is measured."
        def_value: u64 = "uint64_t" "reg_def_value",
        "Bits that keep their default."
        rsvd_mask: u64 = "uint64_t" "reg_rsvd_mask",
        "Index or address of the actual register."
        index: u64 = "size_t" "reg_index",
    }

    "What a PMD is (3.1.14)."
    PmdInfo = "pfarg_pmdinfo_t" {
        "Index of the PMD."
        num: u16 = "uint16_t" "reg_num",
        "PFM_REG_TYPE_*."
        kind: u16 = "uint16_t" "reg_type",
        "On return PFM_REG_RETFL_*."
        flags: u32 = "uint32_t" "reg_flags",
        "Value after creation of a context; 0 for counters."
        def_value: u64 = "uint64_t" "reg_def_value",
        "Bits that keep their default."
        rsvd_mask: u64 = "uint64_t" "reg_rsvd_mask",
        "Index or address of the actual register."
        index: u64 = "size_t" "reg_index",
    }

    "What a sampling format is (3.5.2). The library for C makes it of FORMATS."
    FmtInfo = "pfarg_fmtinfo_t" {
        "Its UUID; all 0: there are no more formats."
        uuid: [u8; 16] = "pfm_uuid_t" "fmt_uuid",
        "Its name, and bytes 0 behind it."
        name: [u8; 32] = "char[32]" "fmt_name",
        "PFM_FMTFL_*."
        flags: u32 = "uint32_t" "fmt_flags",
        "Messages that may wait in the queue of a context which uses it."
        queue_depth: u32 = "uint32_t" "fmt_queue_depth",
        "Bytes of its argument, which follows pfarg_ctx_t."
        arg_size: u64 = "uint64_t" "fmt_arg_size",
    }

    "Properties of the interface (3.1.16, 3.1.17)."
    Config = "pfarg_config_t" {
        "Version of the specification."
        version: u32 = "uint32_t" "cf_version",
        "Features; none is defined."
        flags: u32 = "uint32_t" "cf_flags",
        "PMCs that there are."
        impl_pmcs: [u64; PMC_WORDS] = "uint64_t[PFM_MAX_PMC_BITVECTOR]" "cf_impl_pmcs",
        "PMDs that there are."
        impl_pmds: [u64; PMD_WORDS] = "uint64_t[PFM_MAX_PMD_BITVECTOR]" "cf_impl_pmds",
        "Group that may create contexts for cores, or PFM_GROUP_ANY."
        sys_gid: u32 = "gid_t" "cf_sys_gid",
        "Group that may create contexts for vCPUs, or PFM_GROUP_ANY."
        thread_gid: u32 = "gid_t" "cf_thread_gid",
        "Most bytes of a vector argument."
        arg_size_max: u64 = "size_t" "cf_arg_size_max",
        "Most bytes of all sampling buffers together."
        smpl_buf_size_max: u64 = "size_t" "cf_smpl_buf_size_max",
        "Bits of a hardware counter."
        counter_width: u16 = "uint16_t" "cf_counter_width",
    }

    "A message of any type (3.3.2), laid out as the largest of them, the overflow message."
    Message = "pfm_ovfl_msg_t" {
        "PFM_MSG_*."
        kind: u32 = "uint32_t" "msg_type",
        "The event set that was active."
        active_set: u16 = "uint16_t" "msg_active_set",
        "Counts the times that the context was loaded; a message of an earlier time is stale."
        generation: u16 = "uint16_t" "msg_generation",
        "PMDs that overflowed. PFM_MSG_RESTORED: blind nanoseconds, then times that it was preempted."
        ovfl_pmds: [u64; PMD_WORDS] = "uint64_t[PFM_MAX_PMD_BITVECTOR]" "msg_ovfl_pmds",
    }

    "Argument of the default format and of the double buffer (3.6.2)."
    DefaultArg = "pfm_default_smpl_arg_t" {
        "Size of the buffer in bytes, its header included."
        buf_size: u64 = "size_t" "buf_size",
        "PFM_DFL_SMPL_*."
        buf_flags: u32 = "uint32_t" "buf_flags",
    }

    "Header of the default format's buffer (3.6.3)."
    DefaultHeader = "pfm_default_smpl_hdr_t" {
        "Samples in the buffer."
        count: u64 = "size_t" "hdr_count",
        "Where the next sample goes, from the beginning of the buffer."
        cur_offs: u64 = "size_t" "hdr_cur_offs",
        "Times that the buffer was full."
        overflows: u64 = "uint64_t" "hdr_overflows",
        "Size of the buffer in bytes."
        buf_size: u64 = "size_t" "hdr_buf_size",
        "Version of the format."
        version: u32 = "uint32_t" "hdr_version",
        "PFM_DFL_SMPL_*."
        flags: u32 = "uint32_t" "hdr_flags",
    }

    "Header of a sample of the default format (3.6.4). PMD values follow, in order of their index."
    DefaultEntry = "pfm_default_smpl_entry_t" {
        "The VM: process id of its VMM."
        pid: i32 = "pid_t" "pid",
        "The vCPU."
        tid: i32 = "pid_t" "tid",
        "The PMD that overflowed."
        ovfl_pmd: u16 = "uint16_t" "ovfl_pmd",
        "The active set."
        set: u16 = "uint16_t" "set",
        "The core."
        cpu: u16 = "uint16_t" "cpu",
        "What was loaded into the PMD last."
        last_reset_val: u64 = "uint64_t" "last_reset_val",
        "TSC of the host."
        tstamp: u64 = "uint64_t" "tstamp",
        "Instruction pointer of the guest."
        ip: u64 = "uintptr_t" "ip",
    }

    "Header of the double buffer (6.3.1). Each half holds samples as the default format does."
    DoubleHeader = "pfm_double_smpl_hdr_t" {
        "Version of the format."
        version: u32 = "uint32_t" "hdr_version",
        "PFM_DFL_SMPL_* and PFM_DOUBLE_FMT_*."
        flags: u32 = "uint32_t" "hdr_flags",
        "Size of the buffer in bytes."
        buf_size: u64 = "size_t" "hdr_buf_size",
        "Size of a half in bytes."
        half_size: u64 = "size_t" "hdr_half_size",
        "Times that a half was full."
        overflows: u64 = "uint64_t" "hdr_overflows",
        "Samples that were overwritten before the tool had them, or found no room."
        lost: u64 = "uint64_t" "hdr_lost",
        "Where each half begins, from the beginning of the buffer."
        offs: [u64; 2] = "size_t[2]" "hdr_offs",
        "Samples in each half."
        count: [u64; 2] = "size_t[2]" "hdr_count",
        "Where the next sample of each half goes, from the beginning of the buffer."
        cur_offs: [u64; 2] = "size_t[2]" "hdr_cur_offs",
        "Which filling each half has, counted from 1: of two full halves, the lower came first."
        filling: [u64; 2] = "uint64_t[2]" "hdr_filling",
        "PFM_DOUBLE_HALF_* of each half."
        state: [u32; 2] = "uint32_t[2]" "hdr_state",
    }

    "Argument of the compact format."
    CompactArg = "umpire_compact_arg_t" {
        "Size of the buffer in bytes, its header included."
        buf_size: u64 = "size_t" "buf_size",
        "Size of a block in bytes, a multiple of 8; 0: the format chooses."
        block_size: u32 = "uint32_t" "block_size",
        "UMPIRE_COMPACT_FL_*."
        flags: u32 = "uint32_t" "buf_flags",
    }

    "Header of the compact format's buffer. The writer's notes follow it; they mean nothing to readers."
    CompactHeader = "umpire_compact_hdr_t" {
        "Version of the format."
        version: u32 = "uint32_t" "hdr_version",
        "UMPIRE_COMPACT_FL_* of the argument."
        flags: u32 = "uint32_t" "hdr_flags",
        "Size of the buffer in bytes."
        buf_size: u64 = "size_t" "hdr_buf_size",
        "Where the first block begins, from the beginning of the buffer."
        blocks_offs: u64 = "size_t" "hdr_blocks_offs",
        "Size of a block in bytes, its header included."
        block_size: u32 = "uint32_t" "hdr_block_size",
        "Blocks that there are; block number s, from 1 on, is at place (s - 1) % hdr_blocks."
        blocks: u32 = "uint32_t" "hdr_blocks",
        "Number of the block that is being written."
        sequence: u64 = "uint64_t" "hdr_sequence",
        "Samples that were written, since the buffer was made."
        samples: u64 = "uint64_t" "hdr_samples",
    }

    "Header of a block of the compact format. Samples follow it."
    CompactBlock = "umpire_compact_block_t" {
        "Its number, from 1 on; 0 while it is cleared. Another one after reading: it was overwritten meanwhile."
        sequence: u64 = "uint64_t" "blk_sequence",
        "Samples that were written before its first one."
        first: u64 = "uint64_t" "blk_first",
        "Bytes that are written, this header included."
        used: u32 = "uint32_t" "blk_used",
        "Samples in it."
        count: u32 = "uint32_t" "blk_count",
    }

    "What a sample of the compact format is told by its difference to: the one before it in the block."
    CompactLast = "umpire_compact_last_t" {
        "TSC of the host."
        tstamp: u64 = "uint64_t" "tstamp",
        "Instruction pointer of the guest."
        ip: u64 = "uint64_t" "ip",
        "What was loaded into the PMD."
        last_reset_val: u64 = "uint64_t" "last_reset_val",
        "reg_smpl_eventid."
        eventid: u64 = "uint64_t" "eventid",
        "PMDs that were recorded."
        smpl_pmds: [u64; PMD_WORDS] = "uint64_t[PFM_MAX_PMD_BITVECTOR]" "smpl_pmds",
        "Number of the guest's task; 0: not known."
        task: u64 = "uint64_t" "task",
        "Number of its mapping; 0: not known."
        mapping: u64 = "uint64_t" "mapping",
        "The VM."
        pid: i32 = "pid_t" "pid",
        "The vCPU."
        tid: i32 = "pid_t" "tid",
        "The core."
        cpu: u16 = "uint16_t" "cpu",
        "The active set."
        set: u16 = "uint16_t" "set",
        "The PMD that overflowed."
        ovfl_pmd: u16 = "uint16_t" "ovfl_pmd",
    }
}
