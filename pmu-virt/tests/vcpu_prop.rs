//! Random guests against a PMU and a naive second one, and against invariants.

use pmu_virt::ibs::{FetchRecord, OpSample, X2APIC_MSRS};
use pmu_virt::{
    Caller, ClockBackend, CounterId, Grant, IbsKind, IbsRegister, IbsSample, Layer, MsrIndex,
    PmuModel, Progress, ReadOutcome, Reading, Register, Retirement, Ring, StepBackend, Ticks, Tsc,
    WriteOutcome,
};
use proptest::collection::vec;
use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use proptest::sample::select;

use crate::naive::Naive;
use crate::naive::ibs::{FETCHED, RIP};
use crate::seated::{Located, Seated, Snapshot};

const MODELS: [&str; 29] = [
    "intel-v1",
    "intel-v1,counters=8,full-width=on,width=48",
    "intel-v2",
    "intel-v2,full-width=off,perf-capabilities=on",
    "intel-v3",
    "intel-v3,counters=2,fixed=2,full-width=off",
    "intel-v4",
    "intel-v4,counters=8,fixed=1,width=40",
    "intel-v5",
    "intel-v5,counters=2,fixed=0x6,width=33",
    "intel-v2,pebs=skid,pebs-format=3",
    "intel-v3,counters=2,pebs=exact",
    "intel-v5,fixed=0x6,pebs=skid",
    "intel-v2,counters=8,fixed=3,width=40,fixed-width=48,full-width=off",
    "intel-v2,counters=3,fixed=1,width=32,fixed-width=33",
    "amd-k7",
    "amd-fam10h",
    "amd-core",
    "amd-perfmonv2",
    "amd-fam10h,ibs=on",
    "amd-core,ibs=on",
    "amd-perfmonv2,ibs=on",
    "amd-perfmonv2,ibs=on,freeze=on",
    "amd-perfmonv2,counters=4,freeze=on",
    "intel-v4,pebs=exact,pebs-format=3",
    "intel-v4,counters=2,pebs=skid",
    "intel-v3,events=nehalem,full-width=off,perf-capabilities=on",
    "intel-v5,events=ice-lake,fixed=0x0",
    "amd-core,events=zen",
];

#[derive(Clone, Debug)]
enum Op {
    Read(u32),
    Write(u32, u64),
    Rdpmc(u32),
    Run(Ring, u64),
    Pmi,
    IbsInterrupt,
    /// A write of IA32_DEBUGCTL of which the processor takes its part.
    Freeze(bool),
    Reset,
}

/// Mostly registers of the model, sometimes any index.
fn msr(spec: &str) -> impl Strategy<Value = u32> + use<> {
    let model = PmuModel::parse(spec).expect(spec);
    let all: Vec<_> = model
        .msr_ranges()
        .into_iter()
        .flat_map(|(first, last)| first..=last)
        .chain(
            model
                .registers()
                .map(|(msr, _)| msr)
                .filter(|msr| X2APIC_MSRS.contains(msr)),
        )
        .collect();
    prop_oneof![
        20 => select(all),
        1 => 0xc0u32..0xcb,
        1 => 0x184u32..0x190,
        1 => 0x308u32..0x30e,
        1 => 0xc000_0300u32..0xc000_0306,
        1 => 0xc001_0000u32..0xc001_0210,
        1 => any::<u32>().prop_filter("Umpire's own MSRs have their tests", |msr| {
            !(0x554d_5000..0x554d_7000).contains(msr)
        }),
    ]
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => event_select(),
        6 => near_wrap(),
        3 => (0u64..64).prop_map(|bit| 1 << bit),
        2 => (0u64..8, 0u64..0x100).prop_map(|(fixed, counters)| fixed << 32 | counters),
        2 => (0u64..0x1000).prop_map(|fixed| fixed & 0xbbb),
        1 => any::<u64>(),
    ]
}

fn event_select() -> impl Strategy<Value = u64> {
    let enable =
        prop_oneof![8 => select(vec![0x43u64, 0x53]), 4 => 0x40u64..0x80, 1 => 0u64..0x1000];
    let event = select(vec![0x3c, 0x13c, 0x76, 0x76, 0xc0, 0x1_0000_0120, 0x2e]);
    prop_oneof![
        6 => (enable, event).prop_map(|(enable, event)| enable << 16 | event),
        1 => (0u64..4).prop_map(|bits| bits << 40 | 0x53_0076),
    ]
}

