//! A PMU's state: out, through JSON, in again; and states that are refused.

use std::num::NonZeroU64;

use pmu_virt::ibs::{FetchRecord, OpSample};
use pmu_virt::{
    Caller, ClockBackend, CorePmu, CounterBackend, CounterId, CounterReport, CounterSet, Grant,
    IbsKind, IbsSample, Layer, LinearMemory, LossReason, MsrIndex, Oversubscribe, OwnerId,
    PmiForwarded, PmiRequest, PmuModel, PmuState, Progress, Provenance, ReadOutcome, Reading, Ring,
    StateError, StepBackend, Ticks, Tsc, WriteOutcome, accounting,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use crate::limited::Limited;
use crate::seated::{Line, Seated, Snapshot};

const KERNEL: Caller = Caller::legacy(Layer::GuestKernel);
const MODELS: [&str; 15] = [
    "intel-v1,counters=8,full-width=on,width=48",
    "intel-v2",
    "intel-v2,counters=3,fixed=1,width=32,fixed-width=33",
    "intel-v3,counters=2",
    "intel-v4",
    "intel-v5,counters=3,fixed=0x6,full-width=off",
    "amd-k7",
    "amd-fam10h",
    "amd-core",
    "amd-perfmonv2",
    "amd-fam10h,ibs=on",
    "amd-perfmonv2,ibs=on,freeze=on",
    "intel-v2,pebs=skid",
    "intel-v4,pebs=skid,pebs-format=3",
    "intel-v5,fixed=0x6,pebs=skid",
];

fn model(spec: &str) -> PmuModel {
    PmuModel::parse(spec).expect(spec)
}

fn fresh(spec: &str, backend: impl CounterBackend + 'static) -> Seated {
    Seated::new(model(spec), Box::new(backend), Grant::everything())
}

fn through_json(state: &PmuState) -> PmuState {
    let text = serde_json::to_string_pretty(state).expect("a state can be written");
    serde_json::from_str(&text).expect("and read")
}

/// Every register of the model and of the accounting page, but for SNAPSHOT,
/// whose reading takes one.
fn registers(pmu: &mut Seated) -> Vec<(u32, ReadOutcome)> {
    let page = (accounting::MSR_BASE + 1, accounting::MSR_BASE + 0x1ff);
    let ranges = pmu.model().msr_ranges().into_iter().chain([page]);
    ranges
        .flat_map(|(first, last)| first..=last)
        .map(|msr| (msr, pmu.rdmsr(MsrIndex(msr), KERNEL)))
        .collect()
}

/// A debug store area at every address: with place for one record, which at odd ones fills it,
/// and counters that are set near their wrap. What is written is forgotten.
struct Areas;

impl LinearMemory for Areas {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let threshold = if address & 1 == 0 { u64::MAX } else { 0 };
        let words = [0x1000, 0x1000, 0x2000, threshold];
        let words = words.into_iter().chain(std::iter::repeat(u64::MAX - 0x7f));
        for (bytes, word) in bytes.chunks_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
        }
        true
    }

    fn write(&self, _: u64, _: &[u8]) -> bool {
        true
    }

    fn locate(&self, _: u64) -> Option<(u64, u32)> {
        None
    }
}

#[derive(Clone, Debug)]
enum Op {
    Write(u32, u64),
    Run(Ring, u64, u64),
    Snapshot,
    Pmi,
    /// Sets or clears FREEZE_PERFMON_ON_PMI, where it exists.
    Freeze(bool),
}

