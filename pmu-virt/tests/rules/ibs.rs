//! Rules of instruction-based sampling.

use super::Op::{
    FetchSample, IbsInterrupt, Kernel, NoIbsSample, Pmi, Read, ReadAbsent, Reset, SampledNear,
    User, Write, WriteAbsent, WriteGp,
};
use super::Rule;

const ALL: &[&str] = &[
    "amd-fam10h,ibs=on",
    "amd-core,ibs=on",
    "amd-perfmonv2,ibs=on",
];
const ZEN: &[&str] = &["amd-core,ibs=on", "amd-perfmonv2,ibs=on"];
const FAM10H: &[&str] = &["amd-fam10h,ibs=on"];

const APM: &str = "APM 2, 13.3 Instruction-Based Sampling";
const FETCH_CTL: &str = "Family 10h BKDG and later PPRs, MSRC001_1030";
const OP_CTL: &str = "Family 10h BKDG and later PPRs, MSRC001_1033";
const EXTENDED: &str = "APM 2, 16.7 Extended APIC registers, and 16.11";

const FETCH: u32 = 0xc001_1030;
const OP: u32 = 0xc001_1033;
const FETCH_EN: u64 = 1 << 48;
const FETCH_VAL: u64 = 1 << 49;
const RANDOM: u64 = 1 << 57;
const OP_EN: u64 = 1 << 17;
const OP_VAL: u64 = 1 << 18;
const OPS: u64 = 1 << 19;

