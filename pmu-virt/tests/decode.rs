//! Every MSR index of three whole regions, every bit of every control register.

use pmu_virt::ibs::X2APIC_MSRS;
use pmu_virt::{
    Caller, ClockBackend, CounterId, Grant, IbsRegister, Layer, MsrIndex, PmuModel, ReadOutcome,
    Register, WriteForm, WriteOutcome, all_pmu_msr_ranges,
};

use crate::seated::Seated;

/// The regions that are swept, inclusive.
const REGIONS: [(u32, u32); 3] = [
    (0, 0x2000),
    (0xc000_0000, 0xc000_2000),
    (0xc001_0000, 0xc001_1100),
];

const MODELS: [&str; 23] = [
    "intel-v1",
    "intel-v1,counters=8,full-width=on",
    "intel-v2",
    "intel-v2,counters=8,fixed=3,width=40,fixed-width=48,full-width=off",
    "intel-v2,counters=1,fixed=1",
    "intel-v2,fixed=0",
    "intel-v2,counters=8,fixed=2,width=63,fixed-width=32",
    "intel-v2,full-width=off,perf-capabilities=on",
    "intel-v3",
    "intel-v4",
    "intel-v4,counters=1,fixed=0,full-width=off",
    "intel-v5",
    "intel-v5,counters=3,fixed=0x5",
    "intel-v5,fixed=0x4,full-width=off,perf-capabilities=on",
    "intel-v5,fixed=0x0",
    "amd-k7",
    "amd-fam10h",
    "amd-core",
    "amd-perfmonv2",
    "amd-perfmonv2,counters=4",
    "amd-fam10h,ibs=on",
    "amd-core,ibs=on",
    "amd-perfmonv2,counters=5,ibs=on",
];

fn model(spec: &str) -> PmuModel {
    PmuModel::parse(spec).unwrap_or_else(|error| panic!("{error}"))
}

fn programmable(n: u32, form: WriteForm) -> Option<Register> {
    let counter = CounterId::Programmable(u8::try_from(n).expect("small"));
    Some(Register::Counter { counter, form })
}

fn select(n: u32) -> Option<Register> {
    Some(Register::Select(u8::try_from(n).expect("small")))
}

/// What the manuals say, written down a second time and in another way.
fn expected(model: &PmuModel, msr: u32) -> Option<Register> {
    let counters = u32::from(model.programmable());
    match (model.name(), msr) {
        (name, _) if name.starts_with("intel") => intel(model, counters, msr),
        (_, 0xc001_0000..=0xc001_0003) => select(msr - 0xc001_0000),
        (_, 0xc001_0004..=0xc001_0007) => programmable(msr - 0xc001_0004, WriteForm::Truncate),
        ("amd-core" | "amd-perfmonv2", 0xc001_0200..=0xc001_020b) => {
            let n = (msr - 0xc001_0200) / 2;
            match msr % 2 {
                _ if n >= counters => None,
                0 => select(n),
                _ => programmable(n, WriteForm::Truncate),
            }
        }
        (_, 0xc001_1030..=0xc001_103b | 0x840 | 0x841 | 0x850..=0x853) if model.ibs() != 0 => {
            sampling(model.name(), msr)
        }
        ("amd-perfmonv2", 0xc000_0300) => Some(Register::GlobalStatus),
        ("amd-perfmonv2", 0xc000_0301) => Some(Register::GlobalControl),
        ("amd-perfmonv2", 0xc000_0302) => Some(Register::GlobalStatusClear),
        ("amd-perfmonv2", 0xc000_0303) => Some(Register::GlobalStatusSet),
        _ => None,
    }
}

fn sampling(name: &str, msr: u32) -> Option<Register> {
    use IbsRegister::*;
    const ALL: [IbsRegister; 12] = [
        FetchControl,
        FetchLinear,
        FetchPhysical,
        OpControl,
        OpRip,
        OpData,
        OpData2,
        OpData3,
        DataLinear,
        DataPhysical,
        Control,
        BranchTarget,
    ];
    let register = match msr {
        0x840 => ApicFeature,
        0x841 => ApicControl,
        0x850..=0x853 => ApicVector(u8::try_from(msr - 0x850).expect("small")),
        0xc001_103b if name == "amd-fam10h" => return None,
        _ => ALL[usize::try_from(msr - 0xc001_1030).expect("small")],
    };
    Some(Register::Ibs(register))
}

