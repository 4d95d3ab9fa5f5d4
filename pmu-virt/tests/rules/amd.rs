//! Rules of the AMD models.

use super::Op::{
    Freeze, Kernel, Pmi, Rdpmc, RdpmcGp, Read, ReadAbsent, Reset, User, Write, WriteAbsent,
};
use super::Rule;

const ALL: &[&str] = &["amd-k7", "amd-fam10h", "amd-core", "amd-perfmonv2"];
const LEGACY_ONLY: &[&str] = &["amd-k7", "amd-fam10h"];
const MODERN: &[&str] = &["amd-fam10h", "amd-core", "amd-perfmonv2"];
const SIX: &[&str] = &["amd-core", "amd-perfmonv2"];
const K7: &[&str] = &["amd-k7"];
const V2: &[&str] = &["amd-perfmonv2"];

const FREEZES: &[&str] = &["amd-perfmonv2,freeze=on"];

const APM_FREEZE: &str = "APM 2, 13.1.1.1 DebugCtl MSR; APM 3, CPUID 8000_0022h EAX[2]";
const APM_CTL: &str = "APM 2, 13.2.1 Performance Counter MSRs";
const APM_EXT: &str = "APM 2, 13.2.1, core extension (CPUID 8000_0001h ECX[23])";
const K8_BKDG: &str = "K8 BKDG, PerfEvtSel registers";
const BKDG10: &str = "Family 10h BKDG, MSRC001_0000 to 0003";
const RDPMC: &str = "APM 3, RDPMC";
const PPR: &str = "Family 19h model 11h PPR, MSRC000_0300 to 0303";

/// Cycles at every CPL, enabled; then with INT, then one ring each.
const CYCLES: u64 = 0x43_0076;
const CYCLES_INT: u64 = 0x53_0076;
const CYCLES_OS: u64 = 0x42_0076;
const CYCLES_USR: u64 = 0x41_0076;
const GUEST_ONLY: u64 = 1 << 40;
const HOST_ONLY: u64 = 1 << 41;