fn op(spec: &'static str) -> impl Strategy<Value = Op> {
    let msrs: Vec<u32> = model(spec)
        .msr_ranges()
        .into_iter()
        .flat_map(|(first, last)| first..=last)
        .collect();
    let event = select(vec![0x3cu64, 0x13c, 0x76, 0xc0, 0x2e])
        .prop_flat_map(|event| (0x40u64..0x80).prop_map(move |bits| bits << 16 | event));
    let near_wrap = (select(vec![32u32, 33, 40, 48]), 0u64..0x100)
        .prop_map(|(width, below)| (u64::MAX >> (64 - width)) - below);
    let value = prop_oneof![
        4 => event,
        3 => near_wrap,
        2 => 0u64..0x1000,
        1 => (0u64..8, 0u64..0x100).prop_map(|(fixed, all)| fixed << 32 | all),
        1 => (0u64..8, 0u64..0x10).prop_map(|(fixed, some)| fixed << 32 | some),
        1 => 0u64..0x10,
        1 => any::<u64>(),
    ];
    let ring = select(vec![Ring::Kernel, Ring::User]);
    let ticks = prop_oneof![0u64..0x300, 0u64..1 << 34];
    prop_oneof![
        6 => (select(msrs), value).prop_map(|(msr, value)| Op::Write(msr, value)),
        3 => (ring, ticks, 0u64..0x40).prop_map(|(ring, ticks, halt)| Op::Run(ring, ticks, halt)),
        1 => Just(Op::Snapshot),
        1 => Just(Op::Pmi),
        1 => any::<bool>().prop_map(Op::Freeze),
    ]
}

fn apply(pmu: &mut Seated, op: &Op, now: &mut u64) {
    match *op {
        Op::Write(msr, value) => {
            pmu.wrmsr(MsrIndex(msr), value, KERNEL);
        }
        Op::Run(ring, ticks, halted) => {
            pmu.observe(Progress::Entered { tsc: Tsc(*now) });
            *now += ticks;
            pmu.observe(Progress::Left {
                tsc: Tsc(*now),
                halted: Ticks(halted.min(ticks)),
                ring: Some(ring),
            });
            if pmu.pebs_due() {
                pmu.take_samples(&mut Snapshot::of(&Areas));
            }
            while let Some(kind) = pmu.ibs_due() {
                pmu.sampled(match kind {
                    IbsKind::Op => IbsSample::Op(OpSample::Near { rip: *now }),
                    IbsKind::Fetch => IbsSample::Fetch(FetchRecord {
                        linear: *now,
                        physical: None,
                    }),
                });
            }
        }
        Op::Snapshot => {
            pmu.rdmsr(MsrIndex(accounting::MSR_BASE), KERNEL);
        }
        Op::Pmi => {
            pmu.take_pmi();
        }
        Op::Freeze(on) => {
            let (debugctl, value) = (MsrIndex(0x1d9), u64::from(on) << 12);
            if pmu.written(debugctl, value, KERNEL).rest.is_some() {
                pmu.rest_taken(debugctl, value);
            }
        }
    }
}

/// Reports; a counter that is stopped may have a source or not, according to
/// whether it still has a place.
fn reports(pmu: &Seated) -> Vec<CounterReport> {
    let mut reports = pmu.report();
    for report in reports.iter_mut().filter(|report| !report.running) {
        report.source = None;
    }
    reports
}