fn intel(model: &PmuModel, counters: u32, msr: u32) -> Option<Register> {
    let v2 = model.name() != "intel-v1";
    let v4 = matches!(model.name(), "intel-v4" | "intel-v5");
    let fixed = |n: u32| CounterId::Fixed(u8::try_from(n).expect("small"));
    let spec = model.to_string();
    let capabilities = model.full_width() || spec.ends_with("perf-capabilities=on");
    match msr {
        0xc1..=0xc8 if msr - 0xc1 < counters => programmable(msr - 0xc1, WriteForm::SignExtend32),
        0x186..=0x18d if msr - 0x186 < counters => select(msr - 0x186),
        0x309..=0x30b if model.has(fixed(msr - 0x309)) => Some(Register::Counter {
            counter: fixed(msr - 0x309),
            form: WriteForm::FullWidth,
        }),
        0x345 if capabilities => Some(Register::PerfCapabilities),
        0x38d if (0..3).any(|n| model.has(fixed(n))) => Some(Register::FixedControl),
        0x38e if v2 => Some(Register::GlobalStatus),
        0x38f if v2 => Some(Register::GlobalControl),
        0x390 if v2 => Some(Register::GlobalStatusClear),
        0x391 if v4 => Some(Register::GlobalStatusSet),
        0x392 if v4 => Some(Register::GlobalInUse),
        0x4c1..=0x4c8 if model.full_width() && msr - 0x4c1 < counters => {
            programmable(msr - 0x4c1, WriteForm::FullWidth)
        }
        _ => None,
    }
}

fn within(ranges: &[(u32, u32)], msr: u32) -> bool {
    ranges
        .iter()
        .any(|(first, last)| (*first..=*last).contains(&msr))
}

fn indices() -> impl Iterator<Item = u32> {
    REGIONS.into_iter().flat_map(|(first, last)| first..=last)
}

#[test]
fn every_index_decodes_to_what_the_manuals_say() {
    let everything = all_pmu_msr_ranges();
    for spec in MODELS {
        let model = model(spec);
        let ranges = model.msr_ranges();
        for msr in indices() {
            let decoded = model.decode(MsrIndex(msr));
            assert_eq!(decoded, expected(&model, msr), "{spec} at {msr:#x}");
            // Those of the local APIC no filter reaches.
            let filtered = decoded.filter(|_| !X2APIC_MSRS.contains(&msr));
            assert_eq!(filtered.is_some(), within(&ranges, msr), "{spec} {msr:#x}");
            assert!(
                filtered.is_none() || within(&everything, msr),
                "{spec} answers {msr:#x}, which all_pmu_msr_ranges leaves out"
            );
        }
        // Nothing lies outside of the regions that were swept.
        for (first, last) in ranges {
            assert!(
                REGIONS
                    .iter()
                    .any(|(low, high)| *low <= first && last <= *high),
                "{spec}: {first:#x} to {last:#x}"
            );
        }
    }
}

#[test]
fn ranges_are_sorted_and_merged() {
    let check = |name: &str, ranges: Vec<(u32, u32)>| {
        assert!(!ranges.is_empty(), "{name}");
        assert!(ranges.iter().all(|(first, last)| first <= last), "{name}");
        for pair in ranges.windows(2) {
            assert!(pair[0].1 + 1 < pair[1].0, "{name}: {pair:x?}");
        }
    };
    check("all", all_pmu_msr_ranges());
    for spec in MODELS {
        check(spec, model(spec).msr_ranges());
    }
    assert_eq!(
        model("intel-v2").msr_ranges(),
        [
            (0xc1, 0xc4),
            (0x186, 0x189),
            (0x309, 0x30b),
            (0x345, 0x345),
            (0x38d, 0x390),
            (0x4c1, 0x4c4),
        ]
    );
    assert_eq!(model("amd-k7").msr_ranges(), [(0xc001_0000, 0xc001_0007)]);
}

#[test]
fn an_index_that_is_not_answered_is_not_handled() {
    for spec in MODELS {
        let model = model(spec);
        let clock = Box::new(ClockBackend::new());
        let mut pmu = Seated::new(model.clone(), clock, Grant::everything());
        let shared = model.shared_msrs();
        let absent = indices().filter(|msr| expected(&model, *msr).is_none());
        for msr in absent.filter(|msr| !shared.contains(&MsrIndex(*msr))) {
            let layer = Caller::legacy(Layer::GuestKernel);
            assert_eq!(pmu.rdmsr(MsrIndex(msr), layer), ReadOutcome::NotHandled);
            assert_eq!(pmu.wrmsr(MsrIndex(msr), 0, layer), WriteOutcome::NotHandled);
        }
    }
}

