//! What `emu` counts: sums as `step` counts each instruction, and overflows where they come.

use pmu_virt::{
    Caller, CountRequest, CounterBackend, CounterId, EmuBackend, EmuCycles, EventClass, EventCode,
    EventFamily, EventTotals, Grant, KnownEvent, Layer, MathUnit, MsrIndex, PmuModel, Progress,
    Provenance, ReadOutcome, Reading, Retirement, Ring, SlotIndex, StepBackend, Ticks, Tsc,
    UnavailableReason, VcpuPmu,
};
use proptest::collection::vec;
use proptest::prelude::{any, prop_assert_eq, proptest};
use proptest::strategy::Strategy;

use crate::seated::Seated;

const GUEST: Caller = Caller::legacy(Layer::GuestKernel);

/// The guest is entered, and left.
const ENTERED: Progress = Progress::Entered { tsc: Tsc(0) };
const LEFT: Progress = Progress::Left {
    tsc: Tsc(0),
    halted: Ticks(0),
    ring: None,
};

/// One thing that is told of a processor.
#[derive(Clone, Copy, Debug)]
enum Did {
    Retired(Retirement),
    Delivered,
}

fn retirements() -> impl Strategy<Value = Retirement> {
    let flags = any::<[bool; 7]>();
    let unit = 0..4u8;
    (flags, 0..=30u8, 0..=32u8, unit).prop_map(|(flags, loads, stores, unit)| {
        let [branch, taken, conditional, far, call, near_return, string] = flags;
        Retirement {
            branch,
            taken,
            conditional,
            far,
            loads,
            stores,
            call,
            near_return,
            string,
            unit: [
                None,
                Some(MathUnit::X87),
                Some(MathUnit::Mmx),
                Some(MathUnit::Sse),
            ][usize::from(unit)],
        }
    })
}

fn runs(most: usize) -> impl Strategy<Value = Vec<(Ring, Did)>> {
    let did = (any::<bool>(), 0..8u8, retirements()).prop_map(|(user, kind, insn)| {
        let ring = if user { Ring::User } else { Ring::Kernel };
        let did = match kind {
            0 => Did::Delivered,
            _ => Did::Retired(insn),
        };
        (ring, did)
    });
    vec(did, 1..most)
}

fn one_by_one(backend: &mut dyn CounterBackend, (ring, did): (Ring, Did)) {
    backend.observe(&match did {
        Did::Retired(insn) => Progress::Retired { ring, insn },
        Did::Delivered => Progress::Delivered { ring },
    });
}

/// What a processor tells after all of it.
fn sums(all: &[(Ring, Did)]) -> [Progress; 2] {
    [Ring::Kernel, Ring::User].map(|ring| {
        let mut done = EventTotals::default();
        for (_, did) in all.iter().filter(|(of, _)| *of == ring) {
            done.add_ticks(1);
            done += match did {
                Did::Retired(insn) => pmu_model::EventCounts::of(insn).into(),
                Did::Delivered => EventTotals::DELIVERY,
            };
        }
        Progress::Executed { ring, done }
    })
}

/// Each event that instructions cause, in each vocabulary, by ring.
fn requests() -> Vec<CountRequest> {
    let step = StepBackend::new();
    let codes = EventFamily::ALL.into_iter().flat_map(|family| {
        let code = move |event| EventCode::of(family, event);
        KnownEvent::ALL.into_iter().filter_map(code)
    });
    let meanings = KnownEvent::ALL.into_iter().map(EventCode::Meaning);
    let rings = [(true, true), (true, false), (false, true)];
    codes
        .chain(meanings)
        .flat_map(|event| rings.map(|(os, usr)| CountRequest::plain(event, os, usr)))
        .filter(|request| step.plan(request).is_ok())
        .collect()
}

fn value(backend: &dyn CounterBackend) -> (u64, Provenance) {
    match backend.read(SlotIndex(0)) {
        Reading::Counted { value, provenance } => (value, provenance),
        Reading::Unavailable(reason) => panic!("{reason}"),
    }
}

