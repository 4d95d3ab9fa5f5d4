//! Each clause as a function that says what was seen where it is broken: here
//! those about counting, in `promises` those about overflows and labels.

mod promises;

use std::num::NonZeroU64;
use std::ops::RangeInclusive;

use pmu_model::{CountRequest, OwnerId, Provenance, Reading, Ring, SlotIndex, SlotSet};

use super::{Clause, Driver};
use crate::backend::CounterBackend;

type Factory<'a> = &'a dyn Fn() -> Box<dyn CounterBackend>;
type Holds = fn(Factory<'_>, &mut dyn Driver) -> Result<(), String>;

/// Events of one run: more than the jitter of any source, few enough to step.
const SOME: u64 = 500;
const A: SlotIndex = SlotIndex(0);
const B: SlotIndex = SlotIndex(1);

pub(super) const ALL: &[(Clause, Holds)] = &[
    (Clause::StartsAtZero, starts_at_zero),
    (Clause::CountsWhatHappens, counts_what_happens),
    (Clause::StoppedStandsStill, stopped_stands_still),
    (Clause::Resumes, resumes),
    (Clause::NeverFalls, never_falls),
    (Clause::ReleasedHasNoCount, released_has_no_count),
    (Clause::ReprogrammedStartsAnew, reprogrammed_starts_anew),
    (Clause::SlotsAreIndependent, slots_are_independent),
    (Clause::SetsActAsOne, sets_act_as_one),
    (Clause::CapacityIsTrue, capacity_is_true),
    (Clause::RingsAreSplit, rings_are_split),
    (Clause::RingOnDemand, ring_on_demand),
    (Clause::OverflowIsTold, promises::overflow_is_told),
    (Clause::OverflowIsNotEarly, promises::overflow_is_not_early),
    (Clause::DisarmedIsSilent, promises::disarmed_is_silent),
    (Clause::DeadlineIsGiven, promises::deadline_is_given),
    (Clause::HorizonIsKept, promises::horizon_is_kept),
    (
        Clause::UnavailableIsNoZero,
        promises::unavailable_is_no_zero,
    ),
    (
        Clause::UnprogrammedIsNoZero,
        promises::unprogrammed_is_no_zero,
    ),
    (Clause::ProvenanceAgrees, promises::provenance_agrees),
];

/// That many of the driver's units.
fn some(driver: &dyn Driver) -> u64 {
    SOME * driver.unit()
}

/// A backend with slot A programmed and running.
fn running(factory: Factory<'_>, driver: &dyn Driver) -> Result<Box<dyn CounterBackend>, String> {
    let mut backend = factory();
    program(backend.as_mut(), A, &driver.request())?;
    backend.start(A);
    Ok(backend)
}

fn program(
    backend: &mut dyn CounterBackend,
    slot: SlotIndex,
    request: &CountRequest,
) -> Result<Provenance, String> {
    backend
        .program(slot, request)
        .map_err(|unavailable| format!("'{request}' was refused: {unavailable}"))
}

fn count(backend: &dyn CounterBackend, slot: SlotIndex) -> Result<u64, String> {
    match backend.read(slot) {
        Reading::Counted { value, .. } => Ok(value),
        Reading::Unavailable(reason) => Err(format!("slot {} has no count: {reason}", slot.0)),
    }
}

fn expect(
    backend: &dyn CounterBackend,
    slot: SlotIndex,
    expected: &RangeInclusive<u64>,
    when: &str,
) -> Result<(), String> {
    let value = count(backend, slot)?;
    ensure(expected.contains(&value), || {
        format!(
            "slot {} read {value} instead of {} to {} {when}",
            slot.0,
            expected.start(),
            expected.end()
        )
    })
}

fn ensure(holds: bool, detail: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(detail()) }
}

fn sum(a: &RangeInclusive<u64>, b: &RangeInclusive<u64>) -> RangeInclusive<u64> {
    a.start() + b.start()..=a.end() + b.end()
}

fn starts_at_zero(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = factory();
    program(backend.as_mut(), A, &driver.request())?;
    expect(backend.as_ref(), A, &(0..=0), "right after program")?;
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    expect(backend.as_ref(), A, &(0..=0), "before start")
}

fn counts_what_happens(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    let kernel = driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    expect(backend.as_ref(), A, &kernel, "after a run in the kernel")?;
    let both = sum(
        &kernel,
        &driver.run(backend.as_mut(), Ring::User, some(driver) / 2),
    );
    expect(
        backend.as_ref(),
        A,
        &both,
        "after a further run in user code",
    )
}

fn stopped_stands_still(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    backend.stop(A);
    let stopped = count(backend.as_ref(), A)?;
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    expect(backend.as_ref(), A, &(stopped..=stopped), "while stopped")
}

fn resumes(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    let first = driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    backend.stop(A);
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    backend.start(A);
    let second = driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    let both = sum(&first, &second);
    expect(backend.as_ref(), A, &both, "after stop and start")
}

fn never_falls(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    let mut before = 0;
    for round in 0..8 {
        let after = NonZeroU64::new(some(driver) / 2).filter(|_| round % 2 == 0);
        backend.arm(A, after);
        driver.run(backend.as_mut(), Ring::Kernel, some(driver));
        backend.take_overflows();
        let now = count(backend.as_ref(), A)?;
        ensure(now >= before, || {
            format!("the count fell from {before} to {now}")
        })?;
        before = now;
    }
    Ok(())
}

