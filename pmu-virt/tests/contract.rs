//! The contract suite: every backend keeps it, every wrong one is caught.

use pmu_virt::contract::{
    self, Asked, Clause, ClockDriver, Driver, EmuDriver, SimDriver, StepDriver,
};
use pmu_virt::{
    ClockBackend, CombinedBackend, Constraint, CountPlan, CountRequest, CounterBackend, EmuBackend,
    EmuCycles, EventClass, EventTotals, Progress, Provenance, Reading, Ring, SlotIndex, SlotSet,
    StepBackend, Ticks, Tsc, Unavailable,
};
use std::collections::BTreeMap;
use std::num::NonZeroU64;

fn broken(
    factory: impl Fn() -> Box<dyn CounterBackend>,
    driver: impl Driver,
) -> Vec<(Clause, String)> {
    contract::check(factory, driver)
        .err()
        .unwrap_or_default()
        .into_iter()
        .map(|violation| (violation.clause, violation.to_string()))
        .collect()
}

#[test]
fn clock_keeps_the_contract() {
    let violations = broken(|| Box::new(ClockBackend::new()), ClockDriver::default());
    assert!(violations.is_empty(), "{violations:#?}");
}

#[test]
fn step_keeps_the_contract() {
    let violations = broken(|| Box::new(StepBackend::new()), StepDriver::default());
    assert!(violations.is_empty(), "{violations:#?}");
}

/// Who sees one instruction at a time and who sees many count alike.
#[test]
fn emu_keeps_the_contract() {
    let emu = || -> Box<dyn CounterBackend> { Box::new(EmuBackend::new(EmuCycles::Unavailable)) };
    let violations = broken(emu, EmuDriver::default());
    assert!(violations.is_empty(), "{violations:#?}");
    let violations = broken(emu, StepDriver::default());
    assert!(violations.is_empty(), "{violations:#?}");
    let violations = broken(|| Box::new(StepBackend::new()), EmuDriver::default());
    assert!(violations.is_empty(), "{violations:#?}");
    let beside = || -> Box<dyn CounterBackend> {
        Box::new(CombinedBackend::new(vec![
            Box::new(EmuBackend::new(EmuCycles::Simulated)),
            Box::new(SimDriver::backend()),
        ]))
    };
    let violations = broken(beside, EmuDriver::default());
    assert!(violations.is_empty(), "{violations:#?}");
}

#[test]
fn a_combination_keeps_the_contract_of_each_source() {
    let clock_first = || -> Box<dyn CounterBackend> {
        Box::new(CombinedBackend::new(vec![
            Box::new(ClockBackend::new()),
            Box::new(StepBackend::new()),
        ]))
    };
    let violations = broken(clock_first, ClockDriver::default());
    assert!(violations.is_empty(), "{violations:#?}");
    let step_first = || -> Box<dyn CounterBackend> {
        Box::new(CombinedBackend::new(vec![
            Box::new(StepBackend::new()),
            Box::new(ClockBackend::new()),
        ]))
    };
    assert_eq!(clock_first().sources(), ["clock", "step"]);
    assert_eq!(ClockBackend::new().sources(), ["clock"]);
    // The clock counts cycles, so something else has to be uncountable.
    struct Narrow(StepDriver);
    impl Driver for Narrow {
        fn request(&self) -> CountRequest {
            self.0.request()
        }
        fn uncountable(&self) -> CountRequest {
            ClockDriver::default().uncountable()
        }
        fn run(&mut self, backend: &mut dyn CounterBackend, ring: Ring, n: u64) -> Range {
            self.0.run(backend, ring, n)
        }
        fn deadline(&mut self, backend: &mut dyn CounterBackend) -> Asked {
            self.0.deadline(backend)
        }
    }
    let violations = broken(step_first, Narrow(StepDriver::default()));
    assert!(violations.is_empty(), "{violations:#?}");
}

type Range = std::ops::RangeInclusive<u64>;

#[test]
fn sim_keeps_the_contract() {
    let violations = broken(|| Box::new(SimDriver::backend()), SimDriver::default());
    assert!(violations.is_empty(), "{violations:#?}");
}

