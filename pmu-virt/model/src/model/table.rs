//! The register tables: one constant per model.

use arbiter::CounterId;

use super::{Family, MAX_FIXED, MAX_PROGRAMMABLE, ModelSummary, Numbers, Properties, Switch};
use crate::event::EventFamily;
use crate::ibs::{EXTENDED_VECTORS, IbsRegister, caps};
use crate::ids::Vendor;
use crate::register::{Register, WriteForm};

/// Registers at consecutive or evenly spaced MSR indices.
#[derive(Clone, Copy, Debug)]
pub struct RegisterRow {
    /// MSR index of the first one.
    pub first: u32,
    /// Distance from one to the next.
    pub stride: u32,
    /// How many there are.
    pub count: RowCount,
    /// What they are.
    pub kind: RegisterKind,
    /// What the model must have for them to be present.
    pub needs: RowNeeds,
}

/// What a model must have for the registers of a row to be present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowNeeds {
    /// Nothing more than its name.
    Nothing,
    /// Full-width writes.
    FullWidth,
    /// `IA32_PERF_CAPABILITIES`.
    Capabilities,
    /// Instruction-based sampling with all of these [`caps`].
    Ibs(u32),
    Pebs,
    /// PEBS with records of groups.
    PebsGroups,
}

/// How many registers a row stands for.
#[derive(Clone, Copy, Debug)]
pub enum RowCount {
    /// This many.
    Exactly(u8),
    /// One per programmable counter.
    Programmable,
    /// One per fixed-function counter.
    Fixed,
    /// One, where there is any fixed-function counter.
    OneIfFixed,
}

/// What the registers of a row are.
#[derive(Clone, Copy, Debug)]
pub enum RegisterKind {
    /// Programmable counters.
    Counter(WriteForm),
    /// Fixed-function counters.
    FixedCounter,
    /// Event selects.
    Select,
    /// Entries of the local APIC's extended vector table.
    ApicVector,
    /// A register that exists once.
    Single(Register),
}

impl RowCount {
    #[inline]
    pub(super) fn number(self, has: &Properties) -> u8 {
        match self {
            RowCount::Exactly(n) => n,
            RowCount::Programmable => has.programmable,
            RowCount::Fixed => has.fixed,
            RowCount::OneIfFixed => u8::from(has.fixed_map != 0),
        }
    }
}

impl RegisterKind {
    #[inline]
    pub(super) fn register(self, index: u8) -> Register {
        match self {
            RegisterKind::Counter(form) => Register::Counter {
                counter: CounterId::Programmable(index),
                form,
            },
            RegisterKind::FixedCounter => Register::Counter {
                counter: CounterId::Fixed(index),
                form: WriteForm::FullWidth,
            },
            RegisterKind::Select => Register::Select(index),
            RegisterKind::ApicVector => Register::Ibs(IbsRegister::ApicVector(index)),
            RegisterKind::Single(register) => register,
        }
    }
}

impl RegisterRow {
    #[inline]
    pub(super) fn msr(&self, index: u8) -> u32 {
        self.first + u32::from(index) * self.stride
    }
}

const fn row(first: u32, stride: u32, count: RowCount, kind: RegisterKind) -> RegisterRow {
    RegisterRow {
        first,
        stride,
        count,
        kind,
        needs: RowNeeds::Nothing,
    }
}

const fn single(msr: u32, register: Register) -> RegisterRow {
    row(msr, 1, RowCount::Exactly(1), RegisterKind::Single(register))
}

const fn if_any(needs: RowNeeds, row: RegisterRow) -> RegisterRow {
    RegisterRow { needs, ..row }
}

/// Full-width writes.
const A_PMC: RegisterRow = if_any(
    RowNeeds::FullWidth,
    row(0x4c1, 1, RowCount::Programmable, FULL_WIDTH),
);
const PERF_CAPABILITIES: RegisterRow = if_any(
    RowNeeds::Capabilities,
    single(0x345, Register::PerfCapabilities),
);
const FIXED_CTR_CTRL: RegisterRow = row(
    0x38d,
    1,
    RowCount::OneIfFixed,
    RegisterKind::Single(Register::FixedControl),
);

/// SDM vol. 4, "IA-32 Architectural MSRs": 0x3F1, 0x600; vol. 3B, "Adaptive PEBS": 0x3F2.
const PEBS_ENABLE: RegisterRow = if_any(RowNeeds::Pebs, single(0x3f1, Register::PebsEnable));
const PEBS_DATA_CFG: RegisterRow = if_any(
    RowNeeds::PebsGroups,
    single(0x3f2, Register::PebsDataConfig),
);
const DS_AREA: RegisterRow = if_any(RowNeeds::Pebs, single(0x600, Register::DsArea));

