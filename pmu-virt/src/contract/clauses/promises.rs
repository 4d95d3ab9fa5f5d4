//! Clauses about overflows, deadlines, and what is not available.

use std::num::NonZeroU64;

use pmu_model::{Reading, Ring, SlotIndex, Tsc};

use super::{A, Factory, ensure, program, running, some};
use crate::contract::{Asked, Driver};

pub(super) fn overflow_is_told(
    factory: Factory<'_>,
    driver: &mut dyn Driver,
) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    backend.arm(A, NonZeroU64::new(some(driver)));
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    ensure(backend.take_overflows().contains(A), || {
        format!(
            "no overflow was told after the {} events it was armed for",
            some(driver)
        )
    })?;
    driver.run(backend.as_mut(), Ring::Kernel, 4 * some(driver));
    ensure(backend.take_overflows().is_empty(), || {
        "an overflow was told again without being armed again".to_owned()
    })?;
    backend.arm(A, NonZeroU64::new(some(driver)));
    driver.run(backend.as_mut(), Ring::Kernel, 2 * some(driver));
    ensure(backend.take_overflows().contains(A), || {
        "no overflow was told after it was armed a second time".to_owned()
    })
}

pub(super) fn overflow_is_not_early(
    factory: Factory<'_>,
    driver: &mut dyn Driver,
) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    backend.arm(A, NonZeroU64::new(4 * some(driver)));
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    backend.stop(A);
    driver.run(backend.as_mut(), Ring::Kernel, 4 * some(driver));
    ensure(backend.take_overflows().is_empty(), || {
        format!(
            "an overflow armed for {} events was told after {}",
            4 * some(driver),
            some(driver)
        )
    })
}

pub(super) fn disarmed_is_silent(
    factory: Factory<'_>,
    driver: &mut dyn Driver,
) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    backend.arm(A, NonZeroU64::new(some(driver)));
    backend.arm(A, None);
    driver.run(backend.as_mut(), Ring::Kernel, 2 * some(driver));
    ensure(backend.take_overflows().is_empty(), || {
        "an overflow was told after it had been taken back".to_owned()
    })
}

pub(super) fn deadline_is_given(
    factory: Factory<'_>,
    driver: &mut dyn Driver,
) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    match driver.deadline(backend.as_mut()) {
        Asked::NotTimed => return Ok(()),
        Asked::Deadline(Some(Tsc(at))) => {
            return Err(format!("deadline {at} with nothing armed"));
        }
        Asked::Deadline(None) => {}
    }
    backend.arm(A, NonZeroU64::new(some(driver)));
    let armed = driver.deadline(backend.as_mut());
    ensure(armed != Asked::Deadline(None), || {
        "no deadline with an overflow armed".to_owned()
    })?;
    backend.stop(A);
    match driver.deadline(backend.as_mut()) {
        Asked::Deadline(Some(Tsc(at))) => Err(format!("deadline {at} with the counter stopped")),
        Asked::Deadline(None) | Asked::NotTimed => Ok(()),
    }
}

/// Steps to an overflow `SOME` units away, at most: some thousand instructions.
const STEPS: u64 = 200;

pub(super) fn horizon_is_kept(factory: Factory<'_>, driver: &mut dyn Driver) -> Result<(), String> {
    let mut backend = running(factory, driver)?;
    let idle = backend.horizon();
    let Some(most) = driver.execute(backend.as_mut(), Ring::Kernel, 1) else {
        return Ok(());
    };
    ensure(idle.is_none(), || "a horizon with nothing armed".to_owned())?;
    // The second one is told in the middle of an instruction.
    for period in [most * some(driver), most * some(driver) - most / 2] {
        backend.arm(A, NonZeroU64::new(period));
        let mut done = 0;
        for step in 0.. {
            let horizon = backend.horizon();
            let horizon = horizon.ok_or("no horizon with an overflow armed")?;
            ensure(horizon > 0, || "a horizon of 0".to_owned())?;
            driver.execute(backend.as_mut(), Ring::Kernel, horizon);
            done += horizon;
            let told = backend.take_overflows().contains(A);
            let due = done * most >= period;
            ensure(told == due, || {
                format!(
                    "after {done} instructions of {most} events an overflow after {period} was {}told",
                    if told { "" } else { "not " }
                )
            })?;
            if due {
                break;
            }
            ensure(step < STEPS, || format!("no overflow in {STEPS} steps"))?;
        }
        ensure((done - 1) * most < period, || {
            format!(
                "{done} instructions of {most} events were allowed before an overflow after {period}"
            )
        })?;
    }
    backend.arm(A, NonZeroU64::new(some(driver)));
    backend.stop(A);
    ensure(backend.horizon().is_none(), || {
        "a horizon with the counter stopped".to_owned()
    })
}

pub(super) fn unavailable_is_no_zero(
    factory: Factory<'_>,
    driver: &mut dyn Driver,
) -> Result<(), String> {
    let request = driver.uncountable();
    let mut backend = factory();
    ensure(backend.plan(&request).is_err(), || {
        format!("it claims to be able to count '{request}'")
    })?;
    // A slot that once counted something else must not answer for it.
    program(backend.as_mut(), A, &driver.request())?;
    ensure(backend.program(A, &request).is_err(), || {
        format!("it accepted '{request}'")
    })?;
    backend.start(A);
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    match backend.read(A) {
        Reading::Unavailable(_) => Ok(()),
        Reading::Counted { value, .. } => Err(format!(
            "it read {value} for '{request}', which nobody counts"
        )),
    }
}

pub(super) fn unprogrammed_is_no_zero(
    factory: Factory<'_>,
    driver: &mut dyn Driver,
) -> Result<(), String> {
    let mut backend = factory();
    backend.start(A);
    backend.arm(A, NonZeroU64::new(1));
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
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

pub(super) fn provenance_agrees(
    factory: Factory<'_>,
    driver: &mut dyn Driver,
) -> Result<(), String> {
    let mut backend = factory();
    let request = driver.request();
    let promised = backend
        .plan(&request)
        .map_err(|unavailable| format!("'{request}' was refused: {unavailable}"))?
        .provenance;
    let programmed = program(backend.as_mut(), A, &request)?;
    backend.start(A);
    driver.run(backend.as_mut(), Ring::Kernel, some(driver));
    let Reading::Counted { provenance, .. } = backend.read(A) else {
        return Err("a running slot has no count".to_owned());
    };
    ensure(promised == programmed && programmed == provenance, || {
        format!("promised {promised}, programmed {programmed}, read {provenance}")
    })
}