/// Ways to be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    CountsWhileStopped,
    CountsAfterRelease,
    KeepsCountWhenReprogrammed,
    LosesOverflow,
    RepeatsOverflow,
    OverflowsEarly,
    IgnoresDisarm,
    ZeroForUnavailable,
    ZeroForUnprogrammed,
    MixesRings,
    AlwaysAsksForRing,
    NoDeadline,
    ForgetsToCount,
    CountsTwice,
    ResetsOnStart,
    ClaimsTooMuch,
    ChangesLabel,
    PausesOnlyOne,
    CountsASumOnce,
    CountsSumsShort,
    SeesTooFar,
    SeesNothing,
    SeesOneStep,
    SeesTheEnd,
    SeesWhatIsNotArmed,
}

/// A backend with one fault.
#[derive(Debug)]
struct Wrong {
    fault: Fault,
    inner: Box<dyn CounterBackend>,
    released: BTreeMap<u8, CountRequest>,
    ever: SlotSet,
    offsets: BTreeMap<u8, u64>,
}

impl Wrong {
    fn new(fault: Fault, inner: impl CounterBackend + 'static) -> Self {
        Wrong {
            fault,
            inner: Box::new(inner),
            released: BTreeMap::new(),
            ever: SlotSet::EMPTY,
            offsets: BTreeMap::new(),
        }
    }

    fn is(&self, fault: Fault) -> bool {
        self.fault == fault
    }
}

impl CounterBackend for Wrong {
    fn name(&self) -> &'static str {
        "wrong"
    }

    fn capacity(&self) -> usize {
        self.inner.capacity() + usize::from(self.is(Fault::ClaimsTooMuch))
    }

    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        let constraint = Constraint::any(self.capacity());
        match self.inner.plan(request) {
            Err(_) if self.is(Fault::ZeroForUnavailable) => Ok(CountPlan {
                provenance: Provenance::Exact,
                constraint,
            }),
            other => Ok(CountPlan {
                constraint,
                ..other?
            }),
        }
    }

    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable> {
        if self.is(Fault::ZeroForUnavailable) && self.inner.plan(request).is_err() {
            self.inner.release(slot);
            self.ever.insert(slot);
            return Ok(Provenance::Exact);
        }
        if self.is(Fault::KeepsCountWhenReprogrammed)
            && let Reading::Counted { value, .. } = self.inner.read(slot)
        {
            self.offsets.insert(slot.0, value);
        }
        let request = CountRequest {
            os: request.os || self.is(Fault::MixesRings),
            usr: request.usr || self.is(Fault::MixesRings),
            ..*request
        };
        self.released.remove(&slot.0);
        self.inner.program(slot, &request)
    }

    fn release(&mut self, slot: SlotIndex) {
        if !self.is(Fault::CountsAfterRelease) {
            self.inner.release(slot);
        }
    }

    fn start(&mut self, slot: SlotIndex) {
        if self.is(Fault::ResetsOnStart)
            && let Reading::Counted { value, .. } = self.inner.read(slot)
        {
            self.offsets.insert(slot.0, value.wrapping_neg());
        }
        self.inner.start(slot);
    }

    fn stop(&mut self, slot: SlotIndex) {
        if !self.is(Fault::CountsWhileStopped) {
            self.inner.stop(slot);
        }
    }

    fn pause(&mut self, slots: SlotSet) {
        let number = match self.fault {
            Fault::PausesOnlyOne => 1,
            _ => usize::MAX,
        };
        for slot in slots.iter().take(number) {
            self.stop(slot);
        }
    }

    fn read(&self, slot: SlotIndex) -> Reading {
        let offset = self.offsets.get(&slot.0).copied().unwrap_or_default();
        match self.inner.read(slot) {
            Reading::Unavailable(_)
                if self.is(Fault::ZeroForUnprogrammed)
                    || (self.is(Fault::ZeroForUnavailable) && self.ever.contains(slot)) =>
            {
                Reading::Counted {
                    value: 0,
                    provenance: Provenance::Exact,
                }
            }
            Reading::Counted { provenance, .. } if self.is(Fault::ForgetsToCount) => {
                Reading::Counted {
                    value: 0,
                    provenance,
                }
            }
            Reading::Counted { value, .. } if self.is(Fault::ChangesLabel) => Reading::Counted {
                value,
                provenance: Provenance::Hardware,
            },
            Reading::Counted { value, provenance } => Reading::Counted {
                value: if self.is(Fault::CountsTwice) {
                    2 * value
                } else {
                    value.wrapping_add(offset)
                },
                provenance,
            },
            other => other,
        }
    }

    fn arm(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        let after = match after {
            Some(_) if self.is(Fault::OverflowsEarly) => NonZeroU64::new(1),
            None if self.is(Fault::IgnoresDisarm) => return,
            other => other,
        };
        self.inner.arm(slot, after);
    }

    fn observe(&mut self, progress: &Progress) {
        let Progress::Executed { ring, done } = *progress else {
            return self.inner.observe(progress);
        };
        let loads = done.of(EventClass::Loads);
        let loads = match self.fault {
            Fault::CountsASumOnce => loads.min(1),
            Fault::CountsSumsShort => loads & 0xff,
            _ => loads,
        };
        let done = EventTotals::default().with(EventClass::Loads, loads);
        self.inner.observe(&Progress::Executed { ring, done });
    }

    fn take_overflows(&mut self) -> SlotSet {
        let mut overflows = self.inner.take_overflows();
        match self.fault {
            Fault::LosesOverflow => overflows = SlotSet::EMPTY,
            Fault::RepeatsOverflow => {
                if overflows.contains(SlotIndex(0)) {
                    self.ever.insert(SlotIndex(0));
                }
                overflows = self.ever;
            }
            _ => {}
        }
        overflows
    }

    fn deadline(&self) -> Option<Tsc> {
        self.inner
            .deadline()
            .filter(|_| !self.is(Fault::NoDeadline))
    }

    fn horizon(&self) -> Option<u64> {
        let horizon = self.inner.horizon();
        match self.fault {
            // As if no instruction made more than one event happen.
            Fault::SeesTooFar => horizon.map(|far| far * u64::from(EventClass::Loads.most())),
            Fault::SeesNothing => None,
            Fault::SeesOneStep => horizon.map(|_| 1),
            Fault::SeesTheEnd => horizon.map(|far| far - 1),
            Fault::SeesWhatIsNotArmed => horizon.or(Some(1_000_000)),
            _ => horizon,
        }
    }

    fn needs_ring(&self) -> bool {
        self.inner.needs_ring() || self.is(Fault::AlwaysAsksForRing)
    }
}

