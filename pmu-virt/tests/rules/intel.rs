//! Rules of the Intel models: selects and counters.

use super::Op::{Kernel, Pmi, Rdpmc, Read, ReadAbsent, User, Write, WriteAbsent, WriteGp};
use super::Rule;

const ALL: &[&str] = super::INTEL;
const FULL: &[&str] = super::INTEL_GLOBAL;

const EVTSEL: &str = "SDM 3B, Architectural Performance Monitoring Version 1, IA32_PERFEVTSELx";
const LEGACY: &str = "SDM 3B, Full-Width Writes to Performance Counter Registers";
const MSRS: &str = "SDM 4, Architectural MSRs";

/// Reference cycles at every CPL, enabled; then with INT, then one ring each.
const REF: u64 = 0x43_013c;
const REF_INT: u64 = 0x53_013c;
const REF_OS: u64 = 0x42_013c;
const REF_USR: u64 = 0x41_013c;

pub(crate) const RULES: &[Rule] = &[
    Rule {
        name: "select: bits 63:32 are reserved",
        models: ALL,
        source: EVTSEL,
        shown_by: &[
            WriteGp(0x186, 1 << 32),
            WriteGp(0x187, 1 << 63),
            Read(0x186, 0),
        ],
    },
    Rule {
        name: "select: any-thread is reserved before version 3",
        models: &["intel-v1", "intel-v2"],
        source: EVTSEL,
        shown_by: &[WriteGp(0x186, 1 << 21), Read(0x186, 0)],
    },
    Rule {
        name: "select: pin control is kept, without effect",
        models: ALL,
        source: EVTSEL,
        shown_by: &[
            Write(0x186, 1 << 19 | REF),
            Read(0x186, 1 << 19 | REF),
            Kernel(5),
            Read(0xc1, 5),
        ],
    },
    Rule {
        name: "select: a refused write changes nothing",
        models: ALL,
        source: EVTSEL,
        shown_by: &[
            Write(0x186, REF),
            WriteGp(0x186, 1 << 40 | 0x76),
            Read(0x186, REF),
            Kernel(9),
            Read(0xc1, 9),
        ],
    },
    Rule {
        name: "select: USR counts CPL 1 to 3, OS counts CPL 0",
        models: ALL,
        source: EVTSEL,
        shown_by: &[
            Write(0x186, REF_OS),
            Write(0x187, REF_USR),
            Kernel(0x10),
            User(0x100),
            Read(0xc1, 0x10),
            Read(0xc2, 0x100),
        ],
    },
    Rule {
        name: "select: without USR and OS nothing counts",
        models: ALL,
        source: EVTSEL,
        shown_by: &[Write(0x186, 0x40_013c), Kernel(9), User(9), Read(0xc1, 0)],
    },
    Rule {
        name: "select: without EN nothing counts, and the count stays",
        models: ALL,
        source: EVTSEL,
        shown_by: &[
            Write(0x186, REF),
            Kernel(9),
            Write(0x186, REF & !(1 << 22)),
            Kernel(9),
            Read(0xc1, 9),
            Write(0x186, REF),
            Kernel(1),
            Read(0xc1, 10),
        ],
    },
    Rule {
        name: "select: an event that nobody can count leaves the counter frozen",
        models: ALL,
        source: "Umpire; CPUID 0AH EBX told the guest",
        shown_by: &[
            Write(0xc1, 7),
            Write(0x186, 0x53_412e),
            Kernel(9),
            Read(0xc1, 7),
            Pmi(0),
        ],
    },
    Rule {
        name: "counter: a legacy write extends the sign of bit 31",
        models: FULL,
        source: LEGACY,
        shown_by: &[
            Write(0xc1, 0x8000_0000),
            Read(0xc1, 0xffff_8000_0000),
            Write(0xc1, 0x1234_5678_7fff_ffff),
            Read(0xc1, 0x7fff_ffff),
        ],
    },
    Rule {
        name: "counter: the sign is extended to the counter's width",
        models: &["intel-v1", "intel-v2,width=40"],
        source: LEGACY,
        shown_by: &[
            Write(0xc1, 0xffff_fff0),
            Read(0xc1, 0xff_ffff_fff0),
            Rdpmc(0, 0xff_ffff_fff0),
        ],
    },
    Rule {
        name: "counter: a full-width write takes every bit of the width",
        models: FULL,
        source: LEGACY,
        shown_by: &[
            Write(0x4c1, 0x8000_0000_0001),
            Read(0x4c1, 0x8000_0000_0001),
            Read(0xc1, 0x8000_0000_0001),
            Rdpmc(0, 0x8000_0000_0001),
        ],
    },
    Rule {
        name: "counter: a full-width write above the width is refused",
        models: &[
            "intel-v1,width=48,full-width=on",
            "intel-v2",
            "intel-v3",
            "intel-v4",
            "intel-v5",
        ],
        source: LEGACY,
        shown_by: &[
            WriteGp(0x4c1, 1 << 48),
            WriteGp(0x4c1, u64::MAX),
            Read(0x4c1, 0),
        ],
    },
    Rule {
        name: "counter: full-width writes exist only with FW_WRITE",
        models: &[
            "intel-v1",
            "intel-v2,full-width=off",
            "intel-v4,full-width=off",
        ],
        source: LEGACY,
        shown_by: &[
            WriteAbsent(0x4c1),
            ReadAbsent(0x4c1),
            ReadAbsent(0x345),
            WriteAbsent(0x345),
        ],
    },
    Rule {
        name: "counter: a written value goes on counting",
        models: ALL,
        source: EVTSEL,
        shown_by: &[
            Write(0x186, REF),
            Kernel(10),
            Write(0xc1, 0x100),
            Kernel(10),
            Read(0xc1, 0x10a),
        ],
    },
    Rule {
        name: "counter: several wraps at once leave the count right",
        models: &["intel-v2,width=32"],
        source: EVTSEL,
        shown_by: &[
            Write(0x186, REF_INT),
            Write(0xc1, 1),
            Kernel(0x3_0000_0005),
            Read(0xc1, 6),
            Read(0x38e, 1),
            Pmi(1),
            Pmi(0),
        ],
    },
    Rule {
        name: "absent counters have no registers",
        models: ALL,
        source: MSRS,
        shown_by: &[
            ReadAbsent(0xc5),
            WriteAbsent(0x18a),
            ReadAbsent(0x4c5),
            ReadAbsent(0xc001_0000),
        ],
    },
];