proptest! {
    #[test]
    fn a_sum_counts_as_its_instructions_do(all in runs(40), cut in 0..40usize) {
        let cut = cut.min(all.len());
        for request in requests() {
            let mut step = StepBackend::new();
            let mut emu = EmuBackend::new(EmuCycles::Unavailable);
            let both: [&mut dyn CounterBackend; 2] = [&mut step, &mut emu];
            for backend in both {
                backend.program(SlotIndex(0), &request).expect("an event of instructions");
                backend.start(SlotIndex(0));
                backend.observe(&ENTERED);
            }
            for one in &all {
                one_by_one(&mut step, *one);
            }
            emu.observe(&Progress::Entered { tsc: Tsc(0) });
            for part in [&all[..cut], &all[cut..]] {
                for sum in sums(part) {
                    emu.observe(&sum);
                }
            }
            prop_assert_eq!(value(&step), value(&emu), "{}", request);
        }
    }

    /// A processor that goes no further than the horizon stops behind the instruction that
    /// completes an overflow, whatever its instructions do.
    #[test]
    fn an_overflow_comes_at_its_very_instruction(start in 1u64..2_000, all in runs(400)) {
        let model = PmuModel::parse("intel-v2").expect("a model");
        let backend = EmuBackend::new(EmuCycles::Unavailable);
        let mut pmu = Seated::new(model, Box::new(backend), Grant::everything());
        // Instructions in both rings, near taken branches at CPL 3, loads at CPL 0.
        let selects = [0x53_00c0, 0x51_20c4, 0x52_81d0];
        let request = |select| CountRequest::decode(EventFamily::Intel, select);
        for (n, select) in (0..).zip(selects) {
            pmu.wrmsr(MsrIndex(0x186 + n), select, GUEST);
            pmu.wrmsr(MsrIndex(0xc1 + n), start.wrapping_neg(), GUEST);
        }
        let mut steps = selects.map(|select| {
            let mut step = StepBackend::new();
            step.program(SlotIndex(0), &request(select)).expect("an event of instructions");
            step.start(SlotIndex(0));
            step
        });
        let mut rest = all.as_slice();
        while !rest.is_empty() {
            let far = horizon(&pmu).expect("counters are armed");
            prop_assert_eq!(far.max(1), far);
            let far = usize::try_from(far).unwrap_or(usize::MAX);
            let (now, later) = rest.split_at(far.min(rest.len()));
            let before = steps.each_ref().map(|step| value(step).0);
            let mut last = before;
            for one in now {
                last = steps.each_ref().map(|step| value(step).0);
                for step in &mut steps {
                    one_by_one(step, *one);
                }
            }
            pmu.observe(ENTERED);
            for sum in sums(now) {
                pmu.observe(sum);
            }
            pmu.observe(LEFT);
            let after = steps.each_ref().map(|step| value(step).0);
            let due: Vec<_> = (0..3u8)
                .filter(|n| {
                    let n = usize::from(*n);
                    before[n] < start && after[n] >= start
                })
                .collect();
            for n in &due {
                // None but the last instruction may have completed it.
                proptest::prop_assert!(last[usize::from(*n)] < start);
            }
            let due: Vec<_> = due.into_iter().map(CounterId::Programmable).collect();
            let raised = pmu.take_pmi().map_or(Vec::new(), |pmi| pmi.counters.iter().collect());
            prop_assert_eq!(raised, due);
            rest = later;
        }
        for (n, step) in (0u32..).zip(&steps) {
            let expected = value(step).0.wrapping_sub(start) & 0xffff_ffff_ffff;
            prop_assert_eq!(pmu.rdpmc(n, GUEST), ReadOutcome::Value(expected));
        }
    }
}

fn horizon(pmu: &Seated) -> Option<u64> {
    VcpuPmu::horizon(pmu, pmu.core()?)
}