const SIGN_EXTENDED: RegisterKind = RegisterKind::Counter(WriteForm::SignExtend32);
const FULL_WIDTH: RegisterKind = RegisterKind::Counter(WriteForm::FullWidth);
const TRUNCATED: RegisterKind = RegisterKind::Counter(WriteForm::Truncate);

// Rows stand in the order in which people look for them.

/// SDM vol. 4, "IA-32 Architectural MSRs": 0xC1, 0x186; 0x345 and 0x4C1.
const INTEL_V1_ROWS: &[RegisterRow] = &[
    row(0xc1, 1, RowCount::Programmable, SIGN_EXTENDED),
    row(0x186, 1, RowCount::Programmable, RegisterKind::Select),
    A_PMC,
    PERF_CAPABILITIES,
];

/// Version 2 adds 0x309 to 0x30B and 0x38D to 0x390; version 3 has the same.
const INTEL_V2_ROWS: &[RegisterRow] = &[
    row(0xc1, 1, RowCount::Programmable, SIGN_EXTENDED),
    row(0x186, 1, RowCount::Programmable, RegisterKind::Select),
    single(0x38f, Register::GlobalControl),
    single(0x38e, Register::GlobalStatus),
    single(0x390, Register::GlobalStatusClear),
    row(0x309, 1, RowCount::Fixed, RegisterKind::FixedCounter),
    FIXED_CTR_CTRL,
    A_PMC,
    PERF_CAPABILITIES,
    PEBS_ENABLE,
    PEBS_DATA_CFG,
    DS_AREA,
];

/// Version 4 adds 0x391 and 0x392; version 5 has the same.
const INTEL_V4_ROWS: &[RegisterRow] = &[
    row(0xc1, 1, RowCount::Programmable, SIGN_EXTENDED),
    row(0x186, 1, RowCount::Programmable, RegisterKind::Select),
    single(0x38f, Register::GlobalControl),
    single(0x38e, Register::GlobalStatus),
    single(0x390, Register::GlobalStatusClear),
    single(0x391, Register::GlobalStatusSet),
    single(0x392, Register::GlobalInUse),
    row(0x309, 1, RowCount::Fixed, RegisterKind::FixedCounter),
    FIXED_CTR_CTRL,
    A_PMC,
    PERF_CAPABILITIES,
    PEBS_ENABLE,
    PEBS_DATA_CFG,
    DS_AREA,
];

const fn ibs(msr: u32, needs: u32, register: IbsRegister) -> RegisterRow {
    if_any(RowNeeds::Ibs(needs), single(msr, Register::Ibs(register)))
}

/// APM vol. 2, section 13.3, and the PPRs, MSRC001_1030 to 103B. The extended registers
/// of the local APIC are those of its x2APIC mode: APM vol. 2, section 16.11.
const IBS_ROWS: [RegisterRow; 15] = [
    ibs(0xc001_1030, caps::FETCH, IbsRegister::FetchControl),
    ibs(0xc001_1031, caps::FETCH, IbsRegister::FetchLinear),
    ibs(0xc001_1032, caps::FETCH, IbsRegister::FetchPhysical),
    ibs(0xc001_1033, caps::OP, IbsRegister::OpControl),
    ibs(0xc001_1034, caps::OP, IbsRegister::OpRip),
    ibs(0xc001_1035, caps::OP, IbsRegister::OpData),
    ibs(0xc001_1036, caps::OP, IbsRegister::OpData2),
    ibs(0xc001_1037, caps::OP, IbsRegister::OpData3),
    ibs(0xc001_1038, caps::OP, IbsRegister::DataLinear),
    ibs(0xc001_1039, caps::OP, IbsRegister::DataPhysical),
    ibs(0xc001_103a, caps::VALID, IbsRegister::Control),
    ibs(0xc001_103b, caps::BRANCH_TARGET, IbsRegister::BranchTarget),
    ibs(0x840, caps::VALID, IbsRegister::ApicFeature),
    ibs(0x841, caps::VALID, IbsRegister::ApicControl),
    if_any(
        RowNeeds::Ibs(caps::VALID),
        row(
            0x850,
            1,
            RowCount::Exactly(EXTENDED_VECTORS),
            RegisterKind::ApicVector,
        ),
    ),
];