pub(crate) const RULES: &[Rule] = &[
    Rule {
        name: "PERF_CTL: reserved bits are dropped, not refused (K7, K8)",
        models: K7,
        source: K8_BKDG,
        shown_by: &[Write(0xc001_0000, u64::MAX), Read(0xc001_0000, 0xffdf_ffff)],
    },
    Rule {
        name: "PERF_CTL: reserved bits are dropped, not refused (Family 10h and later)",
        models: MODERN,
        source: BKDG10,
        shown_by: &[
            Write(0xc001_0003, u64::MAX),
            Read(0xc001_0003, 0x30f_ffd7_ffff),
        ],
    },
    Rule {
        name: "PERF_CTL: USR counts CPL 1 to 3, OS counts CPL 0",
        models: ALL,
        source: APM_CTL,
        shown_by: &[
            Write(0xc001_0000, CYCLES_OS),
            Write(0xc001_0001, CYCLES_USR),
            Kernel(0x10),
            User(0x100),
            Read(0xc001_0004, 0x10),
            Read(0xc001_0005, 0x100),
        ],
    },
    Rule {
        name: "PERF_CTL: without EN, or without USR and OS, nothing counts",
        models: ALL,
        source: APM_CTL,
        shown_by: &[
            Write(0xc001_0000, CYCLES & !(1 << 22)),
            Write(0xc001_0001, 0x40_0076),
            Kernel(9),
            User(9),
            Read(0xc001_0004, 0),
            Read(0xc001_0005, 0),
        ],
    },
    Rule {
        name: "PERF_CTL: HostOnly counts, since the guest by itself is a host",
        models: MODERN,
        source: BKDG10,
        shown_by: &[
            Write(0xc001_0000, HOST_ONLY | CYCLES),
            Read(0xc001_0000, HOST_ONLY | CYCLES),
            Kernel(9),
            Read(0xc001_0004, 9),
        ],
    },
    Rule {
        name: "PERF_CTL: GuestOnly never counts, since the guest has no guests",
        models: MODERN,
        source: BKDG10,
        shown_by: &[
            Write(0xc001_0000, GUEST_ONLY | CYCLES),
            Kernel(9),
            Read(0xc001_0004, 0),
        ],
    },
    Rule {
        name: "PERF_CTL: GuestOnly and HostOnly together count",
        models: MODERN,
        source: BKDG10,
        shown_by: &[
            Write(0xc001_0000, GUEST_ONLY | HOST_ONLY | CYCLES),
            Kernel(9),
            Read(0xc001_0004, 9),
        ],
    },
    Rule {
        name: "PERF_CTL: K7 and K8 have no GuestOnly and count",
        models: K7,
        source: K8_BKDG,
        shown_by: &[
            Write(0xc001_0000, GUEST_ONLY | CYCLES),
            Read(0xc001_0000, CYCLES),
            Kernel(9),
            Read(0xc001_0004, 9),
        ],
    },
    Rule {
        name: "PERF_CTL: bits 35:32 extend the event select",
        models: MODERN,
        source: BKDG10,
        shown_by: &[
            Write(0xc001_0000, 1 << 32 | CYCLES),
            Kernel(9),
            Read(0xc001_0004, 0),
        ],
    },
    Rule {
        name: "PERF_CTL: K7 and K8 have an 8-bit event select",
        models: K7,
        source: K8_BKDG,
        shown_by: &[
            Write(0xc001_0000, 1 << 32 | CYCLES),
            Kernel(9),
            Read(0xc001_0004, 9),
        ],
    },
    Rule {
        name: "PERF_CTL: event 120h mask 1 is P0 cycles, with PerfMonV2",
        models: V2,
        source: "Family 19h model 11h PPR, PMCx120",
        shown_by: &[
            Write(0xc001_0200, 0x1_0043_0120),
            Kernel(9),
            Read(0xc001_0201, 9),
        ],
    },
    Rule {
        name: "PERF_CTL: an event that nobody can count leaves the counter frozen",
        models: ALL,
        source: "Umpire; AMD has no way to tell the guest",
        shown_by: &[
            Write(0xc001_0004, 7),
            Write(0xc001_0000, 0x53_00c3),
            Kernel(9),
            Read(0xc001_0004, 7),
            Pmi(0),
        ],
    },
    Rule {
        name: "PERF_CTR: 48 bits, those above are ignored",
        models: ALL,
        source: APM_CTL,
        shown_by: &[
            Write(0xc001_0004, u64::MAX),
            Read(0xc001_0004, 0xffff_ffff_ffff),
            Rdpmc(0, 0xffff_ffff_ffff),
            Write(0xc001_0007, 0x8000_0000),
            Read(0xc001_0007, 0x8000_0000),
        ],
    },
    Rule {
        name: "PERF_CTR: an overflow with INT is a PMI; the count goes on",
        models: ALL,
        source: APM_CTL,
        shown_by: &[
            Write(0xc001_0004, 0xffff_ffff_fff0),
            Write(0xc001_0000, CYCLES_INT),
            Kernel(0xf),
            Pmi(0),
            Kernel(4),
            Pmi(1),
            Read(0xc001_0004, 3),
        ],
    },
    Rule {
        name: "PERF_CTR: an overflow without INT is no PMI",
        models: ALL,
        source: APM_CTL,
        shown_by: &[
            Write(0xc001_0004, 0xffff_ffff_ffff),
            Write(0xc001_0000, CYCLES),
            Kernel(1),
            Pmi(0),
            Read(0xc001_0004, 0),
        ],
    },
    Rule {
        name: "core extension: the first four pairs have two names",
        models: SIX,
        source: APM_EXT,
        shown_by: &[
            Write(0xc001_0206, 0x76),
            Read(0xc001_0003, 0x76),
            Write(0xc001_0004, 0x1234),
            Read(0xc001_0201, 0x1234),
        ],
    },
    Rule {
        name: "core extension: six pairs",
        models: SIX,
        source: APM_EXT,
        shown_by: &[
            Write(0xc001_020a, CYCLES),
            Kernel(9),
            Read(0xc001_020b, 9),
            Rdpmc(5, 9),
            ReadAbsent(0xc001_020c),
        ],
    },
    Rule {
        name: "core extension: absent before",
        models: LEGACY_ONLY,
        source: APM_EXT,
        shown_by: &[
            ReadAbsent(0xc001_0200),
            WriteAbsent(0xc001_0201),
            RdpmcGp(4),
        ],
    },
    Rule {
        name: "RDPMC: the index alone, no type bits",
        models: ALL,
        source: RDPMC,
        shown_by: &[
            Rdpmc(3, 0),
            RdpmcGp(6),
            RdpmcGp(0x4000_0000),
            RdpmcGp(0x8000_0000),
            RdpmcGp(u32::MAX),
        ],
    },
    Rule {
        name: "no status and no global control before PerfMonV2",
        models: &["amd-k7", "amd-fam10h", "amd-core"],
        source: PPR,
        shown_by: &[
            ReadAbsent(0xc000_0300),
            WriteAbsent(0xc000_0301),
            WriteAbsent(0xc000_0302),
            WriteAbsent(0xc000_0303),
        ],
    },
    Rule {
        name: "PerfCntrGlobalCtl: every counter is on after reset; other bits are dropped",
        models: V2,
        source: PPR,
        shown_by: &[
            Read(0xc000_0301, 0x3f),
            Write(0xc000_0301, u64::MAX),
            Read(0xc000_0301, 0x3f),
            Write(0xc000_0301, 0),
            Reset,
            Read(0xc000_0301, 0x3f),
        ],
    },
    Rule {
        name: "PerfCntrGlobalCtl: enables together with EN",
        models: V2,
        source: PPR,
        shown_by: &[
            Write(0xc001_0200, CYCLES),
            Write(0xc000_0301, 0b10),
            Kernel(9),
            Read(0xc001_0201, 0),
            Write(0xc000_0301, 0b01),
            Kernel(9),
            Read(0xc001_0201, 9),
        ],
    },
    Rule {
        name: "PerfCntrGlobalStatus: set by overflow; writes are ignored",
        models: V2,
        source: PPR,
        shown_by: &[
            Write(0xc001_0201, 0xffff_ffff_ffff),
            Write(0xc001_0200, CYCLES),
            Kernel(1),
            Read(0xc000_0300, 1),
            Write(0xc000_0300, 0),
            Read(0xc000_0300, 1),
        ],
    },
    Rule {
        name: "PerfCntrGlobalStatusClr and Set: clear and set what is written, read as 0",
        models: V2,
        source: PPR,
        shown_by: &[
            Write(0xc000_0303, u64::MAX),
            Read(0xc000_0300, 0x3f),
            Write(0xc000_0302, 0b11),
            Read(0xc000_0300, 0x3c),
            Read(0xc000_0302, 0),
            Read(0xc000_0303, 0),
            Pmi(0),
        ],
    },
    Rule {
        name: "PerfCntrFreeze: counters stand while it is set; software sets and clears it",
        models: FREEZES,
        source: APM_FREEZE,
        shown_by: &[
            Write(0xc001_0200, CYCLES),
            Kernel(5),
            Write(0xc000_0303, 1 << 59),
            Read(0xc000_0300, 1 << 59),
            Kernel(100),
            Read(0xc001_0201, 5),
            Read(0xc000_0301, 0x3f),
            Write(0xc000_0302, 1 << 59),
            Read(0xc000_0300, 0),
            Kernel(7),
            Read(0xc001_0201, 12),
        ],
    },
    Rule {
        name: "FreezePerfMonOnPMI: a PMI sets PerfCntrFreeze, and the counters stand until it is cleared",
        models: FREEZES,
        source: APM_FREEZE,
        shown_by: &[
            Freeze(true),
            Write(0xc001_0200, CYCLES_INT),
            Write(0xc001_0202, CYCLES),
            Write(0xc001_0201, 0xffff_ffff_ffff),
            Kernel(1),
            Read(0xc000_0300, 1 << 59 | 1),
            Pmi(1),
            Kernel(100),
            Read(0xc001_0203, 1),
            Write(0xc000_0302, 1 << 59 | 1),
            Kernel(9),
            Read(0xc001_0203, 10),
        ],
    },
    Rule {
        name: "FreezePerfMonOnPMI: without CPUID's bit an overflow freezes nothing, and bit 59 does not exist",
        models: V2,
        source: APM_FREEZE,
        shown_by: &[
            Write(0xc000_0303, 1 << 59),
            Read(0xc000_0300, 0),
            Write(0xc001_0200, CYCLES_INT),
            Write(0xc001_0201, 0xffff_ffff_ffff),
            Kernel(1),
            Read(0xc000_0300, 1),
            Kernel(9),
            Read(0xc001_0201, 9),
        ],
    },
    Rule {
        name: "the Intel registers are absent",
        models: ALL,
        source: APM_CTL,
        shown_by: &[
            ReadAbsent(0xc1),
            WriteAbsent(0x186),
            ReadAbsent(0x38f),
            ReadAbsent(0x345),
        ],
    },
    Rule {
        name: "reset: every AMD register takes its reset value",
        models: ALL,
        source: APM_CTL,
        shown_by: &[
            Write(0xc001_0000, CYCLES_INT),
            Write(0xc001_0004, 0xffff_ffff_fff0),
            Kernel(0x20),
            Reset,
            Read(0xc001_0000, 0),
            Read(0xc001_0004, 0),
            Pmi(0),
            Kernel(9),
            Read(0xc001_0004, 0),
        ],
    },
];