#[test]
fn every_wrong_backend_is_caught_at_the_clause_it_breaks() {
    let table = [
        (Fault::CountsWhileStopped, Clause::StoppedStandsStill),
        (Fault::CountsAfterRelease, Clause::ReleasedHasNoCount),
        (
            Fault::KeepsCountWhenReprogrammed,
            Clause::ReprogrammedStartsAnew,
        ),
        (Fault::LosesOverflow, Clause::OverflowIsTold),
        (Fault::RepeatsOverflow, Clause::OverflowIsTold),
        (Fault::OverflowsEarly, Clause::OverflowIsNotEarly),
        (Fault::IgnoresDisarm, Clause::DisarmedIsSilent),
        (Fault::ZeroForUnavailable, Clause::UnavailableIsNoZero),
        (Fault::ZeroForUnprogrammed, Clause::UnprogrammedIsNoZero),
        (Fault::MixesRings, Clause::RingsAreSplit),
        (Fault::AlwaysAsksForRing, Clause::RingOnDemand),
        (Fault::NoDeadline, Clause::DeadlineIsGiven),
        (Fault::ForgetsToCount, Clause::CountsWhatHappens),
        (Fault::CountsTwice, Clause::SlotsAreIndependent),
        (Fault::ResetsOnStart, Clause::Resumes),
        (Fault::ClaimsTooMuch, Clause::CapacityIsTrue),
        (Fault::ChangesLabel, Clause::ProvenanceAgrees),
        (Fault::PausesOnlyOne, Clause::SetsActAsOne),
    ];
    for (fault, clause) in table {
        let violations = broken(
            || Box::new(Wrong::new(fault, ClockBackend::new())),
            ClockDriver::default(),
        );
        assert!(
            violations.iter().any(|(broken, _)| *broken == clause),
            "{fault:?} was not caught at {clause:?}, only at {violations:#?}"
        );
    }
}

