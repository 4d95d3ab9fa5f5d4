//! Each clause as a function that says what was seen where it is broken.

use super::{Clause, Driver};
use crate::backend::{CounterBackend, Provenance, Reading};
use crate::ids::{Ring, SlotIndex};
use crate::request::CountRequest;
use std::num::NonZeroU64;
use std::ops::RangeInclusive;

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
    (Clause::CapacityIsTrue, capacity_is_true),
    (Clause::RingsAreSplit, rings_are_split),
    (Clause::RingOnDemand, ring_on_demand),
    (Clause::OverflowIsTold, overflow_is_told),
    (Clause::OverflowIsNotEarly, overflow_is_not_early),
    (Clause::DisarmedIsSilent, disarmed_is_silent),
    (Clause::DeadlineIsGiven, deadline_is_given),
    (Clause::UnavailableIsNoZero, unavailable_is_no_zero),
    (Clause::UnprogrammedIsNoZero, unprogrammed_is_no_zero),
    (Clause::ProvenanceAgrees, provenance_agrees),
];

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
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
    expect(backend.as_ref(), A, &(0..=0), "before start")
}

fn counts_what_happens(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    let kernel = driver.run(backend.as_mut(), Ring::Kernel, SOME);
    expect(backend.as_ref(), A, &kernel, "after a run in the kernel")?;
    let both = sum(&kernel, &driver.run(backend.as_mut(), Ring::User, SOME / 2));
    expect(
        backend.as_ref(),
        A,
        &both,
        "after a further run in user code",
    )
}

fn stopped_stands_still(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
    backend.stop(A);
    let stopped = count(backend.as_ref(), A)?;
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
    expect(backend.as_ref(), A, &(stopped..=stopped), "while stopped")
}

fn resumes(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    let first = driver.run(backend.as_mut(), Ring::Kernel, SOME);
    backend.stop(A);
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
    backend.start(A);
    let second = driver.run(backend.as_mut(), Ring::Kernel, SOME);
    let both = sum(&first, &second);
    expect(backend.as_ref(), A, &both, "after stop and start")
}

