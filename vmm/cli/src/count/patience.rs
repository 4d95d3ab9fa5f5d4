//! How long something may take, and who ends it before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::time::Timespec;

use super::ended::Who;

/// How long whoever waits does not look whether it is over: a tenth of a second.
pub(super) const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// What ends whatever takes too long.
#[derive(Clone, Debug)]
pub(super) struct Patience {
    /// Set by a signal.
    pub(super) interrupted: Arc<AtomicBool>,
    /// None: for ever.
    until: Option<Instant>,
}

impl Patience {
    /// From now on.
    pub(super) fn new(interrupted: Arc<AtomicBool>, time: Option<Duration>) -> Self {
        Patience {
            interrupted,
            // A time beyond the clock's is none.
            until: time.and_then(|time| Instant::now().checked_add(time)),
        }
    }

    /// Who ends it, if somebody does by now.
    pub(super) fn is_over(&self) -> Option<Who> {
        if self.interrupted.load(Ordering::Relaxed) {
            return Some(Who::Interrupted);
        }
        let is_late = self.until.is_some_and(|until| Instant::now() >= until);
        is_late.then_some(Who::Timeout)
    }

    /// The time that is left; none: for ever.
    pub(super) fn left(&self) -> Option<Duration> {
        let until = self.until?;
        Some(until.saturating_duration_since(Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_and_time_end_it() {
        let flag = Arc::new(AtomicBool::new(false));
        let patience = Patience::new(flag.clone(), None);
        assert_eq!((patience.is_over(), patience.left()), (None, None));
        assert_eq!(
            Patience::new(flag.clone(), Some(Duration::MAX)).is_over(),
            None
        );
        let none = Patience::new(flag.clone(), Some(Duration::ZERO));
        assert_eq!(none.is_over(), Some(Who::Timeout));
        flag.store(true, Ordering::Relaxed);
        assert_eq!(patience.is_over(), Some(Who::Interrupted));
    }
}
