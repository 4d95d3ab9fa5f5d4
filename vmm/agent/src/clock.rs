//! The kernel's clock by the TSC.

use std::collections::VecDeque;

/// Readings that are kept.
const KEPT: usize = 256;
/// Ticks between two of them at least, so that what is kept reaches back for some time: of a
/// 2 GHz TSC 50 ms.
const APART: u64 = 100_000_000;

/// Both clocks at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    pub(crate) tsc: u64,
    pub(crate) ns: u64,
}

/// Readings of the two clocks, which run straight between any two.
#[derive(Debug, Default)]
pub(crate) struct Clock(VecDeque<Reading>);

impl Clock {
    /// Takes the latest reading.
    pub(crate) fn add(&mut self, now: Reading) {
        let last = self.0.len().checked_sub(2).map(|place| self.0[place]);
        // The last one stands for the present and gives way, unless it is far from the others.
        if last.is_some_and(|last| now.tsc.saturating_sub(last.tsc) < APART) {
            self.0.pop_back();
        }
        if self.0.back().is_some_and(|last| now.tsc <= last.tsc) {
            // It went back: the guest was set to another time.
            self.0.clear();
        }
        self.0.push_back(now);
        if self.0.len() > KEPT {
            self.0.pop_front();
        }
    }

    /// What the clock showed at `tsc`; none before there are two readings.
    pub(crate) fn at(&self, tsc: u64) -> Option<u64> {
        let behind = self.0.partition_point(|reading| reading.tsc < tsc);
        let behind = behind.clamp(1, self.0.len().max(2) - 1);
        let (from, to) = (self.0.get(behind - 1)?, self.0.get(behind)?);
        let ticks = i128::from(to.tsc) - i128::from(from.tsc);
        let ns = i128::from(to.ns) - i128::from(from.ns);
        let gone = i128::from(tsc) - i128::from(from.tsc);
        let at = i128::from(from.ns) + gone * ns / ticks.max(1);
        Some(u64::try_from(at.max(0)).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_readings_and_beyond_it_is_straight() {
        let mut clock = Clock::default();
        assert_eq!(clock.at(5), None);
        clock.add(Reading { tsc: 1000, ns: 500 });
        assert_eq!(clock.at(1000), None);
        clock.add(Reading {
            tsc: 1000 + 2 * APART,
            ns: 500 + APART,
        });
        // From here on the clock is as fast as the TSC.
        clock.add(Reading {
            tsc: 1000 + 4 * APART,
            ns: 500 + 3 * APART,
        });
        for (tsc, ns) in [
            (1000, 500),
            (1002, 501),
            (0, 0),
            (1000 + 2 * APART, 500 + APART),
            (1000 + 3 * APART, 500 + 2 * APART),
            (1000 + 5 * APART, 500 + 4 * APART),
        ] {
            assert_eq!(clock.at(tsc), Some(ns), "{tsc}");
        }
    }

    #[test]
    fn the_present_gives_way_to_the_next() {
        let mut clock = Clock::default();
        for step in 0..10_000 {
            let ns = step * 1_000_000;
            clock.add(Reading { tsc: 2 * ns, ns });
        }
        assert!(clock.0.len() > KEPT / 2 && clock.0.len() <= KEPT);
        let past = 2 * 5_000_000_000;
        assert_eq!(clock.at(past), Some(past / 2));
        clock.add(Reading { tsc: 3, ns: 4 });
        assert_eq!(clock.at(3), None, "time went back");
    }
}
