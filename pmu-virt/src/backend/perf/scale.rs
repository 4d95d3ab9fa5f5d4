//! One event's count out of readings of its group: deltas, scaled where the
//! event was off its counter.

use pmu_model::Nanos;

/// A group's clock at one reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupTimes {
    /// Time in which the group was meant to count.
    pub(super) enabled: Nanos,
    /// Time in which it did.
    pub(super) running: Nanos,
}

impl GroupTimes {
    /// What passed since `earlier`.
    pub(super) fn since(self, earlier: GroupTimes) -> GroupTimes {
        GroupTimes {
            enabled: self.enabled - earlier.enabled,
            running: self.running - earlier.running,
        }
    }

    pub(super) fn is_gapless(self) -> bool {
        self.running >= self.enabled
    }
}

/// An event's count since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Scaler {
    /// The kernel's value at the last reading with times, and ours then.
    raw: u64,
    base: u64,
    /// What is told: never falls.
    value: u64,
    /// Time that was lost with no event to scale; the next events bear it.
    starved: Nanos,
    scaled: bool,
    counted: bool,
}

impl Scaler {
    /// Takes in a reading. `passed` is the group's time since the last one,
    /// `ran` whether this event was wanted at any time of it.
    pub(super) fn reading(&mut self, raw: u64, passed: GroupTimes, ran: bool) {
        let events = raw.saturating_sub(self.raw);
        self.raw = raw;
        self.counted |= passed.running > Nanos(0) || events > 0;
        if !ran && events == 0 {
            return;
        }
        if passed.is_gapless() && self.starved == Nanos(0) {
            self.base = self.base.saturating_add(events);
        } else {
            self.scaled = true;
            let enabled = passed.enabled + self.starved;
            if passed.running == Nanos(0) {
                self.starved = enabled;
            } else {
                self.starved = Nanos(0);
                self.base = self
                    .base
                    .saturating_add(stretched(events, enabled, passed.running));
            }
        }
        self.value = self.value.max(self.base);
    }

    /// Takes in a value read between two readings with times.
    pub(super) fn sample(&mut self, raw: u64) {
        let events = raw.saturating_sub(self.raw);
        self.value = self.value.max(self.base.saturating_add(events));
    }

    /// The count.
    pub(super) fn value(&self) -> u64 {
        self.value
    }

    /// Whether a part of it was extrapolated.
    pub(super) fn is_scaled(&self) -> bool {
        self.scaled
    }

    /// Whether it was to count and never came to: there is no count then.
    pub(super) fn never_counted(&self) -> bool {
        self.scaled && !self.counted
    }
}

fn stretched(events: u64, enabled: Nanos, running: Nanos) -> u64 {
    let scaled = u128::from(events) * u128::from(enabled.0) / u128::from(running.0.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Readings (raw, enabled, running since the last one) to a value.
    fn check(readings: &[(u64, u64, u64)], value: u64, scaled: bool, never: bool) {
        let mut scaler = Scaler::default();
        for &(raw, enabled, running) in readings {
            let before = scaler.value();
            let passed = GroupTimes {
                enabled: Nanos(enabled),
                running: Nanos(running),
            };
            scaler.reading(raw, passed, true);
            assert!(scaler.value() >= before, "it fell at {raw}");
        }
        let told = (scaler.value(), scaler.is_scaled(), scaler.never_counted());
        assert_eq!(told, (value, scaled, never), "{readings:?}");
    }

    #[test]
    fn readings_become_counts() {
        check(&[(100, 10, 10), (250, 10, 10)], 250, false, false);
        // Half of the second interval was lost: 150 events stand for 300.
        check(&[(100, 10, 10), (250, 10, 5)], 400, true, false);
        // An interval without the counter is borne by the next one.
        check(
            &[(100, 10, 10), (100, 10, 0), (200, 10, 10)],
            300,
            true,
            false,
        );
        // Never on a counter: there is no count.
        check(&[(0, 10, 0), (0, 10, 0)], 0, true, true);
        check(&[(u64::MAX, 10, 1)], u64::MAX, true, false);
    }

    #[test]
    fn a_stopped_event_bears_no_gap() {
        let mut scaler = Scaler::default();
        let lost = GroupTimes {
            enabled: Nanos(10),
            running: Nanos(0),
        };
        scaler.reading(0, lost, false);
        assert!(!scaler.is_scaled());
    }

    #[test]
    fn a_sample_counts_until_the_next_reading_replaces_it() {
        let mut scaler = Scaler::default();
        scaler.sample(40);
        assert_eq!(scaler.value(), 40);
        scaler.sample(30);
        assert_eq!(scaler.value(), 40, "never falls");
        let whole = GroupTimes {
            enabled: Nanos(5),
            running: Nanos(5),
        };
        scaler.reading(60, whole, true);
        assert_eq!(scaler.value(), 60);
    }
}
