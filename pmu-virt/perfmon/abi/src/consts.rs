//! Numbers of the interface. The specification names most of them and gives no
//! values; those of flags are the ones that the Linux implementations used, as
//! far as these had the flag.

/// A table of constants: for Rust, and for the C header.
macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr, $text:literal;)*) => {
        $(#[doc = $text] pub const $name: $type = $value;)*

        /// Every constant: name, value, and what it means.
        pub const ALL: &[(&str, u64, &str)] = &[$((stringify!($name), $name as u64, $text)),*];
    };
}

constants! {
    PFM_MAX_PMCS: u16 = 128, "PMC indices lie below this.";
    PFM_MAX_PMDS: u16 = 128, "PMD indices lie below this.";

    PFM_CREATE_CONTEXT: u16 = 1, "Command: create a context (3.1.1).";
    PFM_WRITE_PMCS: u16 = 2, "Command: program PMC registers (3.1.2).";
    PFM_WRITE_PMDS: u16 = 3, "Command: program PMD registers (3.1.3).";
    PFM_READ_PMDS: u16 = 4, "Command: read PMD registers (3.1.4).";
    PFM_START: u16 = 5, "Command: activate monitoring (3.1.5).";
    PFM_STOP: u16 = 6, "Command: stop monitoring (3.1.6).";
    PFM_LOAD_CONTEXT: u16 = 7, "Command: attach a context (3.1.7).";
    PFM_UNLOAD_CONTEXT: u16 = 8, "Command: detach a context (3.1.8).";
    PFM_RESTART: u16 = 9, "Command: go on after a notification (3.1.9).";
    PFM_CREATE_EVTSETS: u16 = 10, "Command: create or change event sets (3.1.10).";
    PFM_DELETE_EVTSETS: u16 = 11, "Command: delete event sets (3.1.11).";
    PFM_GETINFO_EVTSETS: u16 = 12, "Command: ask about event sets (3.1.12).";
    PFM_GETINFO_PMCS: u16 = 13, "Command: ask about PMC registers (3.1.13).";
    PFM_GETINFO_PMDS: u16 = 14, "Command: ask about PMD registers (3.1.14).";
    PFM_SET_CONFIG: u16 = 15, "Command: change properties of the interface (3.1.16).";
    PFM_GET_CONFIG: u16 = 16, "Command: ask for properties of the interface (3.1.17).";
    PFM_TRY_LOAD: u16 = 0x115, "Command of Umpire: attach a context, EAGAIN where that waits for an owner's answer.";
    PFM_GETINFO_FMTS: u16 = 0x110, "Command of Umpire: ask for the sampling formats (3.5.2).";

    PFM_FL_NOTIFY_BLOCK: u32 = 0x01, "Context flag: a notification takes the vCPU off its core.";
    PFM_FL_SYSTEM_WIDE: u32 = 0x02, "Context flag: for a core, not for a vCPU.";
    PFM_FL_OVFL_NO_MSG: u32 = 0x80, "Context flag: overflows signal, without a message.";
    PFM_FL_PREEMPTIBLE: u32 = 0x1_0000, "Context flag of Umpire: others may take its counters for a time (6.5).";
    PFM_FL_NO_ASK: u32 = 0x2_0000, "Context flag of Umpire: a load that finds no room fails at once; no owner of reserved counters is asked.";

    PFM_REGFL_OVFL_NOTIFY: u32 = 0x1, "PMC flag: an overflow notifies.";
    PFM_REGFL_RANDOM: u32 = 0x2, "PMC flag: reset values are randomised.";
    PFM_REGFL_NO_64BIT_EMUL: u32 = 0x4, "PMC flag: the counter is as wide as the hardware's (6.2.1).";
    PFM_REGFL_READ_RESET: u32 = 0x8, "PMD flag of PFM_READ_PMDS: reset after reading (6.2.2).";
    PFM_REG_RETFL_NOTAVAIL: u32 = 1 << 31, "Return flag: there is no such register.";
    PFM_REG_RETFL_EINVAL: u32 = 1 << 30, "Return flag: the value is not valid.";
    PFM_REG_RETFL_NOSET: u32 = 1 << 29, "Return flag: there is no such event set.";
    PFM_REG_RETFL_MASK: u32 = 0xe000_0000, "All return flags that tell of an error.";
    PFM_REG_RETFL_PROV_MASK: u32 = 0x0f00_0000, "Return field of Umpire: how the value was counted.";
    PFM_REG_RETFL_PROV_SHIFT: u32 = 24, "Place of this field.";
    PFM_PROV_NONE: u32 = 0, "How counted: it is no counter.";
    PFM_PROV_EXACT: u32 = 1, "How counted: every event was seen.";
    PFM_PROV_HARDWARE: u32 = 2, "How counted: by a physical counter.";
    PFM_PROV_SCALED: u32 = 3, "How counted: extrapolated by the counter's source.";
    PFM_PROV_DERIVED: u32 = 4, "How counted: computed from another quantity.";
    PFM_PROV_SIMULATED: u32 = 5, "How counted: made up, by a declared rate or as ticks of virtual time.";
    PFM_PROV_NOT_COUNTED: u32 = 6, "How counted: nobody has counted yet; the value is the one that was written.";
    PFM_PROV_LOST: u32 = 7, "How counted: somebody did, but not all the time that it was to count.";

    PFM_REG_TYPE_PMC: u16 = 1, "Register type: a PMC of the processor.";
    PFM_REG_TYPE_MSR: u16 = 2, "Register type: an MSR; the index is its address.";
    PFM_REG_TYPE_SPR: u16 = 3, "Register type: a special purpose register.";
    PFM_REG_TYPE_IBR: u16 = 4, "Register type: an instruction breakpoint register.";
    PFM_REG_TYPE_DBR: u16 = 5, "Register type: a data breakpoint register.";
    PFM_REG_TYPE_PMD: u16 = 6, "Register type: a PMD of the processor.";
    PFM_REG_TYPE_VIRTUAL: u16 = 0x100, "Register type of Umpire: a quantity of the VMM (3.2.2).";
    PFM_REG_IDX_NONE: u64 = u64::MAX, "Register index: the type alone describes it.";

    PFM_SETFL_OVFL_SWITCH: u32 = 0x01, "Set flag: overflows switch to the next set.";
    PFM_SETFL_TIME_SWITCH: u32 = 0x02, "Set flag: a timeout switches to the next set.";
    PFM_SETFL_EXPL_NEXT: u32 = 0x04, "Set flag: set_id_next says which one is next.";
    PFM_SETFL_EXCL_IDLE: u32 = 0x08, "Set flag: time in which no vCPU runs is not monitored.";
    PFM_SETFL_EXCL_KERNEL_ONLY_THREADS: u32 = 0x10, "Set flag that is refused: a core runs vCPUs only (6.2.3).";
    PFM_SET_RETFL_EINVAL: u32 = 1 << 30, "Return flag: the set's description is not valid.";
    PFM_SET_RETFL_NOSET: u32 = 1 << 29, "Return flag: there is no such event set.";
    PFM_SET_RETFL_MASK: u32 = 0x6000_0000, "All return flags of sets.";

    PFM_MSG_OVFL: u32 = 1, "Message: counters overflowed.";
    PFM_MSG_END: u32 = 2, "Message: the vCPU or the VM has ended; the context is detached.";
    PFM_MSG_PREEMPTED: u32 = 0x100, "Message of Umpire: the context's counters were taken (6.5).";
    PFM_MSG_RESTORED: u32 = 0x101, "Message of Umpire: it has them again; tells the blind spot.";
    PFM_MSG_THROTTLED: u32 = 0x102, "Message of Umpire: too many overflows, monitoring is masked (4.4.4).";

    PFM_FMTFL_NOSET: u32 = 0x1, "Format flag: contexts that use it have set 0 only (3.5.7).";

    PFM_GROUP_ANY: u32 = u32::MAX, "Group: any user.";
    PFM_VERSION: u32 = 6, "Version of the specification, major number in bits 31:16: 0.6.";

    PFM_SUBCODE_NONE: u16 = 0, "Sub-code of Umpire: nothing more is known.";
    PFM_SUBCODE_INVALID_EVENT: u16 = 1, "Sub-code of Umpire: the processor does not have the event.";
    PFM_SUBCODE_INVALID_PICNUM: u16 = 2, "Sub-code of Umpire: there is no such counter or register.";
    PFM_SUBCODE_INVALID_ATTRIBUTE: u16 = 3, "Sub-code of Umpire: there is no such attribute, or not for this event.";
    PFM_SUBCODE_ATTRIBUTE_OUT_OF_RANGE: u16 = 4, "Sub-code of Umpire: the value of an attribute is not possible.";
    PFM_SUBCODE_RESOURCE_UNAVAIL: u16 = 5, "Sub-code of Umpire: no counter is left, or somebody has taken it.";
    PFM_SUBCODE_PIC_NOT_CAPABLE: u16 = 6, "Sub-code of Umpire: nobody here counts the event.";
    PFM_SUBCODE_INVALID_FLAGS: u16 = 7, "Sub-code of Umpire: flags that there are not.";
    PFM_SUBCODE_CONFLICTING_REQS: u16 = 8, "Sub-code of Umpire: what was asked for does not go together.";
    PFM_SUBCODE_REQUIRES_PRIVILEGE: u16 = 9, "Sub-code of Umpire: the user may not.";
    PFM_SUBCODE_BIND_FAILED: u16 = 10, "Sub-code of Umpire: there is nothing to attach to, or it cannot be reached.";
    PFM_SUBCODE_HV_NO_ACCESS: u16 = 11, "Sub-code of Umpire: the VM's event filter denies the event.";

    PFM_DFL_SMPL_NO_HDR: u32 = 0x1, "Default format: samples have no header.";
    PFM_DFL_SMPL_IIP_HDR: u32 = 0x2, "Default format: the header is the instruction pointer alone.";
    PFM_DFL_SMPL_VERSION: u32 = 1 << 16, "Version of the default format, major number in bits 31:16.";
    PFM_DOUBLE_FMT_MASK_WHEN_FULL: u32 = 0x100, "Double buffer: monitoring is masked when both halves are full.";
    PFM_DOUBLE_SMPL_VERSION: u32 = 1 << 16, "Version of the double buffer, major number in bits 31:16.";
    PFM_DOUBLE_HALF_FREE: u32 = 0, "State of a half: nobody's, its samples were dealt with.";
    PFM_DOUBLE_HALF_ACTIVE: u32 = 1, "State of a half: samples go there.";
    PFM_DOUBLE_HALF_FULL: u32 = 2, "State of a half: the tool's, until PFM_RESTART.";

    UMPIRE_COMPACT_VERSION: u32 = 1 << 16, "Version of the compact format, major number in bits 31:16.";
    UMPIRE_COMPACT_MAX_BLOCK: u32 = 1 << 20, "Compact format: most bytes of a block.";
    UMPIRE_COMPACT_SOURCE: u8 = 0x1, "Compact sample: set, PMD and event id follow.";
    UMPIRE_COMPACT_PLACE: u8 = 0x2, "Compact sample: VM, vCPU and core follow.";
    UMPIRE_COMPACT_RESET: u8 = 0x4, "Compact sample: the last reset value follows.";
    UMPIRE_COMPACT_BODY: u8 = 0x8, "Compact sample: the vector of recorded PMDs follows.";
    UMPIRE_COMPACT_TASK: u8 = 0x10, "Compact sample: the numbers of task and mapping follow.";
    UMPIRE_COMPACT_CHAIN: u8 = 0x20, "Compact sample: the callers follow.";
    UMPIRE_COMPACT_STACK: u8 = 0x40, "Compact sample: the top of the program's stack follows.";
    UMPIRE_COMPACT_FL_TASK: u32 = 0x1, "Compact format: samples tell the guest's task, as far as it is known.";
    UMPIRE_COMPACT_FL_CHAIN: u32 = 0x2, "Compact format: samples tell their callers, as far as these are known.";
    UMPIRE_COMPACT_FL_STACK_MASK: u32 = 0xffff_0000, "Compact format, beside UMPIRE_COMPACT_FL_CHAIN: so many bytes of the program's stack, a multiple of 8; 0: none.";
    UMPIRE_COMPACT_FL_STACK_SHIFT: u32 = 16, "Place of this field.";
}

/// Identifies the default sampling format (3.6.1).
pub const DEFAULT_FORMAT: [u8; 16] = [
    0x4d, 0x72, 0xbe, 0xc0, 0x06, 0x64, 0x41, 0x43, 0x82, 0xb4, 0xd3, 0xfd, 0x27, 0x24, 0x3c, 0x97,
];
/// Identifies the double-buffering format (6.3.1).
pub const DOUBLE_FORMAT: [u8; 16] = [
    0x2f, 0x3c, 0x6b, 0x9e, 0x57, 0x0d, 0x4e, 0x8a, 0x9c, 0x11, 0x4a, 0x63, 0x70, 0xd8, 0xe5, 0x1b,
];
/// Identifies Umpire's compact format for high rates.
pub const COMPACT_FORMAT: [u8; 16] = [
    0xb8, 0x05, 0x7a, 0x1d, 0x3e, 0x92, 0x46, 0xcf, 0xa7, 0x64, 0x0e, 0x5d, 0xf1, 0x28, 0x93, 0x7c,
];
