//! How often a context may interrupt (§4.4.4).

/// Overflow interrupts per second that a context may cause where nobody has
/// chosen another number.
pub const DEFAULT_OVERFLOW_RATE: u64 = 100_000;

/// Windows are 1/100 s long where this many interrupts may come in one, so that
/// a burst cannot take a vCPU's time for long; 1 s for lower rates, which such a
/// window would round too much.
const WINDOWS: u64 = 100;
const LEAST_IN_A_WINDOW: u64 = 10;

/// Counts overflow interrupts in windows of time. Time is the host's TSC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Throttle {
    most: u64,
    window: u64,
    start: Option<u64>,
    count: u64,
}

impl Throttle {
    /// At most `per_second` interrupts, on a host whose TSC ticks `tsc_khz`
    /// thousand times a second. A rate of 0 means one per second: none at all
    /// would mean no sampling.
    #[must_use]
    pub fn per_second(per_second: u64, tsc_khz: u64) -> Self {
        let second = tsc_khz.max(1).saturating_mul(1000);
        let short = per_second / WINDOWS;
        let (most, window) = if short >= LEAST_IN_A_WINDOW {
            (short, second / WINDOWS)
        } else {
            (per_second.max(1), second)
        };
        Throttle {
            most,
            window,
            start: None,
            count: 0,
        }
    }

    /// Any number.
    #[must_use]
    pub fn off() -> Self {
        Throttle {
            most: u64::MAX,
            window: 0,
            start: None,
            count: 0,
        }
    }

    /// An interrupt came at `tsc`. Whether it is one too many: monitoring has to
    /// be masked. A window begins with its first interrupt, and anew after each
    /// that was too many, so a restart is given a whole window.
    pub fn hit(&mut self, tsc: u64) -> bool {
        // Another core's TSC may be behind: that begins a window, too.
        let within = self
            .start
            .and_then(|start| tsc.checked_sub(start))
            .is_some_and(|passed| passed < self.window);
        if !within {
            self.start = Some(tsc);
            self.count = 0;
        }
        self.count = self.count.saturating_add(1);
        let too_many = self.count > self.most;
        if too_many {
            self.start = None;
        }
        too_many
    }
}

impl Default for Throttle {
    fn default() -> Self {
        Throttle::off()
    }
}

#[cfg(test)]
mod tests {
    use super::{DEFAULT_OVERFLOW_RATE, Throttle};
    use proptest::prelude::{any, prop_assert, proptest};

    /// Interrupts every `step` ticks: which one is too many.
    fn check(throttle: Throttle, step: u64, expected: Option<usize>) {
        let mut state = throttle;
        let first = (0..20_000u64).position(|n| state.hit(n * step));
        assert_eq!(first, expected, "{throttle:?}, every {step} ticks");
    }

    #[test]
    fn the_rate_decides() {
        // 1 MHz: 1000 interrupts a second are one in 1000 ticks.
        let thousand = Throttle::per_second(1000, 1000);
        check(thousand, 1000, None);
        check(thousand, 999, Some(10));
        check(thousand, 900, Some(10));
        check(thousand, 0, Some(10));
        // Below 1000 a second the window is a second.
        let nine = Throttle::per_second(9, 1000);
        check(nine, 111_112, None);
        check(nine, 1, Some(9));
        check(Throttle::per_second(0, 1000), 1, Some(1));
        check(Throttle::per_second(0, 1000), 1_000_000, None);
        check(Throttle::per_second(DEFAULT_OVERFLOW_RATE, 1000), 10, None);
        check(
            Throttle::per_second(DEFAULT_OVERFLOW_RATE, 1000),
            9,
            Some(1000),
        );
        check(Throttle::off(), 0, None);
    }

    #[test]
    fn after_one_too_many_there_is_a_whole_window() {
        let mut throttle = Throttle::per_second(2, 1000);
        let hits: Vec<bool> = (0..6).map(|n| throttle.hit(n)).collect();
        assert_eq!(hits, [false, false, true, false, false, true]);
    }

    #[test]
    fn a_clock_that_went_back_begins_a_window() {
        let mut throttle = Throttle::per_second(1, 1000);
        assert!(!throttle.hit(500));
        assert!(!throttle.hit(400));
        assert!(throttle.hit(450));
    }

    proptest! {
        #[test]
        fn no_window_has_more(
            rate in 1u64..5000, khz in 1u64..10_000, steps in proptest::collection::vec(0u64..10_000, 1..300)
        ) {
            let fresh = Throttle::per_second(rate, khz);
            let (mut throttle, mut tsc, mut taken) = (fresh, 0u64, Vec::new());
            for step in steps {
                tsc += step;
                if throttle.hit(tsc) {
                    taken.clear();
                } else {
                    taken.push(tsc);
                }
                // Two windows can meet in any stretch of a window's length.
                let recent = taken.iter().filter(|&&at| tsc - at < fresh.window).count();
                prop_assert!(u64::try_from(recent).unwrap_or(u64::MAX) <= 2 * fresh.most);
            }
        }

        #[test]
        fn no_input_overflows(rate in any::<u64>(), khz in any::<u64>(), tsc in any::<[u64; 8]>()) {
            let mut throttle = Throttle::per_second(rate, khz);
            for at in tsc {
                throttle.hit(at);
            }
        }
    }
}
