//! How long a counter was to count and how long it did, and what follows for
//! the events in between.

/// Times of one logical counter, in TSC ticks that the guest ran.
///
/// The caller brings `now`, the ticks that the guest has run so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    /// Until it was last disabled.
    enabled: u64,
    enabled_from: Option<u64>,
    /// Until it last left a physical counter.
    running: u64,
    running_from: Option<u64>,
    /// Since then no event has been accounted for.
    span_from: u64,
    /// Enabled ticks before that of which none has, left over when it was
    /// disabled.
    owed: u64,
}

impl Times {
    /// Times of a counter that is disabled so far.
    pub(super) fn restored(enabled: u64, running: u64, unaccounted: u64) -> Self {
        Times {
            enabled,
            running,
            owed: unaccounted,
            ..Times::default()
        }
    }

    /// Enabled ticks of which the events have not been accounted for.
    pub(super) fn unaccounted(&self, now: u64) -> u64 {
        match self.enabled_from {
            Some(_) => now.wrapping_sub(self.span_from),
            None => self.owed,
        }
    }

    /// The guest wants it to count from now on.
    pub(super) fn enable(&mut self, now: u64) {
        if self.enabled_from.is_none() {
            self.enabled_from = Some(now);
            self.span_from = now.wrapping_sub(self.owed);
        }
    }

    /// The guest wants it to count no longer. What it has waited until now is
    /// filled when it counts again.
    pub(super) fn disable(&mut self, now: u64) {
        self.stop(now);
        self.owed = self.unaccounted(now);
        if let Some(from) = self.enabled_from.take() {
            self.enabled = self.enabled.saturating_add(now.wrapping_sub(from));
        }
    }

    /// Whether the guest wants it to count.
    pub(super) fn is_enabled(&self) -> bool {
        self.enabled_from.is_some()
    }

    /// A physical counter counts for it from now on.
    pub(super) fn run(&mut self, now: u64) {
        self.running_from.get_or_insert(now);
    }

    /// It counts no longer; what it counted was committed.
    pub(super) fn stop(&mut self, now: u64) {
        if let Some(from) = self.running_from.take() {
            self.running = self.running.saturating_add(now.wrapping_sub(from));
        }
    }

    /// Nobody has counted for it since the last commitment, although a
    /// physical counter was meant to.
    pub(super) fn lose(&mut self, now: u64) {
        if let Some(from) = self.running_from.take() {
            let lost = self.unaccounted(now);
            let counted = now.wrapping_sub(from).saturating_sub(lost);
            self.running = self.running.saturating_add(counted);
        }
    }

    /// Forgets time that nobody counted: the guest has set the count.
    pub(super) fn start_over(&mut self, now: u64) {
        self.span_from = now;
        self.owed = 0;
    }

    /// Ticks that it was to count.
    pub(super) fn time_enabled(&self, now: u64) -> u64 {
        let open = self.enabled_from.map_or(0, |from| now.wrapping_sub(from));
        self.enabled.saturating_add(open)
    }

    /// Ticks that a physical counter did count for it.
    pub(super) fn time_running(&self, now: u64) -> u64 {
        let open = self.running_from.map_or(0, |from| now.wrapping_sub(from));
        self.running.saturating_add(open)
    }

    /// What `events`, counted since the last commitment, stand for: more than
    /// themselves if the counter had to wait in between, at the rate that was
    /// seen. So a count never falls, and each wait is filled with the rate next
    /// to it.
    pub(super) fn commit(&mut self, now: u64, events: u64) -> u64 {
        let wanted = now.wrapping_sub(self.span_from);
        let ran = self
            .running_from
            .map_or(0, |from| now.wrapping_sub(from).min(wanted));
        if ran == wanted {
            self.span_from = now;
            return events;
        }
        if ran == 0 {
            return events;
        }
        self.span_from = now;
        let scaled = u128::from(events) * u128::from(wanted) / u128::from(ran);
        u64::try_from(scaled).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::Times;

    #[test]
    fn what_ran_all_the_time_is_taken_as_it_is() {
        let mut times = Times::default();
        times.enable(100);
        times.run(100);
        assert_eq!(times.commit(150, 7), 7);
        assert_eq!(times.commit(150, 1), 1, "no time has passed");
        assert_eq!((times.time_enabled(160), times.time_running(160)), (60, 60));
    }

    #[test]
    fn a_wait_is_filled_with_the_rate_after_it() {
        let mut times = Times::default();
        times.enable(0);
        // It waits for 300 ticks and runs for 100.
        times.run(300);
        assert_eq!(times.commit(400, 50), 200);
        assert_eq!(times.commit(500, 60), 60, "the wait is paid for once");
        assert_eq!(
            (times.time_enabled(500), times.time_running(500)),
            (500, 200)
        );
    }

    #[test]
    fn disabled_time_is_no_wait() {
        let mut times = Times::default();
        times.enable(0);
        times.run(0);
        assert_eq!(times.commit(10, 10), 10);
        times.disable(10);
        assert!(!times.is_enabled());
        times.enable(1_000);
        times.run(1_000);
        assert_eq!(times.commit(1_010, 10), 10);
        assert_eq!(
            (times.time_enabled(1_010), times.time_running(1_010)),
            (20, 20)
        );
    }

    #[test]
    fn a_wait_outlasts_being_disabled() {
        let mut times = Times::default();
        times.enable(0);
        times.disable(300);
        assert_eq!(times.unaccounted(700), 300);
        times.enable(1_000);
        times.run(1_000);
        assert_eq!(times.commit(1_100, 50), 200);
        times.disable(1_100);
        assert_eq!(times.unaccounted(1_200), 0);
    }

    #[test]
    fn a_loss_ends_the_time_that_was_counted() {
        let mut times = Times::default();
        times.enable(0);
        times.run(0);
        assert_eq!(times.commit(100, 10), 10);
        times.lose(150);
        assert_eq!(
            (times.time_enabled(200), times.time_running(200)),
            (200, 100)
        );
    }

    #[test]
    fn a_count_that_the_guest_sets_ends_the_wait() {
        let mut times = Times::default();
        times.enable(0);
        times.start_over(500);
        times.run(500);
        assert_eq!(times.commit(600, 10), 10);
    }
}