/// Cycles are made up where somebody asks for them, and are none elsewhere.
#[test]
fn cycles_are_simulated_or_none() {
    let every = CountRequest::decode(EventFamily::Intel, 0x10d3_00c0);
    let codes = [
        (EventFamily::Intel, KnownEvent::CoreCycles),
        (EventFamily::Intel, KnownEvent::RefCycles),
        (EventFamily::AmdZen, KnownEvent::CoreCycles),
        (EventFamily::AmdZen4, KnownEvent::RefCycles),
    ];
    let codes = codes.map(|(family, event)| EventCode::of(family, event).expect("a code"));
    let mut requests = codes
        .map(|event| CountRequest::plain(event, true, false))
        .to_vec();
    requests.push(CountRequest {
        usr: false,
        ..every
    });
    for request in requests {
        let refusal = EmuBackend::new(EmuCycles::Unavailable).plan(&request);
        let reason = UnavailableReason::Event {
            backend: "emu",
            event: request.event,
        };
        assert_eq!(refusal.unwrap_err().reason, reason, "{request}");
        // Whom nobody asks for them has none either.
        assert!(StepBackend::new().plan(&request).is_err(), "{request}");
        let mut emu = EmuBackend::new(EmuCycles::Simulated);
        let label = emu.program(SlotIndex(0), &request);
        assert_eq!(label, Ok(Provenance::Simulated), "{request}");
        emu.start(SlotIndex(0));
        emu.observe(&ENTERED);
        emu.arm(SlotIndex(0), std::num::NonZeroU64::new(100));
        assert_eq!(emu.horizon(), Some(100));
        let mut done = EventTotals::default().with(EventClass::Instructions, 3);
        done.add_ticks(70);
        emu.observe(&Progress::Entered { tsc: Tsc(0) });
        for ring in [Ring::Kernel, Ring::User] {
            emu.observe(&Progress::Executed { ring, done });
        }
        assert_eq!(value(&emu), (70, Provenance::Simulated), "{request}");
        assert_eq!(emu.horizon(), Some(30));
    }
    // No cycle has a modifier but those that are each one.
    let edge = CountRequest {
        edge: true,
        ..CountRequest::plain(codes[0], true, true)
    };
    let refusal = EmuBackend::new(EmuCycles::Simulated).plan(&edge);
    let reason = UnavailableReason::Modifier { backend: "emu" };
    assert_eq!(refusal.unwrap_err().reason, reason);
}

/// A WRMSR retires behind its exit: what it starts runs already then, and counts from the next
/// entry on; what runs since before counts it.
#[test]
fn what_starts_a_counter_is_not_counted_by_it() {
    let code = EventCode::of(EventFamily::Intel, KnownEvent::Instructions).expect("a code");
    let request = CountRequest::plain(code, true, true);
    let mut emu = EmuBackend::new(EmuCycles::Unavailable);
    let one = Progress::Executed {
        ring: Ring::Kernel,
        done: EventTotals::default().with(EventClass::Instructions, 1),
    };
    for slot in [0, 1] {
        emu.program(SlotIndex(slot), &request)
            .expect("an event of instructions");
    }
    emu.start(SlotIndex(0));
    emu.observe(&ENTERED);
    emu.observe(&one);
    emu.observe(&LEFT);
    emu.start(SlotIndex(1));
    emu.observe(&one);
    emu.observe(&ENTERED);
    emu.observe(&one);
    let counted = |slot| match emu.read(SlotIndex(slot)) {
        Reading::Counted { value, .. } => value,
        Reading::Unavailable(reason) => panic!("{reason}"),
    };
    assert_eq!([counted(0), counted(1)], [3, 1]);
}

/// ENTER stores up to 32 times: far from the end, it is not gone that far at once.
#[test]
fn the_horizon_is_what_the_most_busy_instruction_allows() {
    let code = |event| EventCode::of(EventFamily::Intel, event).expect("a code");
    let slots = [
        (KnownEvent::Instructions, 1_000, 1_000),
        (KnownEvent::Stores, 1_000, 31),
        (KnownEvent::Stores, 31, 1),
        (KnownEvent::Loads, 1_000, 33),
    ];
    for (event, armed, expected) in slots {
        let mut emu = EmuBackend::new(EmuCycles::Unavailable);
        let request = CountRequest::plain(code(event), true, true);
        emu.program(SlotIndex(7), &request)
            .expect("an event of instructions");
        emu.arm(SlotIndex(7), std::num::NonZeroU64::new(armed));
        assert_eq!(emu.horizon(), None, "it does not run");
        emu.start(SlotIndex(7));
        assert_eq!(emu.horizon(), Some(expected), "{event} {armed}");
        emu.arm(SlotIndex(7), None);
        assert_eq!(emu.horizon(), None);
    }
}