#[test]
fn a_wrong_backend_for_sums_is_caught_as_well() {
    let table = [
        (Fault::CountsASumOnce, Clause::CountsWhatHappens),
        (Fault::CountsSumsShort, Clause::CountsWhatHappens),
        (Fault::SeesTooFar, Clause::HorizonIsKept),
        (Fault::SeesNothing, Clause::HorizonIsKept),
        (Fault::SeesOneStep, Clause::HorizonIsKept),
        (Fault::SeesTheEnd, Clause::HorizonIsKept),
        (Fault::SeesWhatIsNotArmed, Clause::HorizonIsKept),
        (Fault::MixesRings, Clause::RingsAreSplit),
    ];
    for (fault, clause) in table {
        let wrong = || Wrong::new(fault, EmuBackend::new(EmuCycles::Unavailable));
        let violations = broken(|| Box::new(wrong()), EmuDriver::default());
        assert!(
            violations.iter().any(|(broken, _)| *broken == clause),
            "{fault:?} was not caught at {clause:?}, only at {violations:#?}"
        );
    }
}

#[test]
fn a_lost_step_takes_the_label_exact_away_until_programmed_anew() {
    let mut step = StepBackend::new();
    let request = StepDriver::default().request();
    let slots = [SlotIndex(0), SlotIndex(1)];
    for slot in slots {
        step.program(slot, &request).expect("instructions");
    }
    step.start(slots[0]);
    let reason = pmu_virt::LossReason::SystemCall;
    step.observe(&Progress::Lost { reason });
    let label = |step: &StepBackend, slot| match step.read(slot) {
        Reading::Counted { provenance, .. } => provenance,
        Reading::Unavailable(reason) => panic!("{reason}"),
    };
    assert_eq!(label(&step, slots[0]), Provenance::Scaled);
    assert_eq!(step.loss(slots[0]), Some(reason));
    // The stopped one has lost nothing.
    assert_eq!(label(&step, slots[1]), Provenance::Exact);
    assert_eq!(step.loss(slots[1]), None);
    step.program(slots[0], &request).expect("instructions");
    assert_eq!(label(&step, slots[0]), Provenance::Exact);
    assert_eq!(step.loss(slots[0]), None);
}

/// A clock that looks at the ring each 1,000 ticks.
fn counting_user_time() -> ClockBackend {
    let mut clock = ClockBackend::with_sample_ticks(NonZeroU64::new(1_000).expect("not zero"));
    let request = CountRequest {
        os: false,
        ..ClockDriver::default().request()
    };
    clock
        .program(SlotIndex(0), &request)
        .expect("reference cycles");
    clock.start(SlotIndex(0));
    clock
}

#[test]
fn ticks_without_a_ring_wait_for_the_next_sample() {
    let mut clock = counting_user_time();
    assert!(clock.needs_ring());
    let mut interval = |entered, ring| {
        clock.observe(&Progress::Entered { tsc: Tsc(entered) });
        assert_eq!(
            clock.deadline(),
            Some(Tsc(entered + 1_000)),
            "a sample is due"
        );
        clock.observe(&Progress::Left {
            tsc: Tsc(entered + 100),
            halted: Ticks(0),
            ring,
        });
        clock.read(SlotIndex(0))
    };
    let scaled = |value| Reading::Counted {
        value,
        provenance: Provenance::Scaled,
    };
    assert_eq!(interval(0, None), scaled(0));
    assert_eq!(interval(200, Some(Ring::User)), scaled(200));
    assert_eq!(interval(400, None), scaled(200));
    assert_eq!(interval(600, Some(Ring::Kernel)), scaled(200));
}

/// A guest that leaves all the time is looked at anyway.
#[test]
fn samples_are_rare_while_the_guest_exits_by_itself() {
    let mut clock = counting_user_time();
    let mut now = 0;
    let mut distance = |ran: u64, ring| {
        clock.observe(&Progress::Entered { tsc: Tsc(now) });
        let sample = clock.deadline().expect("a sample is due") - Tsc(now);
        now += ran;
        clock.observe(&Progress::Left {
            tsc: Tsc(now),
            halted: Ticks(0),
            ring,
        });
        sample
    };
    let user = Some(Ring::User);
    for _ in 0..64 {
        assert_eq!(distance(100, user), Ticks(1_000));
    }
    assert_eq!(distance(100, user), Ticks(4_000));
    // A longer interval, or an exit at which nobody looked, ends it.
    for (ran, ring) in [(125, user), (100, None)] {
        assert_eq!(distance(ran, ring), Ticks(4_000));
        for _ in 0..64 {
            assert_eq!(distance(100, user), Ticks(1_000));
        }
    }
    assert_eq!(distance(100, user), Ticks(4_000));
}
