//! How many counters can be had on one CPU now.
//!
//! `perf_event_open(2)` does not refuse for want of a counter. But a pinned event that found none
//! is in error, and its read ends at once. So a probe pins events one after the other, on a thread
//! bound to the CPU; the number of those that read before the first that does not is what can be
//! had. Events that others pinned to the CPU come before those of a thread in the kernel's
//! order, so the probe takes no counter from them; flexible events of others wait meanwhile.

mod budget;
mod session;

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crate::budget::sys::HostCalls;
use crate::budget::{Errno, EventSpec, Fixed, Pmu, ProbeCalls, Scope, Target};
pub use budget::{Budget, FixedState, Free, NotMeasured};
use session::{Pinned, Session};

/// A good bound for the time of a measurement on a real host, where it takes some milliseconds
/// if the CPU is not busy.
pub const MAX_TIME: Duration = Duration::from_millis(100);

/// The most events that a measurement opens.
pub const MAX_EVENTS: usize = 64;

/// How long a flexible event is watched. Where there is no room it waits from the start.
const FLEXIBLE_TIME: Duration = Duration::from_millis(2);

/// Most CPUs that are measured at once. A probe takes nothing from those of other CPUs, and
/// on a busy CPU it mostly waits; but each has some fifteen events open.
const AT_ONCE: usize = 32;

/// How often a measurement begins anew when somebody takes or returns counters meanwhile.
const TRIES: usize = 3;

/// Retired branches on Intel's processors, taken ones on AMD's: an event that each programmable
/// counter counts, and no fixed-function counter.
const PROGRAMMABLE: u64 = 0xC4;
/// Event 0 of an uncore PMU, which its programmable counters count, if only as nothing.
const UNCORE: u64 = 0;

/// Measures what can be had of `pmu` on `cpu` now, on a thread of its own that is bound to the
/// CPU. It waits as long as the CPU gives the thread no time.
///
/// After `max_time`, such as [`MAX_TIME`], it pins nothing more, and says what it does not know.
///
/// The kernel gives an event a fixed-function counter before a programmable one (kernel,
/// arch/x86/events/core.c, `__perf_sched_find_counter`). So the probe fills all programmable
/// counters first; what then still gets a counter has its fixed one. Without these events, one
/// more for a programmable counter still finds none, or somebody returned one meanwhile and the
/// probe begins anew. It is deceived only if another takes that one within microseconds.
///
/// An uncore PMU is measured by its event 0, on the CPU designated for `cpu`; ask
/// [`can_be_had`] with its own events for more.
///
/// # Errors
/// See [`NotMeasured`].
pub fn measure(pmu: &Pmu, cpu: u32, max_time: Duration) -> Result<Budget, NotMeasured> {
    on_thread(|calls| measure_with(calls, pmu, cpu, max_time))
}

/// [`measure`] on each of `cpus`, up to 32 of them at once, for who looks again and again:
/// flexible holders are not looked for, which takes most of the time of one measurement, and
/// [`Budget::flexible_waits`] is `None`. The results are in the order of `cpus`.
pub fn measure_each(
    pmu: &Pmu,
    cpus: &[u32],
    max_time: Duration,
) -> Vec<Result<Budget, NotMeasured>> {
    measure_each_with(HostCalls::default, pmu, cpus, max_time)
}