pub(crate) const RULES: &[Rule] = &[
    Rule {
        name: "IBS: absent without it",
        models: &["amd-k7", "amd-fam10h", "amd-core", "amd-perfmonv2"],
        source: "APM 3, CPUID 8000_0001h ECX[10]",
        shown_by: &[
            ReadAbsent(FETCH),
            WriteAbsent(OP),
            ReadAbsent(0xc001_103a),
            ReadAbsent(0xc001_103b),
            ReadAbsent(0x850),
        ],
    },
    Rule {
        name: "IBS: what CPUID does not announce is absent",
        models: ALL,
        source: "APM 3, CPUID 8000_001Bh EAX",
        shown_by: &[
            ReadAbsent(0xc001_103c),
            WriteAbsent(0xc001_103c),
            ReadAbsent(0xc001_103d),
            WriteAbsent(0xc001_103d),
        ],
    },
    Rule {
        name: "IbsBrTarget: absent without BrnTrgt",
        models: FAM10H,
        source: "APM 3, CPUID 8000_001Bh EAX[5]",
        shown_by: &[ReadAbsent(0xc001_103b), WriteAbsent(0xc001_103b)],
    },
    Rule {
        name: "IBSCTL: entry 0 of the extended vector table, valid; read-only",
        models: ALL,
        source: "Family 15h BKDG and later PPRs, MSRC001_103A",
        shown_by: &[
            Read(0xc001_103a, 0x100),
            WriteGp(0xc001_103a, 0x100),
            Read(0xc001_103a, 0x100),
        ],
    },
    Rule {
        name: "IbsFetchCtl: software writes maximum, count, enable, valid and RandEn; other bits are dropped",
        models: ALL,
        source: FETCH_CTL,
        shown_by: &[
            Write(FETCH, !FETCH_EN),
            Read(FETCH, 0xffff_ffff | FETCH_VAL | RANDOM),
        ],
    },
    Rule {
        name: "IbsOpCtl: maximum and count have 27 bits with OpCntExt; other bits are dropped",
        models: ZEN,
        source: OP_CTL,
        shown_by: &[Write(OP, !OP_EN & !OPS), Read(OP, 0x07ff_ffff_07f4_ffff)],
    },
    Rule {
        name: "IbsOpCtl: maximum and count have 20 bits without OpCntExt",
        models: FAM10H,
        source: OP_CTL,
        shown_by: &[Write(OP, !OP_EN & !OPS), Read(OP, 0x000f_ffff_0004_ffff)],
    },
    Rule {
        name: "IBS: registers of a sample can be written; physical addresses have 52 bits",
        models: ALL,
        source: APM,
        shown_by: &[
            Write(0xc001_1031, u64::MAX),
            Read(0xc001_1031, u64::MAX),
            Write(0xc001_1032, u64::MAX),
            Read(0xc001_1032, 0xf_ffff_ffff_ffff),
            Write(0xc001_1034, 0x1234),
            Read(0xc001_1034, 0x1234),
            Write(0xc001_1039, u64::MAX),
            Read(0xc001_1039, 0xf_ffff_ffff_ffff),
        ],
    },
    Rule {
        name: "IbsOpCtl: cycles of both rings are counted from the written count",
        models: ALL,
        source: OP_CTL,
        shown_by: &[
            Write(OP, 0x10 | OP_EN | 3 << 32),
            Kernel(5),
            User(7),
            Read(OP, 0x10 | OP_EN | 15 << 32),
            NoIbsSample,
            Write(OP, 0x10),
            Kernel(5),
            Read(OP, 0x10),
        ],
    },
    Rule {
        name: "IbsOpVal: set by a sample; counting stops until software clears it",
        models: ALL,
        source: OP_CTL,
        shown_by: &[
            Write(OP, 0x10 | OP_EN),
            Kernel(0xff),
            NoIbsSample,
            Kernel(1),
            SampledNear(0x1234),
            Read(OP, 0x10 | OP_EN | OP_VAL),
            Kernel(0x1000),
            NoIbsSample,
            Read(OP, 0x10 | OP_EN | OP_VAL),
            Write(OP, 0x10 | OP_EN),
            Kernel(0x100),
            SampledNear(0x5678),
            Read(0xc001_1034, 0x5678),
            Pmi(0),
        ],
    },
    Rule {
        name: "IBS op: where the op was not seen, RIP is marked invalid and nothing else is said",
        models: ALL,
        source: "APM 2, 13.3.2 IBS Op Sampling; CPUID 8000_001Bh EAX[7]",
        shown_by: &[
            Write(0xc001_1037, u64::MAX),
            Write(0xc001_1038, u64::MAX),
            Write(OP, 1 | OP_EN),
            Kernel(16),
            SampledNear(0x1234),
            Read(0xc001_1034, 0x1234),
            Read(0xc001_1035, 1 << 38),
            Read(0xc001_1036, 0),
            Read(0xc001_1037, 0),
            Read(0xc001_1038, 0),
            Read(0xc001_1039, 0),
        ],
    },
    Rule {
        name: "IbsOpMaxCnt[26:20]: bits 26:20 of the maximum",
        models: ZEN,
        source: OP_CTL,
        shown_by: &[
            Write(OP, 1 << 20 | OP_EN),
            Kernel(0xf_ffff),
            NoIbsSample,
            Read(OP, 1 << 20 | OP_EN | 0xf_ffff << 32),
            Kernel(1),
            SampledNear(1),
        ],
    },
    Rule {
        name: "IbsOpMaxCnt: 0 never comes to its end",
        models: ALL,
        source: "Umpire; the manuals leave it undefined",
        shown_by: &[
            Write(OP, OP_EN),
            Kernel(0x1_0000_0000),
            NoIbsSample,
            Read(OP, OP_EN),
        ],
    },
    Rule {
        name: "IBS: a count at or above its maximum comes to its end with the next event",
        models: ALL,
        source: "Umpire; the manuals leave it open",
        shown_by: &[
            Write(OP, 1 | OP_EN | 0x1000 << 32),
            NoIbsSample,
            Kernel(1),
            SampledNear(1),
        ],
    },
    Rule {
        name: "IbsOpCntCtl: ops are counted, where the source counts instructions; a clock does not",
        models: ALL,
        source: OP_CTL,
        shown_by: &[
            Write(OP, 1 | OP_EN | OPS),
            Kernel(0x1000),
            NoIbsSample,
            Read(OP, 1 | OP_EN | OPS),
        ],
    },
    Rule {
        name: "IbsFetchVal: set by a sample; the count stays at its maximum, and counting stops until software clears it",
        models: ALL,
        source: FETCH_CTL,
        shown_by: &[
            Write(FETCH, 2 | FETCH_EN | 1 << 16),
            Kernel(15),
            NoIbsSample,
            Read(FETCH, 2 | FETCH_EN | 1 << 16),
            Kernel(1),
            FetchSample(0x40_1000, 0x1000),
            Read(
                FETCH,
                2 | 2 << 16 | FETCH_EN | FETCH_VAL | 1 << 50 | 1 << 52,
            ),
            Read(0xc001_1031, 0x40_1000),
            Read(0xc001_1032, 0x1000),
            Kernel(0x1000),
            NoIbsSample,
            Write(FETCH, 2 | FETCH_EN),
            Kernel(32),
            FetchSample(0x40_1000, 0x1000),
        ],
    },
    Rule {
        name: "IbsRandEn: the count begins with random bits 3:0",
        models: ALL,
        source: FETCH_CTL,
        shown_by: &[
            Write(FETCH, 1 | FETCH_EN | RANDOM),
            Read(FETCH, 1 | FETCH_EN | RANDOM),
            Kernel(16),
            FetchSample(0x1000, 0x1000),
        ],
    },
    Rule {
        name: "extended vector table: four entries, masked after reset",
        models: ALL,
        source: EXTENDED,
        shown_by: &[
            Read(0x840, 4 << 16),
            WriteGp(0x840, 0),
            Read(0x841, 0),
            Read(0x850, 0x1_0000),
            Read(0x853, 0x1_0000),
            ReadAbsent(0x854),
            Write(0x851, 0x1_04f2),
            Read(0x851, 0x1_04f2),
            Write(0x853, u64::MAX),
            Read(0x853, 0x1_07ff),
        ],
    },
    Rule {
        name: "IBS: a sample raises the interrupt of entry 0, if that is not masked",
        models: ALL,
        source: APM,
        shown_by: &[
            Write(OP, 1 | OP_EN),
            Kernel(16),
            SampledNear(1),
            IbsInterrupt(0),
            Write(0x850, 0x400),
            IbsInterrupt(0),
            Write(OP, 1 | OP_EN),
            Kernel(16),
            SampledNear(1),
            IbsInterrupt(0x400),
            IbsInterrupt(0),
            Write(0x850, 0xf2),
            Write(FETCH, 1 | FETCH_EN),
            Kernel(16),
            FetchSample(1, 1),
            IbsInterrupt(0xf2),
        ],
    },
    Rule {
        name: "IBS: fetches and ops are counted side by side",
        models: ALL,
        source: APM,
        shown_by: &[
            Write(OP, 1 | OP_EN),
            Write(FETCH, 2 | FETCH_EN),
            Kernel(16),
            SampledNear(0x1111),
            NoIbsSample,
            Read(FETCH, 2 | FETCH_EN | 1 << 16),
            Kernel(16),
            FetchSample(0x2000, 0x2000),
            NoIbsSample,
        ],
    },
    Rule {
        name: "northbridge and shared cache: not announced, and absent",
        models: &[
            "amd-fam10h,ibs=on",
            "amd-core",
            "amd-perfmonv2",
            "amd-perfmonv2,ibs=on",
        ],
        source: "APM 3, CPUID 8000_0001h ECX[24] and ECX[28]",
        shown_by: &[
            ReadAbsent(0xc001_0230),
            WriteAbsent(0xc001_0231),
            ReadAbsent(0xc001_0240),
            WriteAbsent(0xc001_0247),
        ],
    },
    Rule {
        name: "reset: IBS stands and has no sample",
        models: ALL,
        source: APM,
        shown_by: &[
            Write(0x850, 0x400),
            Write(0xc001_1034, 0x1234),
            Write(OP, 1 | OP_EN),
            Kernel(15),
            Reset,
            Kernel(100),
            NoIbsSample,
            Read(OP, 0),
            Read(FETCH, 0),
            Read(0xc001_1034, 0),
            Read(0x850, 0x1_0000),
            IbsInterrupt(0),
        ],
    },
];
