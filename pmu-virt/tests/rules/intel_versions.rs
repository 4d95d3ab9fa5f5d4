//! Rules of the Intel models: what versions 3, 4 and 5 added, and the freeze on a PMI.

use super::Op::{
    Freeze, Kernel, Pmi, Rdpmc, RdpmcGp, Read, ReadAbsent, Reset, User, Write, WriteAbsent, WriteGp,
};
use super::Rule;

const V3_V4: &[&str] = &["intel-v3", "intel-v4"];
const V5: &[&str] = &["intel-v5,counters=4"];
const FROM_V4: &[&str] = &["intel-v4", "intel-v5,counters=4"];
const BEFORE_V4: &[&str] = &["intel-v1", "intel-v2", "intel-v3"];

const VERSION3: &str = "SDM 3B, Architectural Performance Monitoring Version 3";
const VERSION4: &str = "SDM 3B, Architectural Performance Monitoring Version 4";
const VERSION5: &str = "SDM 3B, Architectural Performance Monitoring Version 5";
const STATUS: &str = "SDM 3B, Enhancement in IA32_PERF_GLOBAL_STATUS";
const SET_RESET: &str =
    "SDM 3B, IA32_PERF_GLOBAL_STATUS_RESET and IA32_PERF_GLOBAL_STATUS_SET MSRs";
const INUSE: &str = "SDM 3B, IA32_PERF_GLOBAL_INUSE MSR";
const FREEZING: &str = "SDM 3B, Freezing LBR and Performance Counters on PMI";
const MSRS: &str = "SDM 4, Architectural MSRs";
const RESET: &str = "SDM 3A, Processor States Following Power-up, Reset, or INIT";

/// Reference cycles at every CPL, enabled; then with INT, then for any thread.
const REF: u64 = 0x43_013c;
const REF_INT: u64 = 0x53_013c;
const REF_ANY: u64 = 0x63_013c;
/// One tick before the carry out of 48 bits, as a legacy write makes it.
const LAST: u64 = 0xffff_ffff;

const LBR_FRZ: u64 = 1 << 58;
const CTR_FRZ: u64 = 1 << 59;
const ASCI: u64 = 1 << 60;
/// LBR_FRZ, CTR_FRZ, ASCI, Ovf_Uncore, OvfBuffer.
const INDICATORS: u64 = 0b1_1111 << 58;
const COND_CHGD: u64 = 1 << 63;
const COUNTERS: u64 = 0x7_0000_000f;