fn never_falls(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    let mut before = 0;
    for round in 0..8 {
        let after = NonZeroU64::new(SOME / 2).filter(|_| round % 2 == 0);
        backend.arm(A, after);
        driver.run(backend.as_mut(), Ring::Kernel, SOME);
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
    backend.arm(A, NonZeroU64::new(SOME / 2));
    driver.run(backend.as_mut(), Ring::Kernel, SOME / 4);
    backend.release(A);
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
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
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
    backend.release(A);
    program(backend.as_mut(), A, &driver.request())?;
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
    expect(backend.as_ref(), A, &(0..=0), "after release and program")?;
    backend.start(A);
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
    program(backend.as_mut(), A, &driver.request())?;
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
    expect(backend.as_ref(), A, &(0..=0), "after program while it ran")
}

fn slots_are_independent(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    if backend.capacity() < 2 {
        return Ok(());
    }
    program(backend.as_mut(), B, &driver.request())?;
    let first = driver.run(backend.as_mut(), Ring::Kernel, SOME);
    backend.start(B);
    let second = driver.run(backend.as_mut(), Ring::Kernel, SOME);
    let both = sum(&first, &second);
    expect(backend.as_ref(), A, &both, "beside another slot")?;
    expect(backend.as_ref(), B, &second, "after it was started second")?;
    backend.release(B);
    let third = driver.run(backend.as_mut(), Ring::Kernel, SOME);
    let all = sum(&both, &third);
    expect(backend.as_ref(), A, &all, "after the other's release")
}

fn capacity_is_true(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = factory();
    let capacity = backend.capacity();
    ensure((1..=64).contains(&capacity), || {
        format!("a capacity of {capacity} is not between 1 and 64")
    })?;
    let slots = || (0u8..64).map(SlotIndex).take(capacity);
    for slot in slots() {
        program(backend.as_mut(), slot, &driver.request())?;
        backend.start(slot);
    }
    let expected = driver.run(backend.as_mut(), Ring::Kernel, SOME);
    for slot in slots() {
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
        if backend.can_count(&request).is_err() {
            continue;
        }
        program(backend.as_mut(), A, &request)?;
        backend.start(A);
        let expected = driver.run(backend.as_mut(), ring, SOME);
        driver.run(backend.as_mut(), other, SOME);
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

fn overflow_is_told(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    backend.arm(A, NonZeroU64::new(SOME));
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
    ensure(backend.take_overflows().contains(A), || {
        format!("no overflow was told after the {SOME} events it was armed for")
    })?;
    driver.run(backend.as_mut(), Ring::Kernel, 4 * SOME);
    ensure(backend.take_overflows().is_empty(), || {
        "an overflow was told again without being armed again".to_owned()
    })?;
    backend.arm(A, NonZeroU64::new(SOME));
    driver.run(backend.as_mut(), Ring::Kernel, 2 * SOME);
    ensure(backend.take_overflows().contains(A), || {
        "no overflow was told after it was armed a second time".to_owned()
    })
}

fn overflow_is_not_early(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    backend.arm(A, NonZeroU64::new(4 * SOME));
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
    backend.stop(A);
    driver.run(backend.as_mut(), Ring::Kernel, 4 * SOME);
    ensure(backend.take_overflows().is_empty(), || {
        format!(
            "an overflow armed for {} events was told after {SOME}",
            4 * SOME
        )
    })
}

fn disarmed_is_silent(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    backend.arm(A, NonZeroU64::new(SOME));
    backend.arm(A, None);
    driver.run(backend.as_mut(), Ring::Kernel, 2 * SOME);
    ensure(backend.take_overflows().is_empty(), || {
        "an overflow was told after it had been taken back".to_owned()
    })
}

fn deadline_is_given(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    match driver.deadline(backend.as_mut()) {
        None => return Ok(()),
        Some(Some(at)) => return Err(format!("deadline {at} with nothing armed")),
        Some(None) => {}
    }
    backend.arm(A, NonZeroU64::new(SOME));
    ensure(driver.deadline(backend.as_mut()) != Some(None), || {
        "no deadline with an overflow armed".to_owned()
    })?;
    backend.stop(A);
    match driver.deadline(backend.as_mut()) {
        Some(Some(at)) => Err(format!("deadline {at} with the counter stopped")),
        _ => Ok(()),
    }
}

fn unavailable_is_no_zero(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let request = driver.uncountable();
    let mut backend = factory();
    ensure(backend.can_count(&request).is_err(), || {
        format!("it claims to be able to count '{request}'")
    })?;
    // A slot that once counted something else must not answer for it.
    program(backend.as_mut(), A, &driver.request())?;
    ensure(backend.program(A, &request).is_err(), || {
        format!("it accepted '{request}'")
    })?;
    backend.start(A);
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
    match backend.read(A) {
        Reading::Unavailable(_) => Ok(()),
        Reading::Counted { value, .. } => Err(format!(
            "it read {value} for '{request}', which nobody counts"
        )),
    }
}

fn unprogrammed_is_no_zero(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = factory();
    backend.start(A);
    backend.arm(A, NonZeroU64::new(1));
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
    backend.stop(A);
    backend.release(A);
    for slot in [A, SlotIndex(200)] {
        if let Reading::Counted { value, .. } = backend.read(slot) {
            return Err(format!("slot {} read {value} unprogrammed", slot.0));
        }
    }
    ensure(backend.take_overflows().is_empty(), || {
        "an overflow was told of a slot that was never programmed".to_owned()
    })
}

fn provenance_agrees(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = factory();
    let request = driver.request();
    let promised = backend
        .can_count(&request)
        .map_err(|unavailable| format!("'{request}' was refused: {unavailable}"))?;
    let programmed = program(backend.as_mut(), A, &request)?;
    backend.start(A);
    driver.run(backend.as_mut(), Ring::Kernel, SOME);
    let Reading::Counted { provenance, .. } = backend.read(A) else {
        return Err("a running slot has no count".to_owned());
    };
    ensure(promised == programmed && programmed == provenance, || {
        format!("promised {promised}, programmed {programmed}, read {provenance}")
    })
}
