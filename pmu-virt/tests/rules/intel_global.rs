//! Rules of the Intel models: global and fixed registers, RDPMC, reset.

use super::Op::{
    Kernel, Pmi, Rdpmc, RdpmcGp, Read, ReadAbsent, Reset, User, Write, WriteAbsent, WriteGp,
};
use super::Rule;

const V1: &[&str] = &["intel-v1"];
const GLOBAL: &[&str] = super::INTEL_GLOBAL;
const BEFORE_V4: &[&str] = &["intel-v2", "intel-v3"];
const ALL: &[&str] = super::INTEL;

const EVTSEL: &str = "SDM 3B, Architectural Performance Monitoring Version 1, IA32_PERFEVTSELx";
const VERSION2: &str = "SDM 3B, Architectural Performance Monitoring Version 2";
const RDPMC: &str = "SDM 2B, RDPMC";
const MSRS: &str = "SDM 4, Architectural MSRs";
const RESET: &str = "SDM 3A, Processor States Following Power-up, Reset, or INIT";

/// Reference cycles at every CPL, enabled; then with INT.
const REF: u64 = 0x43_013c;
const REF_INT: u64 = 0x53_013c;

pub(crate) const RULES: &[Rule] = &[
    Rule {
        name: "PERF_CAPABILITIES: read-only, FW_WRITE is bit 13",
        models: GLOBAL,
        source: MSRS,
        shown_by: &[
            Read(0x345, 0x2000),
            WriteGp(0x345, 0x2000),
            WriteGp(0x345, 0),
        ],
    },
    Rule {
        name: "version 1: no fixed counters, no global registers",
        models: V1,
        source: VERSION2,
        shown_by: &[
            ReadAbsent(0x309),
            ReadAbsent(0x38d),
            WriteAbsent(0x38e),
            WriteAbsent(0x38f),
            WriteAbsent(0x390),
        ],
    },
    Rule {
        name: "version 1: EN alone enables; an overflow with INT is a PMI",
        models: V1,
        source: EVTSEL,
        shown_by: &[
            Write(0x186, REF_INT),
            Write(0xc1, 0xffff_fff0),
            Kernel(0x18),
            Read(0xc1, 8),
            Pmi(1),
        ],
    },
    Rule {
        name: "GLOBAL_CTRL: programmable counters are on after reset, fixed ones off",
        models: GLOBAL,
        source: RESET,
        shown_by: &[
            Read(0x38f, 0xf),
            Write(0x38f, 0x7_0000_0000),
            Reset,
            Read(0x38f, 0xf),
        ],
    },
    Rule {
        name: "GLOBAL_CTRL: bits of absent counters are refused",
        models: GLOBAL,
        source: VERSION2,
        shown_by: &[
            WriteGp(0x38f, 1 << 4),
            WriteGp(0x38f, 1 << 35),
            WriteGp(0x38f, 1 << 63),
            Write(0x38f, 0x7_0000_000f),
            Read(0x38f, 0x7_0000_000f),
        ],
    },
    Rule {
        name: "GLOBAL_CTRL: enables together with EN",
        models: GLOBAL,
        source: VERSION2,
        shown_by: &[
            Write(0x38f, 0b10),
            Write(0x186, REF),
            Write(0x187, REF),
            Kernel(5),
            Read(0xc1, 0),
            Read(0xc2, 5),
            Write(0x38f, 0b11),
            Kernel(5),
            Read(0xc1, 5),
            Read(0xc2, 10),
        ],
    },
    Rule {
        name: "GLOBAL_STATUS: read-only",
        models: GLOBAL,
        source: VERSION2,
        shown_by: &[WriteGp(0x38e, 0), WriteGp(0x38e, 1), Read(0x38e, 0)],
    },
    Rule {
        name: "GLOBAL_STATUS: a carry out of the width sets the bit; the count goes on",
        models: GLOBAL,
        source: VERSION2,
        shown_by: &[
            Write(0x186, REF_INT),
            Write(0x4c1, 0xffff_ffff_fff0),
            Kernel(0xf),
            Read(0x38e, 0),
            Pmi(0),
            Kernel(1),
            Read(0xc1, 0),
            Read(0x38e, 1),
            Pmi(1),
            Kernel(3),
            Read(0xc1, 3),
        ],
    },
    Rule {
        name: "GLOBAL_STATUS: without INT the bit is set, and no PMI is raised",
        models: GLOBAL,
        source: VERSION2,
        shown_by: &[
            Write(0x187, REF),
            Write(0xc2, 0xffff_fff0),
            Kernel(0x10),
            Pmi(0),
            Read(0x38e, 0b10),
        ],
    },
    Rule {
        name: "GLOBAL_OVF_CTRL: clears the bits written, reads as 0",
        models: GLOBAL,
        source: VERSION2,
        shown_by: &[
            Write(0x186, REF),
            Write(0x187, REF),
            Write(0xc1, 0xffff_ffff),
            Write(0xc2, 0xffff_ffff),
            Kernel(1),
            Write(0x390, 0b10),
            Read(0x38e, 0b01),
            Read(0x390, 0),
        ],
    },
    Rule {
        name: "GLOBAL_OVF_CTRL: bits 62 and 63 are accepted, reserved ones refused",
        models: BEFORE_V4,
        source: VERSION2,
        shown_by: &[
            Write(0x390, 0b11 << 62),
            WriteGp(0x390, 1 << 61),
            WriteGp(0x390, 1 << 4),
            WriteGp(0x390, 1 << 35),
        ],
    },
    Rule {
        name: "FIXED_CTR: full-width writes; bits above the width are refused",
        models: GLOBAL,
        source: VERSION2,
        shown_by: &[
            Write(0x30b, 0xffff_ffff_ffff),
            Read(0x30b, 0xffff_ffff_ffff),
            WriteGp(0x30b, 1 << 48),
            Rdpmc(0x4000_0002, 0xffff_ffff_ffff),
        ],
    },
    Rule {
        name: "FIXED_CTR: absent ones have no registers",
        models: &["intel-v2,fixed=2"],
        source: MSRS,
        shown_by: &[
            Read(0x30a, 0),
            ReadAbsent(0x30b),
            WriteAbsent(0x30c),
            WriteGp(0x38d, 1 << 8),
        ],
    },
    Rule {
        name: "FIXED_CTR_CTRL: any-thread and absent fields are reserved",
        models: &["intel-v2", "intel-v5,counters=4"],
        source: VERSION2,
        shown_by: &[
            Write(0x38d, 0xbbb),
            WriteGp(0x38d, 1 << 2),
            WriteGp(0x38d, 1 << 6),
            WriteGp(0x38d, 1 << 12),
            Read(0x38d, 0xbbb),
        ],
    },
    Rule {
        name: "FIXED_CTR_CTRL: bit 0 counts CPL 0, bit 1 CPL 1 to 3",
        models: GLOBAL,
        source: VERSION2,
        shown_by: &[
            Write(0x38f, 0x4_0000_0000),
            Write(0x38d, 0x100),
            Kernel(0x10),
            User(0x20),
            Read(0x30b, 0x10),
            Write(0x38d, 0x200),
            Kernel(0x10),
            User(0x20),
            Read(0x30b, 0x30),
        ],
    },
    Rule {
        name: "FIXED_CTR: overflow sets bit 32 + n, and bit 3 of the field raises the PMI",
        models: GLOBAL,
        source: VERSION2,
        shown_by: &[
            Write(0x38f, 0x4_0000_0000),
            Write(0x30b, 0xffff_ffff_ffff),
            Write(0x38d, 0x300),
            Kernel(1),
            Read(0x38e, 0x4_0000_0000),
            Pmi(0),
            Write(0x30b, 0xffff_ffff_ffff),
            Write(0x38d, 0xb00),
            Kernel(1),
            Pmi(0x4_0000_0000),
        ],
    },
    Rule {
        name: "RDPMC: ECX[30] selects fixed counters",
        models: GLOBAL,
        source: RDPMC,
        shown_by: &[
            Write(0xc4, 3),
            Rdpmc(3, 3),
            RdpmcGp(4),
            Write(0x309, 9),
            Rdpmc(0x4000_0000, 9),
            RdpmcGp(0x4000_0003),
        ],
    },
    Rule {
        name: "RDPMC: other type bits name nothing",
        models: ALL,
        source: RDPMC,
        shown_by: &[
            RdpmcGp(0x2000_0000),
            RdpmcGp(0x8000_0000),
            RdpmcGp(0x6000_0000),
            RdpmcGp(0x0001_0000),
            RdpmcGp(u32::MAX),
        ],
    },
    Rule {
        name: "RDPMC: without fixed counters ECX[30] names nothing",
        models: V1,
        source: RDPMC,
        shown_by: &[Rdpmc(1, 0), RdpmcGp(2), RdpmcGp(0x4000_0000)],
    },
    Rule {
        name: "reset: every register takes its reset value",
        models: ALL,
        source: RESET,
        shown_by: &[
            Write(0x186, REF_INT),
            Write(0xc1, 0xffff_fff0),
            Kernel(0x20),
            Reset,
            Read(0x186, 0),
            Read(0xc1, 0),
            Pmi(0),
            Kernel(9),
            Read(0xc1, 0),
        ],
    },
    Rule {
        name: "reset: status and fixed counters are cleared",
        models: GLOBAL,
        source: RESET,
        shown_by: &[
            Write(0x38f, 0x4_0000_000f),
            Write(0x38d, 0xb00),
            Write(0x30b, 0xffff_ffff_ffff),
            Kernel(5),
            Reset,
            Read(0x38d, 0),
            Read(0x38e, 0),
            Read(0x30b, 0),
        ],
    },
];
