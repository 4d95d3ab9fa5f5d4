//! How long a counter was to count and how long it did, and what follows for
//! the events in between.

use pmu_model::Ticks;

/// Times of one logical counter, in time that the guest ran.
///
/// The caller brings `now`, how long the guest has run so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    /// Until it was last disabled.
    enabled: Ticks,
    enabled_from: Option<Ticks>,
    /// Until it last left a physical counter.
    running: Ticks,
    running_from: Option<Ticks>,
    /// Since then no event has been accounted for.
    span_from: Ticks,
    /// Enabled ticks before that of which none has, left over when it was
    /// disabled.
    owed: Ticks,
}

/// The time from `from` until `now`. A count that comes with a wait longer than the
/// guest has run here has a `from` below zero, which wraps.
#[inline]
fn since(now: Ticks, from: Ticks) -> Ticks {
    Ticks(now.0.wrapping_sub(from.0))
}

impl Times {
    /// Times of a counter that is disabled so far.
    pub(super) fn restored(enabled: Ticks, running: Ticks, unaccounted: Ticks) -> Self {
        Times {
            enabled,
            running,
            owed: unaccounted,
            ..Times::default()
        }
    }

    /// Enabled ticks of which the events have not been accounted for.
    pub(super) fn unaccounted(&self, now: Ticks) -> Ticks {
        match self.enabled_from {
            Some(_) => since(now, self.span_from),
            None => self.owed,
        }
    }

    /// The guest wants it to count from now on.
    pub(super) fn enable(&mut self, now: Ticks) {
        if self.enabled_from.is_none() {
            self.enabled_from = Some(now);
            self.span_from = since(now, self.owed);
        }
    }

    /// The guest wants it to count no longer. What it has waited until now is
    /// filled when it counts again.
    pub(super) fn disable(&mut self, now: Ticks) {
        self.stop(now);
        self.owed = self.unaccounted(now);
        if let Some(from) = self.enabled_from.take() {
            self.enabled += since(now, from);
        }
    }

    /// Whether the guest wants it to count.
    pub(super) fn is_enabled(&self) -> bool {
        self.enabled_from.is_some()
    }

    /// A physical counter counts for it from now on.
    pub(super) fn run(&mut self, now: Ticks) {
        self.running_from.get_or_insert(now);
    }

    /// It counts no longer; what it counted was committed.
    pub(super) fn stop(&mut self, now: Ticks) {
        if let Some(from) = self.running_from.take() {
            self.running += since(now, from);
        }
    }

    /// Nobody has counted for it since the last commitment, although a
    /// physical counter was meant to.
    pub(super) fn lose(&mut self, now: Ticks) {
        if let Some(from) = self.running_from.take() {
            let lost = self.unaccounted(now);
            let counted = since(now, from) - lost;
            self.running += counted;
        }
    }

    /// Forgets time that nobody counted: the guest has set the count.
    pub(super) fn start_over(&mut self, now: Ticks) {
        self.span_from = now;
        self.owed = Ticks(0);
    }

    /// Ticks that it was to count.
    pub(super) fn time_enabled(&self, now: Ticks) -> Ticks {
        let open = self.enabled_from.map_or(Ticks(0), |from| since(now, from));
        self.enabled + open
    }

    /// Ticks that a physical counter did count for it.
    pub(super) fn time_running(&self, now: Ticks) -> Ticks {
        let open = self.running_from.map_or(Ticks(0), |from| since(now, from));
        self.running + open
    }

    /// What `events`, counted since the last commitment, stand for: more than
    /// themselves if the counter had to wait in between, at the rate that was
    /// seen. So a count never falls, and each wait is filled with the rate next
    /// to it.
    pub(super) fn commit(&mut self, now: Ticks, events: u64) -> u64 {
        let wanted = since(now, self.span_from);
        let ran = self
            .running_from
            .map_or(Ticks(0), |from| since(now, from).min(wanted));
        if ran == wanted {
            self.span_from = now;
            return events;
        }
        if ran == Ticks(0) {
            return events;
        }
        self.span_from = now;
        let scaled = u128::from(events) * u128::from(wanted.0) / u128::from(ran.0);
        u64::try_from(scaled).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::{Ticks, Times};

    #[test]
    fn what_ran_all_the_time_is_taken_as_it_is() {
        let mut times = Times::default();
        times.enable(Ticks(100));
        times.run(Ticks(100));
        assert_eq!(times.commit(Ticks(150), 7), 7);
        assert_eq!(times.commit(Ticks(150), 1), 1, "no time has passed");
        assert_eq!(
            (
                times.time_enabled(Ticks(160)),
                times.time_running(Ticks(160))
            ),
            (Ticks(60), Ticks(60))
        );
    }

    #[test]
    fn a_wait_is_filled_with_the_rate_after_it() {
        let mut times = Times::default();
        times.enable(Ticks(0));
        // It waits for 300 ticks and runs for 100.
        times.run(Ticks(300));
        assert_eq!(times.commit(Ticks(400), 50), 200);
        assert_eq!(
            times.commit(Ticks(500), 60),
            60,
            "the wait is paid for once"
        );
        assert_eq!(
            (
                times.time_enabled(Ticks(500)),
                times.time_running(Ticks(500))
            ),
            (Ticks(500), Ticks(200))
        );
    }

    #[test]
    fn disabled_time_is_no_wait() {
        let mut times = Times::default();
        times.enable(Ticks(0));
        times.run(Ticks(0));
        assert_eq!(times.commit(Ticks(10), 10), 10);
        times.disable(Ticks(10));
        assert!(!times.is_enabled());
        times.enable(Ticks(1_000));
        times.run(Ticks(1_000));
        assert_eq!(times.commit(Ticks(1_010), 10), 10);
        assert_eq!(
            (
                times.time_enabled(Ticks(1_010)),
                times.time_running(Ticks(1_010))
            ),
            (Ticks(20), Ticks(20))
        );
    }

    #[test]
    fn a_wait_outlasts_being_disabled() {
        let mut times = Times::default();
        times.enable(Ticks(0));
        times.disable(Ticks(300));
        assert_eq!(times.unaccounted(Ticks(700)), Ticks(300));
        times.enable(Ticks(1_000));
        times.run(Ticks(1_000));
        assert_eq!(times.commit(Ticks(1_100), 50), 200);
        times.disable(Ticks(1_100));
        assert_eq!(times.unaccounted(Ticks(1_200)), Ticks(0));
    }

    #[test]
    fn a_loss_ends_the_time_that_was_counted() {
        let mut times = Times::default();
        times.enable(Ticks(0));
        times.run(Ticks(0));
        assert_eq!(times.commit(Ticks(100), 10), 10);
        times.lose(Ticks(150));
        assert_eq!(
            (
                times.time_enabled(Ticks(200)),
                times.time_running(Ticks(200))
            ),
            (Ticks(200), Ticks(100))
        );
    }

    #[test]
    fn a_count_that_the_guest_sets_ends_the_wait() {
        let mut times = Times::default();
        times.enable(Ticks(0));
        times.start_over(Ticks(500));
        times.run(Ticks(500));
        assert_eq!(times.commit(Ticks(600), 10), 10);
    }
}
