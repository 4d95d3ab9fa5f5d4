//! What each processor got for each counter, until the configuration area has it.

use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

use firmware::config::{MAX_COUNTERS, MAX_CPUS, Outcome, Step};

/// A row for each processor.
static OUTCOMES: [AtomicU8; MAX_CPUS * MAX_COUNTERS] =
    [const { AtomicU8::new(0) }; MAX_CPUS * MAX_COUNTERS];

/// Notes what a processor got.
pub(crate) fn set(cpu: usize, number: usize, outcome: Outcome) {
    if let Some(place) = OUTCOMES.get(cpu * MAX_COUNTERS + number) {
        place.store(outcome.code(), Relaxed);
    }
}

/// What a processor got; for processors that are done.
pub(crate) fn get(cpu: usize, number: usize) -> Outcome {
    match OUTCOMES.get(cpu * MAX_COUNTERS + number) {
        Some(code) => Outcome::of(code.load(Relaxed)),
        None => Outcome::Failed(Step::Absent),
    }
}