pub(crate) const RULES: &[Rule] = &[
    Rule {
        name: "select: any-thread exists in versions 3 and 4, and counts this thread, the core's only one",
        models: V3_V4,
        source: VERSION3,
        shown_by: &[
            Write(0x186, REF_ANY),
            Read(0x186, REF_ANY),
            Kernel(5),
            User(4),
            Read(0xc1, 9),
            // The same event: the count goes on.
            Write(0x186, REF),
            Kernel(1),
            Read(0xc1, 10),
        ],
    },
    Rule {
        name: "FIXED_CTR_CTRL: any-thread exists in versions 3 and 4, and counts this thread",
        models: V3_V4,
        source: VERSION3,
        shown_by: &[
            Write(0x38d, 0xfff),
            Read(0x38d, 0xfff),
            WriteGp(0x38d, 1 << 12),
            WriteGp(0x38d, 1 << 14),
            Write(0x38d, 0x700),
            Write(0x38f, 0x4_0000_0000),
            Kernel(5),
            Read(0x30b, 5),
        ],
    },
    Rule {
        name: "select: any-thread is reserved again in version 5",
        models: V5,
        source: VERSION5,
        shown_by: &[
            WriteGp(0x186, 1 << 21),
            WriteGp(0x186, REF_ANY),
            Read(0x186, 0),
        ],
    },
    Rule {
        name: "STATUS_SET and INUSE: absent before version 4",
        models: BEFORE_V4,
        source: MSRS,
        shown_by: &[
            ReadAbsent(0x391),
            WriteAbsent(0x391),
            ReadAbsent(0x392),
            WriteAbsent(0x392),
        ],
    },
    Rule {
        name: "STATUS_SET: sets the status bits of counters and of nobody, without a PMI; reads as 0",
        models: FROM_V4,
        source: SET_RESET,
        shown_by: &[
            Write(0x186, REF_INT),
            Write(0x391, 0x4_0000_0001),
            Read(0x38e, 0x4_0000_0001),
            Write(0x391, ASCI | LBR_FRZ),
            Read(0x38e, ASCI | LBR_FRZ | 0x4_0000_0001),
            Read(0x391, 0),
            Pmi(0),
            Write(0x391, COUNTERS | INDICATORS),
            Read(0x38e, COUNTERS | INDICATORS),
            Pmi(0),
        ],
    },
    Rule {
        name: "STATUS_SET: CondChgd, Trace_ToPA_PMI and absent counters are reserved",
        models: FROM_V4,
        source: MSRS,
        shown_by: &[
            WriteGp(0x391, COND_CHGD),
            WriteGp(0x391, 1 << 57),
            WriteGp(0x391, 1 << 55),
            WriteGp(0x391, 1 << 48),
            WriteGp(0x391, 1 << 35),
            WriteGp(0x391, 1 << 4),
            Read(0x38e, 0),
        ],
    },
    Rule {
        name: "STATUS_RESET: clears what is written, also indicators and CondChgd; reads as 0",
        models: FROM_V4,
        source: SET_RESET,
        shown_by: &[
            Write(0x391, COUNTERS | INDICATORS),
            Write(0x390, ASCI | 0x2_0000_0002),
            Read(0x38e, (COUNTERS | INDICATORS) & !(ASCI | 0x2_0000_0002)),
            Read(0x390, 0),
            Write(0x390, COUNTERS | INDICATORS | COND_CHGD),
            Read(0x38e, 0),
        ],
    },
    Rule {
        name: "STATUS_RESET: reserved bits are refused",
        models: FROM_V4,
        source: MSRS,
        shown_by: &[
            WriteGp(0x390, 1 << 57),
            WriteGp(0x390, 1 << 55),
            WriteGp(0x390, 1 << 48),
            WriteGp(0x390, 1 << 35),
            WriteGp(0x390, 1 << 4),
        ],
    },
    Rule {
        name: "GLOBAL_STATUS stays read-only; overflows set the bits of fixed counters too",
        models: FROM_V4,
        source: VERSION4,
        shown_by: &[
            WriteGp(0x38e, 0),
            WriteGp(0x38e, CTR_FRZ),
            Write(0x38f, COUNTERS),
            Write(0x187, REF),
            Write(0xc2, LAST),
            Write(0x30a, 0xffff_ffff_ffff),
            Write(0x30b, 0xffff_ffff_ffff),
            Write(0x38d, 0x330),
            Kernel(1),
            Read(0x38e, 0x6_0000_0002),
            Write(0x390, 0x2_0000_0002),
            Read(0x38e, 0x4_0000_0000),
        ],
    },
    Rule {
        name: "INUSE: selects whose event is not 0, fixed counters with a ring, and INT of any",
        models: FROM_V4,
        source: INUSE,
        shown_by: &[
            Read(0x392, 0),
            // Neither enabled nor counted: the event alone says so.
            Write(0x187, 0x2e),
            Read(0x392, 0b10),
            Write(0x186, 0x43_0100),
            Read(0x392, 0b10),
            Write(0x38d, 0x030),
            Read(0x392, 0x2_0000_0002),
            Write(0x38d, 0x800),
            Read(0x392, COND_CHGD | 0b10),
            Write(0x38d, 0),
            Read(0x392, 0b10),
            Write(0x189, 0x50_0000),
            Read(0x392, COND_CHGD | 0b10),
        ],
    },
    Rule {
        name: "INUSE: read-only",
        models: FROM_V4,
        source: MSRS,
        shown_by: &[WriteGp(0x392, 0), WriteGp(0x392, 1), Read(0x392, 0)],
    },
    Rule {
        name: "CTR_FRZ: counters stand while it is set, whatever GLOBAL_CTRL says",
        models: FROM_V4,
        source: STATUS,
        shown_by: &[
            Write(0x38f, 0x4_0000_0001),
            Write(0x186, REF),
            Write(0x38d, 0x300),
            Kernel(5),
            Write(0x391, CTR_FRZ),
            Kernel(100),
            Read(0xc1, 5),
            Rdpmc(0, 5),
            Read(0x30b, 5),
            Read(0x38f, 0x4_0000_0001),
            // Neither of these starts them.
            Write(0x38f, 0x4_0000_0003),
            Write(0x187, REF),
            Write(0x186, REF),
            Kernel(100),
            Read(0xc1, 5),
            Read(0xc2, 0),
            Read(0x30b, 5),
            Write(0x390, CTR_FRZ),
            Kernel(7),
            Read(0xc1, 12),
            Read(0xc2, 7),
            Read(0x30b, 12),
        ],
    },
    Rule {
        name: "freeze on PMI, version 4: CTR_FRZ is set, GLOBAL_CTRL stays, clearing it counts on",
        models: FROM_V4,
        source: FREEZING,
        shown_by: &[
            Freeze(true),
            Write(0x186, REF_INT),
            Write(0x187, REF),
            Write(0xc1, LAST),
            Kernel(1),
            Read(0x38e, CTR_FRZ | 1),
            Read(0x38f, 0xf),
            Pmi(1),
            Kernel(100),
            Read(0xc1, 0),
            Read(0xc2, 1),
            Pmi(0),
            // The overflow's bit alone does not start them.
            Write(0x390, 1),
            Kernel(100),
            Read(0xc2, 1),
            Write(0x390, CTR_FRZ),
            Read(0x38e, 0),
            Kernel(9),
            Read(0xc1, 9),
            Read(0xc2, 10),
        ],
    },
    Rule {
        name: "freeze on PMI, version 4: an overflow without INT freezes nothing",
        models: FROM_V4,
        source: FREEZING,
        shown_by: &[
            Freeze(true),
            Write(0x186, REF),
            Write(0xc1, LAST),
            Kernel(9),
            Read(0x38e, 1),
            Read(0xc1, 8),
        ],
    },
    Rule {
        name: "freeze on PMI, version 4: counters that are frozen stay so when DEBUGCTL is cleared",
        models: FROM_V4,
        source: STATUS,
        shown_by: &[
            Freeze(true),
            Write(0x186, REF_INT),
            Write(0xc1, LAST),
            Kernel(1),
            Freeze(false),
            Kernel(9),
            Read(0xc1, 0),
            Read(0x38e, CTR_FRZ | 1),
            Write(0x390, CTR_FRZ | 1),
            Kernel(9),
            Read(0xc1, 9),
        ],
    },
    Rule {
        name: "freeze on PMI, versions 2 and 3: the enable bits of GLOBAL_CTRL are cleared",
        models: &["intel-v2", "intel-v3"],
        source: FREEZING,
        shown_by: &[
            Freeze(true),
            Write(0x186, REF_INT),
            Write(0x187, REF),
            Write(0xc1, LAST),
            Kernel(1),
            Read(0x38e, 1),
            Read(0x38f, 0),
            Pmi(1),
            Kernel(100),
            Read(0xc2, 1),
            Write(0x38f, 0xf),
            Kernel(9),
            Read(0xc2, 10),
        ],
    },
    Rule {
        name: "reset: CTR_FRZ and what is in use are cleared",
        models: FROM_V4,
        source: RESET,
        shown_by: &[
            Write(0x186, REF_INT),
            Write(0x391, COUNTERS | INDICATORS),
            Reset,
            Read(0x38e, 0),
            Read(0x392, 0),
            Write(0x186, REF),
            Kernel(9),
            Read(0xc1, 9),
        ],
    },
    Rule {
        name: "fixed counters that CPUID's bitmap leaves out are absent, whatever comes after them",
        models: &["intel-v5,counters=4,fixed=0x6"],
        source: VERSION5,
        shown_by: &[
            ReadAbsent(0x309),
            WriteAbsent(0x309),
            Read(0x30a, 0),
            Read(0x30b, 0),
            RdpmcGp(0x4000_0000),
            Rdpmc(0x4000_0001, 0),
            WriteGp(0x38d, 0x1),
            WriteGp(0x38d, 0x8),
            Write(0x38d, 0xbb0),
            WriteGp(0x38f, 1 << 32),
            Write(0x38f, 0x6_0000_0000),
            WriteGp(0x390, 1 << 32),
            WriteGp(0x391, 1 << 32),
            Kernel(3),
            Read(0x30b, 3),
            Read(0x392, COND_CHGD | 0x6_0000_0000),
        ],
    },
    Rule {
        name: "PERF_CAPABILITIES without full-width writes: it reads 0, and freezing works",
        models: &[
            "intel-v2,full-width=off,perf-capabilities=on",
            "intel-v3,full-width=off,perf-capabilities=on",
        ],
        source: MSRS,
        shown_by: &[
            Read(0x345, 0),
            WriteGp(0x345, 0),
            ReadAbsent(0x4c1),
            WriteAbsent(0x4c1),
            Freeze(true),
            Write(0x186, REF_INT),
            Write(0xc1, LAST),
            Kernel(1),
            Read(0x38f, 0),
        ],
    },
];