/// [`measure_each`] by system calls of the caller's choice: each thread makes its own.
pub fn measure_each_with<C: ProbeCalls>(
    calls: impl Fn() -> C + Sync,
    pmu: &Pmu,
    cpus: &[u32],
    max_time: Duration,
) -> Vec<Result<Budget, NotMeasured>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut calls = calls();
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(&cpu) = cpus.get(at) else {
                return done;
            };
            done.push((at, measured(&mut calls, pmu, cpu, max_time, None)));
        }
    };
    let no_thread = Errno(libc::EAGAIN);
    let mut results = vec![Err(NotMeasured::no_thread(no_thread)); cpus.len()];
    thread::scope(|scope| {
        let thread = || thread::Builder::new().name("umpire-budget".to_owned());
        // Where there is no thread for one, the others do its work.
        let threads: Vec<_> = (0..AT_ONCE.min(cpus.len()))
            .filter_map(|_| thread().spawn_scoped(scope, work).ok())
            .collect();
        for thread in threads {
            match thread.join() {
                Ok(done) => done
                    .into_iter()
                    .for_each(|(at, result)| results[at] = result),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    results
}

/// How many of these events, in this order, can be pinned together on `cpu` now: the number
/// before the first that finds no counter. For events that only some counters can count.
///
/// # Errors
/// See [`NotMeasured`].
pub fn can_be_had(
    pmu: &Pmu,
    cpu: u32,
    events: &[EventSpec],
    max_time: Duration,
) -> Result<usize, NotMeasured> {
    on_thread(|calls| can_be_had_with(calls, pmu, cpu, events, max_time))
}

fn on_thread<T: Send>(
    probe: impl FnOnce(&mut HostCalls) -> Result<T, NotMeasured> + Send,
) -> Result<T, NotMeasured> {
    let failed =
        |error: io::Error| NotMeasured::no_thread(Errno(error.raw_os_error().unwrap_or(libc::EIO)));
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("umpire-budget".to_owned());
        let thread = thread.spawn_scoped(scope, || probe(&mut HostCalls::default()));
        match thread.map_err(failed)?.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// [`measure`] by system calls of the caller's choice, on the calling thread, which stays bound
/// to the CPU.
///
/// # Errors
/// See [`NotMeasured`].
pub fn measure_with(
    calls: &mut dyn ProbeCalls,
    pmu: &Pmu,
    cpu: u32,
    max_time: Duration,
) -> Result<Budget, NotMeasured> {
    measured(calls, pmu, cpu, max_time, Some(FLEXIBLE_TIME))
}

/// `watched`: how long a flexible event is watched, if one is.
fn measured(
    calls: &mut dyn ProbeCalls,
    pmu: &Pmu,
    cpu: u32,
    max_time: Duration,
    watched: Option<Duration>,
) -> Result<Budget, NotMeasured> {
    let (mut session, cpu) = begin(calls, pmu, cpu, max_time)?;
    let capacity = (pmu.name == "cpu").then(|| session.capacity()).flatten();
    let (config, wanted): (_, &[Fixed]) = match pmu.scope {
        Scope::Core(_) => (PROGRAMMABLE, &Fixed::ALL),
        Scope::Uncore(_) => (UNCORE, &[]),
    };
    let programmable = pmu.event(config);
    let flexible_waits = match watched {
        Some(watched) => session.flexible_waits(programmable, watched)?,
        None => None,
    };
    let mut budget = Budget {
        cpu,
        capacity,
        programmable: Free::AtLeast(0),
        fixed: Vec::new(),
        flexible_waits,
        took: Duration::ZERO,
    };
    for _ in 0..TRIES {
        session.close_to(0);
        let settled = fill(&mut session, pmu, programmable, wanted, &mut budget)?;
        if settled {
            break;
        }
        // What was seen of them may have been another counter.
        let known = |state| state == FixedState::Absent;
        for (_, state) in budget.fixed.iter_mut().filter(|(_, state)| !known(*state)) {
            *state = FixedState::Unmeasured;
        }
        if session.is_used_up() {
            break;
        }
    }
    session.check_cpu(cpu)?;
    budget.took = session.elapsed();
    Ok(budget)
}

/// Pins what can be pinned. Whether nothing changed meanwhile.
fn fill(
    session: &mut Session<'_>,
    pmu: &Pmu,
    programmable: EventSpec,
    wanted: &[Fixed],
    budget: &mut Budget,
) -> Result<bool, NotMeasured> {
    let mut count = 0usize;
    let full = loop {
        match session.pin(programmable)? {
            Pinned::Had => count += 1,
            Pinned::NoCounter => break true,
            Pinned::Limit => break false,
        }
    };
    budget.fixed.clear();
    for fixed in wanted {
        let state = if budget
            .capacity
            .is_some_and(|capacity| !capacity.has(*fixed))
        {
            FixedState::Absent
        } else if !full {
            FixedState::Unmeasured
        } else {
            match session.pin(pmu.event(fixed.config())) {
                Ok(Pinned::Had) => FixedState::Free,
                Ok(Pinned::NoCounter) => FixedState::Held,
                Ok(Pinned::Limit) => FixedState::Unmeasured,
                Err(Errno(libc::EINVAL | libc::ENOENT | libc::EOPNOTSUPP)) => FixedState::Absent,
                Err(errno) => return Err(errno.into()),
            }
        };
        budget.fixed.push((*fixed, state));
    }
    // A counter that was returned meanwhile is free, or one of the last events has it.
    let still = session.still_have()?;
    let mut settled = full && still == session.held();
    session.close_to(count);
    let count = count.min(still);
    settled = settled && session.pin(programmable)? == Pinned::NoCounter;
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    budget.programmable = if settled {
        Free::Exactly(count)
    } else {
        Free::AtLeast(count)
    };
    Ok(settled)
}

/// [`can_be_had`] by system calls of the caller's choice, on the calling thread, which stays
/// bound to the CPU.
///
/// # Errors
/// See [`NotMeasured`].
pub fn can_be_had_with(
    calls: &mut dyn ProbeCalls,
    pmu: &Pmu,
    cpu: u32,
    events: &[EventSpec],
    max_time: Duration,
) -> Result<usize, NotMeasured> {
    let (mut session, cpu) = begin(calls, pmu, cpu, max_time)?;
    for (index, event) in events.iter().enumerate() {
        match session.pin(*event) {
            Ok(Pinned::Had) => {}
            Ok(Pinned::NoCounter) => break,
            Ok(Pinned::Limit) => return Err(NotMeasured::Unfinished(index)),
            Err(errno @ Errno(libc::EINVAL | libc::ENOENT)) => {
                return Err(NotMeasured::NotAnEvent { index, errno });
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    let had = session.still_have()?;
    session.check_cpu(cpu)?;
    Ok(had)
}

/// Binds the thread, and says which CPU it is bound to.
fn begin<'a>(
    calls: &'a mut dyn ProbeCalls,
    pmu: &Pmu,
    cpu: u32,
    max_time: Duration,
) -> Result<(Session<'a>, u32), NotMeasured> {
    let cpu = pmu.pool_of(cpu).ok_or(NotMeasured::Offline(cpu))?;
    let target = match pmu.scope {
        Scope::Core(_) => Target::Thread,
        Scope::Uncore(_) => Target::Cpu(cpu),
    };
    match calls.bind(cpu) {
        Ok(()) => Ok((Session::new(calls, target, max_time), cpu)),
        Err(Errno(libc::EINVAL)) => Err(NotMeasured::Offline(cpu)),
        Err(errno) => Err(NotMeasured::Failed {
            call: "sched_setaffinity",
            errno,
        }),
    }
}

#[cfg(test)]
#[path = "probe_tests.rs"]
mod tests;