fn released_has_no_count(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    backend.arm(A, NonZeroU64::new(some(driver) / 2));
    driver.run(backend.as_mut(), Ring::Kernel, some(driver) / 4);
    backend.release(A);
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    ensure(!backend.take_overflows().contains(A), || {
        "an overflow was told after release".to_owned()
    })?;
    match backend.read(A) {
        Reading::Unavailable(_) => Ok(()),
        Reading::Counted { value, .. } => Err(format!("it read {value} after release")),
    }
}

fn reprogrammed_starts_anew(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    backend.release(A);
    program(backend.as_mut(), A, &driver.request())?;
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    expect(backend.as_ref(), A, &(0..=0), "after release and program")?;
    backend.start(A);
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    program(backend.as_mut(), A, &driver.request())?;
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    expect(backend.as_ref(), A, &(0..=0), "after program while it ran")
}

fn slots_are_independent(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    if backend.capacity() < 2 {
        return Ok(());
    }
    program(backend.as_mut(), B, &driver.request())?;
    let first = driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    backend.start(B);
    let second = driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    let both = sum(&first, &second);
    expect(backend.as_ref(), A, &both, "beside another slot")?;
    expect(backend.as_ref(), B, &second, "after it was started second")?;
    backend.release(B);
    let third = driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    let all = sum(&both, &third);
    expect(backend.as_ref(), A, &all, "after the other's release")
}

fn sets_act_as_one(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = factory();
    let possible = backend.plan(&driver.request());
    let possible = possible.map_or(SlotSet::EMPTY, |plan| plan.constraint.slots);
    let both: SlotSet = possible.iter().take(2).collect();
    backend.attach(OwnerId(1));
    for slot in both.iter() {
        program(backend.as_mut(), slot, &driver.request())?;
        backend.arm(slot, NonZeroU64::new(4 * some(driver)));
    }
    backend.resume(both);
    let first = driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    backend.pause(both);
    // Another vCPU runs on the core, and counts nothing.
    backend.attach(OwnerId(2));
    driver.run(backend.as_mut(), Ring::Kernel, 8 * some(driver));
    for slot in both.iter() {
        expect(backend.as_ref(), slot, &first, "while its set was paused")?;
    }
    ensure(backend.take_overflows().is_empty(), || {
        "an overflow was told of a paused slot".to_owned()
    })?;
    backend.attach(OwnerId(1));
    backend.resume(both);
    let second = driver.run(backend.as_mut(), Ring::Kernel, 4 * some(driver));
    let all = sum(&first, &second);
    for slot in both.iter() {
        expect(backend.as_ref(), slot, &all, "after its set was resumed")?;
    }
    ensure(backend.take_overflows() == both, || {
        "not every slot of a resumed set told its overflow".to_owned()
    })
}

fn capacity_is_true(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = factory();
    let capacity = backend.capacity();
    ensure((1..=128).contains(&capacity), || {
        format!("a capacity of {capacity} is not between 1 and 128")
    })?;
    let plan = backend.plan(&driver.request());
    let possible = plan.map_or(SlotSet::EMPTY, |plan| plan.constraint.slots);
    let possible = possible.intersection(SlotSet::below(capacity));
    ensure(!possible.is_empty(), || {
        "no slot below the capacity can count".to_owned()
    })?;
    for slot in possible.iter() {
        program(backend.as_mut(), slot, &driver.request())?;
        backend.start(slot);
    }
    let expected = driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    for slot in possible.iter() {
        expect(backend.as_ref(), slot, &expected, "with every slot running")?;
    }
    let above = u8::try_from(capacity).unwrap_or(u8::MAX);
    ensure(
        backend
            .program(SlotIndex(above), &driver.request())
            .is_err(),
        || format!("slot {above} was programmed, above the capacity"),
    )
}

fn rings_are_split(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    for (os, ring, other) in [
        (true, Ring::Kernel, Ring::User),
        (false, Ring::User, Ring::Kernel),
    ] {
        let request = CountRequest {
            os,
            usr: !os,
            ..driver.request()
        };
        let mut backend = factory();
        if backend.plan(&request).is_err() {
            continue;
        }
        program(backend.as_mut(), A, &request)?;
        backend.start(A);
        let expected = driver.run(backend.as_mut(), ring, some(driver));
        driver.run(backend.as_mut(), other, some(driver));
        let when = format!("after runs in both rings, for '{request}'");
        expect(backend.as_ref(), A, &expected, &when)?;
    }
    Ok(())
}

fn ring_on_demand(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let backend = running(factory, driver)?;
    ensure(!backend.needs_ring(), || {
        "a counter of both rings asks for the ring".to_owned()
    })?;
    // Physical counters belong to one backend at a time.
    drop(backend);
    let request = CountRequest {
        usr: false,
        ..driver.request()
    };
    let mut backend = factory();
    if program(backend.as_mut(), A, &request).is_err() {
        return Ok(());
    }
    ensure(!backend.needs_ring(), || {
        "a stopped counter asks for the ring".to_owned()
    })
}