fn lives() -> impl Strategy<Value = (&'static str, Vec<Op>, Vec<Op>)> {
    select(MODELS.to_vec())
        .prop_flat_map(|spec| (Just(spec), vec(op(spec), 0..60), vec(op(spec), 0..20)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// A restored PMU has the same registers, saves to the same state, and
    /// goes on as the first one does.
    #[test]
    fn restoring_is_bit_identical(
        (spec, before, after) in lives(),
        before_its_core in any::<bool>(),
    ) {
        let mut first = fresh(spec, ClockBackend::new());
        let mut now = 1_000;
        for op in &before {
            apply(&mut first, op, &mut now);
        }
        let state = first.save();
        let mut second = Seated::detached(OwnerId(7), model(spec), Grant::everything());
        let core = Box::new(CorePmu::new(Box::new(ClockBackend::new())));
        if before_its_core {
            second.restore(&through_json(&state)).expect("its own state");
            prop_assert_eq!(second.save(), state.clone());
            second.attach(core);
        } else {
            second.attach(core);
            second.restore(&through_json(&state)).expect("its own state");
        }
        prop_assert_eq!(second.save(), state);
        prop_assert_eq!(registers(&mut second), registers(&mut first));
        prop_assert_eq!(second.needs(), first.needs());

        let mut other = now;
        for op in &after {
            apply(&mut first, op, &mut now);
            apply(&mut second, op, &mut other);
            prop_assert_eq!(registers(&mut second), registers(&mut first));
        }
        prop_assert_eq!(second.take_pmi(), first.take_pmi());
        prop_assert_eq!(second.take_ibs_interrupt(), first.take_ibs_interrupt());
        prop_assert_eq!(second.save(), first.save());
        prop_assert_eq!(reports(&second), reports(&first));
    }

    /// Whatever a file holds, it is taken or refused.
    #[test]
    fn damaged_states_do_no_harm(
        (spec, before, _) in lives(),
        at in any::<prop::sample::Index>(),
        byte in select(b"0123456789afx\"-{}[],:".to_vec()),
    ) {
        let mut pmu = fresh(spec, ClockBackend::new());
        let mut now = 0;
        for op in &before {
            apply(&mut pmu, op, &mut now);
        }
        let mut text = serde_json::to_string(&pmu.save()).expect("a state can be written").into_bytes();
        let at = at.index(text.len());
        text[at] = byte;
        if let Ok(state) = serde_json::from_slice::<PmuState>(&text) {
            let mut other = fresh(spec, ClockBackend::new());
            if other.restore(&state).is_ok() {
                let again = other.save();
                prop_assert_eq!(other.restore(&again), Ok(()));
                for op in &before {
                    apply(&mut other, op, &mut now);
                }
            }
        }
    }
}

/// A PMU in which every part of the state has something to say.
fn busy() -> Seated {
    let mut pmu = fresh("intel-v2", ClockBackend::new());
    let write = |pmu: &mut Seated, msr, value| {
        assert_eq!(
            pmu.wrmsr(MsrIndex(msr), value, KERNEL),
            WriteOutcome::Done,
            "{msr:#x}"
        );
    };
    write(&mut pmu, 0x38d, 0x3b0);
    write(&mut pmu, 0x30a, 0xffff_ffff_ff00);
    write(&mut pmu, 0x186, 0x53_003c);
    write(&mut pmu, 0x187, 0x53_00c0);
    write(&mut pmu, 0x38f, 0x7_0000_000f);
    pmu.observe(Progress::Entered { tsc: Tsc(1_000) });
    pmu.observe(Progress::Left {
        tsc: Tsc(2_000),
        halted: Ticks(100),
        ring: Some(Ring::User),
    });
    pmu.rdmsr(MsrIndex(accounting::MSR_BASE), KERNEL);
    pmu
}

fn json(pmu: &mut Seated) -> serde_json::Value {
    serde_json::to_value(pmu.save()).expect("a state can be written")
}

#[test]
fn pending_pmis_and_ones_that_were_not_sent_are_taken_again() {
    let mut pmu = busy();
    let line = &mut Line::stuck();
    assert_eq!(line.forward(&mut pmu, Tsc(0)), PmiForwarded::Nothing);
    let request = line.asked.expect("FIXED1 wrapped");
    assert_eq!(
        request.counters,
        CounterSet::from_iter([CounterId::Fixed(1)])
    );
    assert_eq!(
        pmu.save().model(),
        "intel-v2,counters=4,fixed=3,width=48,fixed-width=48,full-width=on"
    );
    // It was not sent, and another counter wraps.
    let near = MsrIndex(0x4c1);
    assert_eq!(pmu.wrmsr(near, (1 << 48) - 10, KERNEL), WriteOutcome::Done);
    pmu.observe(Progress::Entered { tsc: Tsc(2_000) });
    pmu.observe(Progress::Left {
        tsc: Tsc(2_020),
        halted: Ticks(0),
        ring: Some(Ring::User),
    });
    let also = PmiRequest {
        counters: CounterSet::from_iter([CounterId::Programmable(0)]),
    };
    let mut other = fresh("intel-v2", ClockBackend::new());
    other
        .restore(&through_json(&pmu.save()))
        .expect("its own state");
    let both = CounterSet::from_bits(request.counters.bits() | also.counters.bits());
    assert_eq!(other.take_pmi(), Some(PmiRequest { counters: both }));
    assert_eq!(other.take_pmi(), None);
}

#[test]
fn a_lost_label_stays_lost() {
    let spec = "amd-core";
    let mut pmu = fresh(spec, StepBackend::new());
    pmu.wrmsr(MsrIndex(0xc001_0200), 0x53_00c0, KERNEL);
    pmu.observe(Progress::Lost {
        reason: LossReason::SystemCall,
    });
    let mut other = fresh(spec, StepBackend::new());
    other
        .restore(&through_json(&pmu.save()))
        .expect("its own state");
    let report = other.report()[0];
    assert_eq!(report.loss, Some(LossReason::SystemCall));
    let label = |report: CounterReport| match report.reading {
        Reading::Counted { provenance, .. } => provenance,
        Reading::Unavailable(reason) => panic!("{reason}"),
    };
    assert_eq!(label(report), Provenance::Scaled);
    // Until it is programmed anew.
    other.wrmsr(MsrIndex(0xc001_0200), 0x53_00c2, KERNEL);
    assert_eq!(
        (label(other.report()[0]), other.report()[0].loss),
        (Provenance::Exact, None)
    );
}

#[test]
fn a_lost_label_stays_lost_when_the_counter_has_to_make_room() {
    let on = |owner| {
        let mut pmu = Seated::detached(OwnerId(owner), model("amd-core"), Grant::everything());
        pmu.wrmsr(MsrIndex(0xc001_0200), 0x43_00c0, KERNEL);
        pmu
    };
    let (mut first, mut second) = (on(1), on(2));
    let one_slot = Limited::of(Box::new(StepBackend::new()), 1);
    first.attach(Box::new(CorePmu::new(Box::new(one_slot))));
    first.observe(Progress::Lost {
        reason: LossReason::Undecodable,
    });
    second.attach(first.park().expect("a core"));
    first.attach(second.park().expect("a core"));
    let stats = first.core().expect("a core").stats();
    assert_eq!(stats.evicted, 2, "{stats:?}");
    let report = first.report()[0];
    assert_eq!(report.loss, Some(LossReason::Undecodable));
    let Reading::Counted { provenance, .. } = report.reading else {
        panic!("{report:?}");
    };
    assert_eq!(provenance, Provenance::Scaled);
}

#[test]
fn a_counter_that_waits_for_its_turn_goes_on_as_it_would_have() {
    let turns = Oversubscribe::Multiplex {
        timeslice: NonZeroU64::new(100).expect("not 0"),
    };
    let fresh = || fresh("amd-core", Limited::clock(1)).with_oversubscription(turns);
    let mut first = fresh();
    for select in [0xc001_0200, 0xc001_0202] {
        first.wrmsr(MsrIndex(select), 0x43_0076, KERNEL);
    }
    let mut now = 0;
    apply(&mut first, &Op::Run(Ring::Kernel, 60, 0), &mut now);
    let state = first.save();
    let waiting = |state: &PmuState, key: &str| {
        serde_json::to_value(state).expect("JSON")["counters"][1][key].clone()
    };
    assert_eq!(waiting(&state, "time-running"), 0);
    assert_eq!(waiting(&state, "time-unaccounted"), 60);
    let mut second = fresh();
    second
        .restore(&through_json(&state))
        .expect("its own state");
    assert_eq!(second.save(), state);
    // The wait before the save is filled with the rate seen after it.
    for _ in 0..8 {
        apply(&mut second, &Op::Run(Ring::Kernel, 100, 0), &mut now);
    }
    let counts = [0, 1].map(|n| second.rdpmc(n, KERNEL));
    let ReadOutcome::Value(waited) = counts[1] else {
        panic!("{counts:?}");
    };
    assert!((760..=860).contains(&waited), "{counts:?} of 860 ticks");
}

#[test]
fn what_this_host_cannot_count_is_unavailable_after_a_restore() {
    let mut pmu = fresh("amd-core", StepBackend::new());
    pmu.wrmsr(MsrIndex(0xc001_0200), 0x53_00c0, KERNEL);
    let mut other = fresh("amd-core", ClockBackend::new());
    other.restore(&pmu.save()).expect("its own state");
    assert!(matches!(other.report()[0].reading, Reading::Unavailable(_)));
}

/// `change` makes the state of [`busy`] impossible; nothing else is changed by
/// the refusal.
#[track_caller]
fn refused(change: impl FnOnce(&mut serde_json::Value), expected: &str) {
    let mut value = json(&mut busy());
    change(&mut value);
    let error = match serde_json::from_value::<PmuState>(value) {
        Err(error) => error.to_string(),
        Ok(state) => {
            let mut pmu = busy();
            let before = pmu.save();
            let error = pmu.restore(&state).expect_err("an impossible state");
            assert_eq!(pmu.save(), before);
            error.to_string()
        }
    };
    assert_eq!(error, expected);
}

#[test]
fn impossible_states_are_refused() {
    let text = |text: &str| serde_json::Value::from(text);
    refused(
        |s| s["model"] = text("amd-core"),
        "it was saved from PMU model amd-core, this one is \
         intel-v2,counters=4,fixed=3,width=48,fixed-width=48,full-width=on",
    );
    refused(
        |s| s["selects"][2] = text("0x100000000"),
        "select 2 is 0x100000000, of which the model has no bits 0x100000000",
    );
    refused(
        |s| s["fixed-control"] = text("0x4"),
        "fixed control is 0x4, of which the model has no bits 0x4",
    );
    refused(
        |s| s["global-control"] = text("0x10"),
        "global control is 0x10, of which the model has no bits 0x10",
    );
    refused(
        |s| s["global-status"] = text("0x8000000000000000"),
        "global status is 0x8000000000000000, of which the model has no bits 0x8000000000000000",
    );
    refused(
        |s| s["counters"][1]["value"] = text("0x1000000000001"),
        "counter PMC1 is 0x1000000000001, of which the model has no bits 0x1000000000000",
    );
    refused(
        |s| s["counters"][1]["counter"] = text("FIXED1"),
        "counter FIXED1 stands where PMC1 belongs",
    );
    refused(
        |s| s["counters"][0]["counter"] = text("PMC32"),
        "'PMC32' is no counter: PMC0 to PMC31 or FIXED0 to FIXED29",
    );
    refused(
        |s| s["counters"][0]["time-running"] = 5_000.into(),
        "PMC0 was counted for longer than it was enabled",
    );
    refused(
        |s| s["counters"][0]["programmed"] = false.into(),
        "PMC0 has a label or events, but was never programmed",
    );
    refused(
        |s| {
            if let Some(list) = s["counters"].as_array_mut() {
                list.truncate(2);
            }
        },
        "it has 2 counters, the model has 7",
    );
    refused(
        |s| s["selects"] = vec!["0x0"].into(),
        "it has 1 selects, the model has 4",
    );
    refused(
        |s| s["pending-pmi"] = vec!["PMC7"].into(),
        "the model has no counter PMC7",
    );
    refused(
        |s| s["snapshot"]["counters"][0][0] = text("0x1000000"),
        "the snapshot's status of PMC0 is 0x1000000, of which the model has no bits 0x1000000",
    );
    refused(
        |s| s["global-control"] = text("15"),
        "'15' is no register value: 0x and up to 16 hexadecimal digits",
    );
    refused(
        |s| s["reservations"] = serde_json::json!({"PMC0": {}}),
        "it holds counter reservations, which this version of Umpire cannot restore",
    );
    refused(
        |s| s["cookies"] = 1.into(),
        "unknown field `cookies`, expected one of `model`, `selects`, `fixed-control`, \
         `global-control`, `global-status`, `debug-control`, `pebs`, `counters`, `pending-pmi`, \
         `snapshot`, `was-programmed`, `ibs`, `reservations`",
    );
    refused(
        |s| s["debug-control"] = text("0x1"),
        "debug control is 0x1, of which the model has no bits 0x1",
    );
}

/// What Umpire wrote before there were PEBS, IBS and freezes.
#[test]
fn the_state_of_the_version_before_is_read() {
    let counter = |name: &str, value: &str| {
        let counted = name == "PMC0";
        let mut counter = serde_json::json!({
            "counter": name, "value": value, "programmed": counted, "events": 0,
            "time-enabled": 0, "time-running": 0, "time-unaccounted": 0,
        });
        if counted {
            counter["events"] = 5.into();
            counter["provenance"] = "derived".into();
        }
        counter
    };
    let names = ["PMC0", "PMC1", "FIXED0"];
    let values = ["0x1005", "0x0", "0x77"];
    let counters = names
        .iter()
        .zip(values)
        .map(|(name, value)| counter(name, value));
    let words = ["0x0", "0x0", "0x0", "0x0"];
    let before = serde_json::json!({
        "model": "intel-v2,counters=2,fixed=1,width=48,fixed-width=48,full-width=on",
        "selects": ["0x53003c", "0x0"],
        "fixed-control": "0x0",
        "global-control": "0x3",
        "global-status": "0x1",
        "counters": counters.collect::<Vec<_>>(),
        "pending-pmi": [],
        "snapshot": { "sequence": 2, "counters": [words, words, words] },
    });
    let state: PmuState = serde_json::from_value(before.clone()).expect("a state");
    let mut pmu = fresh("intel-v2,counters=2,fixed=1", ClockBackend::new());
    pmu.restore(&state).expect("a state of the model");
    assert_eq!(json(&mut pmu), before);
    for (msr, value) in [(0x186, 0x53_003c), (0xc1, 0x1005), (0x309, 0x77)] {
        let found = pmu.rdmsr(MsrIndex(msr), KERNEL);
        assert_eq!(found, ReadOutcome::Value(value), "{msr:#x}");
    }
}

/// The status bits that belong to no counter, and what CTR_FRZ does, are restored; a
/// model without them takes none.
#[test]
fn a_frozen_pmu_is_restored_frozen() {
    let mut pmu = fresh("intel-v4", ClockBackend::new());
    for (msr, value) in [(0x186, 0x43_013c), (0x391, 0x1800_0000_0000_0002)] {
        assert_eq!(pmu.wrmsr(MsrIndex(msr), value, KERNEL), WriteOutcome::Done);
    }
    let state = pmu.save();
    let mut other = fresh("intel-v4", ClockBackend::new());
    other.restore(&through_json(&state)).expect("its own state");
    let mut now = 0;
    for (expected, then) in [(0, 0x0800_0000_0000_0000), (9, 0)] {
        apply(&mut other, &Op::Run(Ring::Kernel, 9, 0), &mut now);
        let count = other.rdmsr(MsrIndex(0xc1), KERNEL);
        assert_eq!(count, ReadOutcome::Value(expected));
        other.wrmsr(MsrIndex(0x390), then, KERNEL);
    }
    let status = other.rdmsr(MsrIndex(0x38e), KERNEL);
    assert_eq!(status, ReadOutcome::Value(0x1000_0000_0000_0002));
}

#[test]
fn a_model_without_global_registers_has_none_to_restore() {
    let mut value = json(&mut fresh("amd-k7", ClockBackend::new()));
    assert_eq!(value.get("reservations"), None);
    value["global-control"] = "0x1".into();
    let state: PmuState = serde_json::from_value(value).expect("a state");
    let error = fresh("amd-k7", ClockBackend::new()).restore(&state);
    assert!(
        matches!(error, Err(StateError::Bits { surplus: 1, .. })),
        "{error:?}"
    );
}