/// Bits that exist, and whether other bits raise #GP; in the manuals' terms.
fn control_registers(spec: &str) -> Vec<(u32, u64, bool)> {
    let evtsel = 0xffdf_ffff;
    let fam10h = 0x30f_ffd7_ffff;
    match spec {
        "intel-v1" => vec![(0x186, evtsel, true), (0x187, evtsel, true)],
        "intel-v3" | "intel-v4" => vec![
            (0x186, 0xffff_ffff, true),
            (0x189, 0xffff_ffff, true),
            (0x38d, 0xfff, true),
            (0x38f, 0x7_0000_000f, true),
        ],
        "intel-v5" => vec![
            (0x186, evtsel, true),
            (0x18d, evtsel, true),
            (0x38d, 0xbbb, true),
            (0x38f, 0x7_0000_00ff, true),
        ],
        "intel-v2" => vec![
            (0x186, evtsel, true),
            (0x189, evtsel, true),
            (0x38d, 0xbbb, true),
            (0x38f, 0x7_0000_000f, true),
        ],
        "amd-k7" => vec![(0xc001_0000, evtsel, false), (0xc001_0003, evtsel, false)],
        "amd-fam10h" => vec![(0xc001_0000, fam10h, false), (0xc001_0003, fam10h, false)],
        "amd-core" => vec![(0xc001_0000, fam10h, false), (0xc001_020a, fam10h, false)],
        "amd-perfmonv2" => vec![
            (0xc001_0003, fam10h, false),
            (0xc001_0208, fam10h, false),
            (0xc000_0301, 0x3f, false),
        ],
        _ => unreachable!("{spec} has no row"),
    }
}

#[test]
fn every_single_bit_of_every_control_register_has_its_outcome() {
    for summary in PmuModel::names() {
        for (msr, implemented, faults) in control_registers(summary.name) {
            for bit in 0..64 {
                let clock = Box::new(ClockBackend::new());
                let mut pmu = Seated::new(model(summary.name), clock, Grant::everything());
                let layer = Caller::legacy(Layer::GuestKernel);
                let before = pmu.rdmsr(MsrIndex(msr), layer);
                let value = 1 << bit;
                let exists = implemented & value != 0;
                let wrote = pmu.wrmsr(MsrIndex(msr), value, layer);
                let after = pmu.rdmsr(MsrIndex(msr), layer);
                let (outcome, read) = match (exists, faults) {
                    (true, _) => (WriteOutcome::Done, ReadOutcome::Value(value)),
                    (false, true) => (WriteOutcome::Gp, before),
                    (false, false) => (WriteOutcome::Done, ReadOutcome::Value(0)),
                };
                let name = summary.name;
                assert_eq!(wrote, outcome, "{name}: bit {bit} of {msr:#x}");
                assert_eq!(after, read, "{name}: bit {bit} of {msr:#x}");
            }
        }
    }
}

/// Registers whose bits act instead of staying: which bits raise #GP.
#[test]
fn every_single_bit_of_the_status_registers_has_its_outcome() {
    let table: [(&str, u32, u64, bool); 13] = [
        ("intel-v3", 0x390, 0xc000_0007_0000_000f, true),
        ("intel-v4", 0x38e, 0, true),
        ("intel-v4", 0x390, 0xfc00_0007_0000_000f, true),
        ("intel-v4", 0x391, 0x7c00_0007_0000_000f, true),
        ("intel-v4", 0x392, 0, true),
        ("intel-v5", 0x390, 0xfc00_0007_0000_00ff, true),
        ("intel-v5", 0x391, 0x7c00_0007_0000_00ff, true),
        ("intel-v2", 0x38e, 0, true),
        ("intel-v2", 0x390, 0xc000_0007_0000_000f, true),
        ("intel-v2", 0x345, 0, true),
        ("amd-perfmonv2", 0xc000_0300, 0, false),
        ("amd-perfmonv2", 0xc000_0302, 0x3f, false),
        ("amd-perfmonv2", 0xc000_0303, 0x3f, false),
    ];
    for (spec, msr, accepted, faults) in table {
        for bit in 0..64 {
            let clock = Box::new(ClockBackend::new());
            let mut pmu = Seated::new(model(spec), clock, Grant::everything());
            let outcome = pmu.wrmsr(MsrIndex(msr), 1 << bit, Caller::legacy(Layer::GuestKernel));
            let expected = if faults && accepted & (1 << bit) == 0 {
                WriteOutcome::Gp
            } else {
                WriteOutcome::Done
            };
            assert_eq!(outcome, expected, "{spec}: bit {bit} of {msr:#x}");
        }
    }
}