/// `rows`, and those of instruction-based sampling.
const fn with_ibs<const N: usize, const M: usize>(rows: [RegisterRow; N]) -> [RegisterRow; M] {
    let mut all = [IBS_ROWS[0]; M];
    let mut i = 0;
    while i < N {
        all[i] = rows[i];
        i += 1;
    }
    while i < M {
        all[i] = IBS_ROWS[i - N];
        i += 1;
    }
    all
}

/// APM vol. 2, section 13.2.1 and appendix A: the four legacy pairs.
const AMD_LEGACY_ROWS: &[RegisterRow] = &AMD_LEGACY_PAIRS;
const AMD_LEGACY_PAIRS: [RegisterRow; 2] = [
    row(0xc001_0000, 1, RowCount::Exactly(4), RegisterKind::Select),
    row(0xc001_0004, 1, RowCount::Exactly(4), TRUNCATED),
];

/// Family 10h was the first with instruction-based sampling.
const AMD_FAM10H_ROWS: &[RegisterRow] = &with_ibs::<2, 17>(AMD_LEGACY_PAIRS);

/// Core extension: control and counter interleaved; the legacy indices are
/// other names of the first four pairs.
const AMD_CORE_ROWS: &[RegisterRow] = &with_ibs::<4, 19>([
    row(0xc001_0200, 2, RowCount::Programmable, RegisterKind::Select),
    row(0xc001_0201, 2, RowCount::Programmable, TRUNCATED),
    row(0xc001_0000, 1, RowCount::Exactly(4), RegisterKind::Select),
    row(0xc001_0004, 1, RowCount::Exactly(4), TRUNCATED),
]);

/// PerfMonV2 adds the global registers (Family 19h PPR, MSRC000_0300 to 0303).
const AMD_PERFMONV2_ROWS: &[RegisterRow] = &with_ibs::<8, 23>([
    row(0xc001_0200, 2, RowCount::Programmable, RegisterKind::Select),
    row(0xc001_0201, 2, RowCount::Programmable, TRUNCATED),
    single(0xc000_0301, Register::GlobalControl),
    single(0xc000_0300, Register::GlobalStatus),
    single(0xc000_0302, Register::GlobalStatusClear),
    single(0xc000_0303, Register::GlobalStatusSet),
    row(0xc001_0000, 1, RowCount::Exactly(4), RegisterKind::Select),
    row(0xc001_0004, 1, RowCount::Exactly(4), TRUNCATED),
]);

/// Bits 63:32 are reserved, and bit 21 where there is no any-thread.
const INTEL_SELECT: u64 = 0xffff_ffff & !(1 << 21);
/// Versions 3 and 4 have any-thread.
const INTEL_SELECT_ANY: u64 = 0xffff_ffff;
/// K8 BKDG, `PerfEvtSel`: bit 21 and bits 63:32 are reserved.
const K7_SELECT: u64 = 0xffff_ffff & !(1 << 21);
/// Family 10h BKDG and later PPRs, `PERF_CTL`: bits 19, 21, 39:36, 63:42 are reserved.
const FAM10H_SELECT: u64 = (0xffff_ffff & !(1 << 21) & !(1 << 19)) | 0xf << 32 | 0b11 << 40;

/// Family 10h BKDG, revision C. `RIP_INVALID` came later; without it a sample could not
/// say that its RIP is not exact.
const IBS_FAM10H: u32 = caps::VALID
    | caps::FETCH
    | caps::OP
    | caps::READ_WRITE_OP_COUNT
    | caps::OP_COUNT
    | caps::RIP_INVALID;
/// Families 15h and later.
const IBS_ZEN: u32 = IBS_FAM10H | caps::BRANCH_TARGET | caps::OP_COUNT_EXTENDED;

const NONE: Numbers = just(0);
const OFF: Switch = Switch {
    default: false,
    settable: false,
};

const fn just(value: u8) -> Numbers {
    between(value, value, value)
}

const fn between(default: u8, least: u8, most: u8) -> Numbers {
    Numbers {
        default,
        least,
        most,
    }
}

pub(super) static FAMILIES: [&Family; 9] = [
    &INTEL_V1,
    &INTEL_V2,
    &INTEL_V3,
    &INTEL_V4,
    &INTEL_V5,
    &AMD_K7,
    &AMD_FAM10H,
    &AMD_CORE,
    &AMD_PERFMONV2,
];