/// A few events before a carry out of some width, or with all bits above set.
fn near_wrap() -> impl Strategy<Value = u64> {
    let width = select(vec![32, 33, 40, 48, 63, 64]);
    let below = prop_oneof![2 => 0u64..6, 1 => 0u64..0x100];
    (width, below).prop_map(|(width, below)| (u64::MAX >> (64 - width)) - below)
}

/// A write, mostly of a value that suits the register.
fn write(spec: &'static str) -> impl Strategy<Value = Op> {
    let model = PmuModel::parse(spec).expect(spec);
    (msr(spec), value(), event_select(), near_wrap(), 0u8..4).prop_map(
        move |(msr, any, event, wrap, choice)| {
            let value = match model.decode(MsrIndex(msr)) {
                Some(Register::Select(_)) if choice > 0 => event,
                Some(Register::Counter { .. }) if choice > 0 => wrap,
                // Maxima of some ticks, enabled; the valid bit is beside that one.
                Some(Register::Ibs(IbsRegister::FetchControl)) if choice > 0 => {
                    (any % 24) | (any >> 8 & 0x1f) << 16 | (event & 0xf1 | 1) << 48
                }
                Some(Register::Ibs(IbsRegister::OpControl)) if choice > 0 => {
                    (any % 24) | (any >> 8 & 0x1ff) << 32 | (wrap & 0b111 | 1) << 17
                }
                Some(Register::Ibs(IbsRegister::ApicVector(_))) if choice > 0 => any & 0x4ff,
                Some(Register::GlobalControl) if choice > 1 => model.global_mask(),
                Some(Register::FixedControl) if choice > 1 => any & 0xfff,
                Some(Register::GlobalStatusSet | Register::GlobalStatusClear) if choice > 0 => {
                    any & model
                        .write_rule(Register::GlobalStatusClear)
                        .map_or(0, |r| r.implemented)
                }
                _ => any,
            };
            Op::Write(msr, value)
        },
    )
}

fn ticks() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0u64..8, 6 => 0u64..0x200, 2 => 0u64..1 << 34, 1 => 0u64..1 << 52]
}

fn op(spec: &'static str) -> impl Strategy<Value = Op> {
    let ring = select(vec![Ring::Kernel, Ring::User]);
    let ecx = prop_oneof![
        4 => 0u32..8,
        2 => 0x4000_0000u32..0x4000_0005,
        1 => any::<u32>(),
    ];
    prop_oneof![
        6 => msr(spec).prop_map(Op::Read),
        12 => write(spec),
        3 => ecx.prop_map(Op::Rdpmc),
        8 => (ring, ticks()).prop_map(|(ring, ticks)| Op::Run(ring, ticks)),
        3 => Just(Op::Pmi),
        2 => Just(Op::IbsInterrupt),
        2 => any::<bool>().prop_map(Op::Freeze),
        1 => Just(Op::Reset),
    ]
}

/// A model and a guest for it.
fn guest() -> impl Strategy<Value = (&'static str, Vec<Op>)> {
    select(&MODELS).prop_flat_map(|spec| (Just(spec), vec(op(spec), 1..120)))
}

fn clocked(spec: &str) -> Seated {
    let model = PmuModel::parse(spec).expect(spec);
    Seated::new(model, Box::new(ClockBackend::new()), Grant::everything())
}

/// Lets the guest run; every access lies between two runs.
fn run(pmu: &mut Seated, now: &mut u64, ring: Ring, ticks: u64) {
    *now += 10;
    pmu.observe(Progress::Entered { tsc: Tsc(*now) });
    *now += ticks + 3;
    pmu.observe(Progress::Left {
        tsc: Tsc(*now),
        halted: Ticks(3),
        ring: Some(ring),
    });
    while let Some(kind) = pmu.ibs_due() {
        pmu.sampled(match kind {
            IbsKind::Op => IbsSample::Op(OpSample::Near { rip: RIP }),
            IbsKind::Fetch => IbsSample::Fetch(FetchRecord {
                linear: FETCHED,
                physical: Some((FETCHED, 12)),
            }),
        });
    }
    if pmu.pebs_due() {
        pmu.take_samples(&mut Snapshot::of(&Located::NOWHERE));
    }
}

