//! How many events there are to be between two samples.

/// The longest period: the events of a day at some GHz.
pub const LONGEST: u64 = 1 << 47;
/// Less time than this says nothing about a rate.
const LEAST_NS: u64 = 1_000_000;
/// A period is changed if it is off by more than one part in so many: each
/// change costs a command, and begins a period anew.
const TOLERATED: u64 = 8;

/// Adapts a period so that a vCPU which runs all the time is sampled so many
/// times a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control {
    hz: u64,
    period: u64,
}

impl Control {
    /// For `hz` samples a second of a counter that nothing is known of, on a
    /// host whose TSC ticks `tsc_khz` thousand times a second: as if the event
    /// came with every tick. Few events come more often, so the first periods
    /// are too long, which disturbs nobody.
    #[must_use]
    pub fn new(hz: u64, tsc_khz: u64) -> Self {
        let hz = hz.max(1);
        let period = tsc_khz.saturating_mul(1000) / hz;
        Self {
            hz,
            period: period.clamp(1, LONGEST),
        }
    }

    /// The events between two samples.
    #[must_use]
    pub fn period(&self) -> u64 {
        self.period
    }

    /// `events` took place in `active_ns` nanoseconds of the counter's time.
    /// The new period, if it has to change: that at which so many events make
    /// the samples that are wanted. Where there were none at all, nobody knows
    /// what their rate will be, and nothing changes.
    pub fn adjust(&mut self, events: u64, active_ns: u64) -> Option<u64> {
        if active_ns < LEAST_NS || events == 0 {
            return None;
        }
        let second = u128::from(events) * 1_000_000_000 / u128::from(active_ns);
        let wanted = u64::try_from(second / u128::from(self.hz)).unwrap_or(LONGEST);
        let wanted = wanted.clamp(1, LONGEST);
        let off = self.period.abs_diff(wanted);
        if off <= self.period / TOLERATED {
            return None;
        }
        // Near the goal only half of the way: one odd moment is no new rate.
        let near = wanted / 2 <= self.period && self.period <= wanted.saturating_mul(2);
        self.period = if near {
            self.period.midpoint(wanted).max(1)
        } else {
            wanted
        };
        Some(self.period)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop_assert, proptest};

    #[test]
    fn the_period_follows_the_rate() {
        let check = |events: u64, active_ns: u64, expected: Option<u64>| {
            // 1 kHz on a host of 1 GHz.
            let mut control = Control::new(1000, 1_000_000);
            assert_eq!(control.period(), 1_000_000);
            assert_eq!(control.adjust(events, active_ns), expected);
            assert_eq!(control.period(), expected.unwrap_or(1_000_000));
        };
        let tenth = 100_000_000;
        check(100_000_000, tenth, None);
        check(105_000_000, tenth, None);
        // Half of the way.
        check(150_000_000, tenth, Some(1_250_000));
        check(60_000_000, tenth, Some(800_000));
        // All of it.
        check(1_000_000, tenth, Some(10_000));
        check(1_000_000_000, tenth, Some(10_000_000));
        // Too rare to be sampled so often.
        check(3, tenth, Some(1));
        // Nothing is known.
        check(0, tenth, None);
        check(1_000_000, LEAST_NS - 1, None);
        check(u64::MAX, LEAST_NS, Some(LONGEST));
    }

    #[test]
    fn extremes_are_periods() {
        assert_eq!(Control::new(0, 0).period(), 1);
        assert_eq!(Control::new(1, u64::MAX).period(), LONGEST);
    }

    proptest! {
        /// At a steady rate, a few looks bring the samples that were asked for,
        /// but for what is tolerated.
        #[test]
        fn a_steady_rate_is_found(hz in 1u64..100_000, rate in 1u64..10_000_000_000) {
            let mut control = Control::new(hz, 2_000_000);
            for _ in 0..12 {
                control.adjust(rate / 10, 100_000_000);
            }
            let wanted = (rate / 10 * 10 / hz).max(1);
            let most = control.period() / TOLERATED + 2;
            prop_assert!(rate < 10 || control.period().abs_diff(wanted) <= most);
        }
    }
}