static INTEL_V1: Family = Family {
    summary: ModelSummary {
        name: "intel-v1",
        vendor: Vendor::Intel,
        summary: "Intel architectural version 1: programmable counters, no global registers",
    },
    version: 1,
    events: EventFamily::Intel,
    rows: INTEL_V1_ROWS,
    select_bits: INTEL_SELECT,
    has_global: false,
    programmable: between(2, 1, MAX_PROGRAMMABLE),
    fixed: NONE,
    width: between(40, 32, 63),
    fixed_width: NONE,
    full_width: Switch {
        default: false,
        settable: true,
    },
    ibs: 0,
};

pub(super) static INTEL_V2: Family = Family {
    summary: ModelSummary {
        name: "intel-v2",
        vendor: Vendor::Intel,
        summary: "Intel architectural version 2: fixed counters, global control and status",
    },
    ..INTEL_GLOBAL
};

static INTEL_V3: Family = Family {
    summary: ModelSummary {
        name: "intel-v3",
        vendor: Vendor::Intel,
        summary: "Intel architectural version 3: version 2 with the any-thread bits",
    },
    version: 3,
    select_bits: INTEL_SELECT_ANY,
    ..INTEL_GLOBAL
};

static INTEL_V4: Family = Family {
    summary: ModelSummary {
        name: "intel-v4",
        vendor: Vendor::Intel,
        summary: "Intel architectural version 4: status can be set, and freezes the counters",
    },
    version: 4,
    rows: INTEL_V4_ROWS,
    select_bits: INTEL_SELECT_ANY,
    ..INTEL_GLOBAL
};

static INTEL_V5: Family = Family {
    summary: ModelSummary {
        name: "intel-v5",
        vendor: Vendor::Intel,
        summary: "Intel architectural version 5: only fixed counters that count, no any-thread",
    },
    version: 5,
    rows: INTEL_V4_ROWS,
    programmable: between(MAX_PROGRAMMABLE, 1, MAX_PROGRAMMABLE),
    ..INTEL_GLOBAL
};

/// What the Intel models with global registers have in common: version 2.
const INTEL_GLOBAL: Family = Family {
    summary: ModelSummary {
        name: "intel",
        vendor: Vendor::Intel,
        summary: "",
    },
    version: 2,
    rows: INTEL_V2_ROWS,
    events: EventFamily::Intel,
    select_bits: INTEL_SELECT,
    has_global: true,
    programmable: between(4, 1, MAX_PROGRAMMABLE),
    fixed: between(3, 0, MAX_FIXED),
    width: between(48, 32, 63),
    fixed_width: between(48, 32, 63),
    full_width: Switch {
        default: true,
        settable: true,
    },
    ibs: 0,
};

static AMD_K7: Family = Family {
    summary: ModelSummary {
        name: "amd-k7",
        vendor: Vendor::Amd,
        summary: "AMD K7 and K8: four counters, 8-bit event select",
    },
    events: EventFamily::AmdK7,
    select_bits: K7_SELECT,
    ..AMD_LEGACY
};

static AMD_FAM10H: Family = Family {
    summary: ModelSummary {
        name: "amd-fam10h",
        vendor: Vendor::Amd,
        summary: "AMD Family 10h: four counters, 12-bit event select, guest-only and host-only",
    },
    events: EventFamily::AmdFam10h,
    rows: AMD_FAM10H_ROWS,
    ibs: IBS_FAM10H,
    ..AMD_LEGACY
};

pub(super) static AMD_CORE: Family = Family {
    summary: ModelSummary {
        name: "amd-core",
        vendor: Vendor::Amd,
        summary: "AMD core extension: six counters, the first four also at the legacy indices",
    },
    events: EventFamily::AmdZen,
    rows: AMD_CORE_ROWS,
    programmable: just(6),
    ibs: IBS_ZEN,
    ..AMD_LEGACY
};

static AMD_PERFMONV2: Family = Family {
    summary: ModelSummary {
        name: "amd-perfmonv2",
        vendor: Vendor::Amd,
        summary: "AMD PerfMonV2: the core extension with global control and status",
    },
    events: EventFamily::AmdZen4,
    rows: AMD_PERFMONV2_ROWS,
    has_global: true,
    programmable: between(6, 4, 6),
    ibs: IBS_ZEN,
    ..AMD_LEGACY
};

/// What the AMD models have in common.
const AMD_LEGACY: Family = Family {
    summary: ModelSummary {
        name: "amd",
        vendor: Vendor::Amd,
        summary: "",
    },
    version: 0,
    events: EventFamily::AmdFam10h,
    rows: AMD_LEGACY_ROWS,
    select_bits: FAM10H_SELECT,
    has_global: false,
    programmable: just(4),
    fixed: NONE,
    width: just(48),
    fixed_width: NONE,
    full_width: OFF,
    ibs: 0,
};