/// Whether the PMU shares IA32_DEBUGCTL with the processor, which takes its part.
fn freeze(pmu: &mut Seated, on: bool) -> bool {
    let (debugctl, value) = (MsrIndex(0x1d9), u64::from(on) << 12);
    let taken = pmu.written(debugctl, value, LAYER).rest.is_some();
    if taken {
        pmu.rest_taken(debugctl, value);
    }
    taken
}

/// The first MSR of a counter.
fn msr_of(model: &PmuModel, of: CounterId) -> MsrIndex {
    let is_it = |register| matches!(register, Register::Counter { counter, .. } if counter == of);
    let found = model.registers().find(|(_, register)| is_it(*register));
    MsrIndex(found.expect("a counter of the model").0)
}

const LAYER: Caller = Caller::legacy(Layer::GuestKernel);

/// So many guests, or as many as `PROPTEST_CASES` asks for.
fn config() -> ProptestConfig {
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => ProptestConfig::with_cases(1_500),
    }
}

#[test]
fn every_model_is_played() {
    for model in PmuModel::names() {
        let of_it = |spec: &&str| spec.split(',').next() == Some(model.name);
        assert!(MODELS.iter().any(of_it), "{}", model.name);
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn it_does_what_the_naive_one_does((spec, ops) in guest()) {
        let mut pmu = clocked(spec);
        let mut naive = Naive::new(pmu.model());
        let mut now = 0;
        for op in ops {
            match op {
                Op::Read(msr) => {
                    prop_assert_eq!(pmu.rdmsr(MsrIndex(msr), LAYER), naive.read(msr), "{:x?}", op);
                }
                Op::Write(msr, value) => {
                    let outcome = pmu.wrmsr(MsrIndex(msr), value, LAYER);
                    prop_assert_eq!(outcome, naive.write(msr, value), "{:x?}", op);
                }
                Op::Rdpmc(ecx) => {
                    prop_assert_eq!(pmu.rdpmc(ecx, LAYER), naive.rdpmc(ecx), "{:x?}", op);
                }
                Op::Run(ring, ticks) => {
                    run(&mut pmu, &mut now, ring, ticks);
                    naive.run(ring, ticks);
                }
                Op::Pmi => {
                    let pending = pmu.take_pmi().map_or(0, |pmi| pmi.counters.bits());
                    prop_assert_eq!(pending, std::mem::take(&mut naive.pending));
                }
                Op::IbsInterrupt => {
                    prop_assert_eq!(pmu.take_ibs_interrupt(), naive.ibs.interrupt.take());
                }
                Op::Freeze(on) => {
                    prop_assert_eq!(freeze(&mut pmu, on), naive.can_freeze());
                    naive.freeze = on && naive.can_freeze();
                }
                Op::Reset => {
                    pmu.reset();
                    naive.reset();
                }
            }
        }
        for (first, last) in pmu.model().msr_ranges() {
            for msr in first..=last {
                prop_assert_eq!(pmu.rdmsr(MsrIndex(msr), LAYER), naive.read(msr), "{:#x}", msr);
            }
        }
    }

    #[test]
    fn invariants_hold_for_any_guest((spec, ops) in guest()) {
        let mut pmu = clocked(spec);
        let mut now = 0;
        for op in ops {
            match op {
                Op::Read(msr) => { pmu.rdmsr(MsrIndex(msr), LAYER); }
                Op::Write(msr, value) => {
                    let before = pmu.rdmsr(MsrIndex(msr), LAYER);
                    if pmu.wrmsr(MsrIndex(msr), value, LAYER) == WriteOutcome::Gp {
                        prop_assert_eq!(pmu.rdmsr(MsrIndex(msr), LAYER), before);
                    }
                }
                Op::Rdpmc(ecx) => { pmu.rdpmc(ecx, LAYER); }
                Op::Run(ring, ticks) => {
                    let stopped: Vec<_> = pmu.report().into_iter().filter(|r| !r.running).collect();
                    run(&mut pmu, &mut now, ring, ticks);
                    for before in stopped {
                        // By its register: one that a freeze has stopped since may be in no report.
                        let msr = msr_of(pmu.model(), before.counter);
                        prop_assert_eq!(pmu.rdmsr(msr, LAYER), ReadOutcome::Value(before.value));
                    }
                }
                Op::Pmi => { pmu.take_pmi(); }
                Op::IbsInterrupt => { pmu.take_ibs_interrupt(); }
                Op::Freeze(on) => { freeze(&mut pmu, on); }
                Op::Reset => pmu.reset(),
            }
            let running = pmu.report().iter().any(|report| report.running);
            // Samplers are in no report.
            prop_assert!(pmu.needs().counting == running || pmu.ibs_runs());
            prop_assert!(!pmu.needs().stepping);
            for report in pmu.report() {
                let unavailable = matches!(report.reading, Reading::Unavailable(_));
                prop_assert!(!(unavailable && report.running));
                prop_assert!(report.value <= pmu.model().counter_mask(report.counter));
            }
        }
    }

    #[test]
    fn counts_add_up_to_the_ticks_delivered_while_enabled(
        runs in vec((any::<bool>(), any::<bool>(), 0u64..1 << 20), 1..60),
    ) {
        let mut pmu = clocked("intel-v2");
        let (mut now, mut expected, mut by_ring) = (0, 0, [0, 0]);
        pmu.wrmsr(MsrIndex(0x187), 0x42_013c, LAYER);
        pmu.wrmsr(MsrIndex(0x188), 0x41_013c, LAYER);
        for (enabled, kernel, ticks) in runs {
            let select = if enabled { 0x43_013c } else { 0x03_013c };
            pmu.wrmsr(MsrIndex(0x186), select, LAYER);
            run(&mut pmu, &mut now, if kernel { Ring::Kernel } else { Ring::User }, ticks);
            expected += if enabled { ticks } else { 0 };
            by_ring[usize::from(!kernel)] += ticks;
        }
        prop_assert_eq!(pmu.rdpmc(0, LAYER), ReadOutcome::Value(expected));
        prop_assert_eq!(pmu.rdpmc(1, LAYER), ReadOutcome::Value(by_ring[0]));
        prop_assert_eq!(pmu.rdpmc(2, LAYER), ReadOutcome::Value(by_ring[1]));
    }

    #[test]
    fn a_stepped_overflow_comes_at_its_very_instruction(
        start in 1u64..50,
        insns in vec((any::<bool>(), any::<bool>(), 0u8..3), 1..100),
    ) {
        let model = PmuModel::parse("intel-v2").expect("a model");
        let mut pmu = Seated::new(model, Box::new(StepBackend::new()), Grant::everything());
        // Instructions in both rings, branches in CPL 3, loads in CPL 0.
        for (n, select) in [(0, 0x53_00c0), (1, 0x51_00c4), (2, 0x52_81d0)] {
            pmu.wrmsr(MsrIndex(0x186 + n), select, LAYER);
            pmu.wrmsr(MsrIndex(0xc1 + n), start.wrapping_neg(), LAYER);
        }
        prop_assert!(pmu.needs().stepping && !pmu.needs().ring);
        let mut sums = [0u64; 3];
        for (user, branch, loads) in insns {
            let before = sums;
            sums[0] += 1;
            sums[1] += u64::from(user && branch);
            sums[2] += if user { 0 } else { u64::from(loads) };
            let insn = Retirement { branch, taken: branch, loads, ..Retirement::default() };
            let ring = if user { Ring::User } else { Ring::Kernel };
            pmu.observe(Progress::Retired { ring, insn });
            let expected = (0..3u8)
                .filter(|n| {
                    let n = usize::from(*n);
                    before[n] < start && sums[n] >= start
                })
                .map(CounterId::Programmable)
                .collect::<Vec<_>>();
            let raised = pmu.take_pmi().map_or(Vec::new(), |pmi| pmi.counters.iter().collect());
            prop_assert_eq!(raised, expected);
        }
        for (n, sum) in (0u32..).zip(sums) {
            let value = sum.wrapping_sub(start) & 0xffff_ffff_ffff;
            prop_assert_eq!(pmu.rdpmc(n, LAYER), ReadOutcome::Value(value));
        }
    }
}
