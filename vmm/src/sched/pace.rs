//! The times that a core keeps.

use std::time::Duration;

/// A probe of an idle vCPU every 4/5 of a slice: a timer that has expired is
/// seen at the second probe after it, so within 2 slices.
const PROBE_NUM: u64 = 4;
const PROBE_DEN: u64 = 5;
/// Longer slices do not make wake-ups later than this.
const LONGEST_PROBE: Duration = Duration::from_millis(4);
/// After a round of probes that took T, none begins for this times T, so that
/// probes take at most 1/33 of a core,
const QUIET: u64 = 32;
/// but for no longer than so many distances of probes: a round may have taken
/// long because the host was busy, and a wake-up must not wait for that.
const LONGEST_QUIET: u64 = 4;
/// The first look at a running vCPU, for which another one waits, is this part
/// of a slice after its entry; each further one twice as far away.
const FIRST_LOOK: u64 = 16;
/// Less than this part of a slice is not worth a switch.
const SHORTEST: u64 = 16;
/// For so many slices a vCPU must have been waiting before one migrates,
const PATIENCE: u64 = 4;
/// and so many it then stays at least,
const SETTLE: u64 = 40;
/// or for so many times what the migration has cost: it costs no vCPU more than
/// 1/64 of its time.
const WORTH: u64 = 64;

/// The times that a core keeps, in TSC ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// For how long a vCPU runs while others wait.
    pub slice: u64,
    /// How often an idle vCPU is asked whether it has been woken.
    pub probe_every: u64,
    /// From entry to the first look whether a vCPU has halted, while others wait.
    pub first_look: u64,
    /// A rest of a slice below this counts as none.
    pub shortest: u64,
    /// How long others must have been waiting before one of them migrates.
    pub patience: u64,
    /// How long a vCPU stays on a core at least.
    pub settle: u64,
}

impl Pace {
    /// The pace for slices of `slice` on a TSC of `tsc_khz`.
    #[must_use]
    pub fn new(slice: Duration, tsc_khz: u32) -> Self {
        let ticks = |time: Duration| {
            let ticks = time.as_nanos().saturating_mul(tsc_khz.into()) / 1_000_000;
            u64::try_from(ticks).unwrap_or(u64::MAX)
        };
        let longest = ticks(LONGEST_PROBE);
        let slice = ticks(slice).max(FIRST_LOOK);
        Self {
            slice,
            probe_every: (slice / PROBE_DEN * PROBE_NUM).min(longest).max(1),
            first_look: slice / FIRST_LOOK,
            shortest: slice / SHORTEST,
            patience: slice.saturating_mul(PATIENCE),
            settle: slice.saturating_mul(SETTLE),
        }
    }

    /// For how long no round of probes follows one that took `took` ticks.
    #[must_use]
    pub fn quiet(&self, took: u64) -> u64 {
        let longest = self.probe_every.saturating_mul(LONGEST_QUIET);
        took.saturating_mul(QUIET).min(longest)
    }

    /// How long a vCPU stays on a core to which it came for `cost` ticks.
    #[must_use]
    pub fn stay(&self, cost: u64) -> u64 {
        self.settle.max(cost.saturating_mul(WORTH))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_slice() {
        fn check(slice_ms: u64, probe_us: u64, look_us: u64) {
            let pace = Pace::new(Duration::from_millis(slice_ms), 1000);
            assert_eq!(pace.slice, slice_ms * 1000);
            assert_eq!((pace.probe_every, pace.first_look), (probe_us, look_us));
        }
        check(1, 800, 62);
        check(5, 4000, 312);
        check(1000, 4000, 62_500);
        assert_eq!(Pace::new(Duration::ZERO, 1).slice, FIRST_LOOK);
    }

    #[test]
    fn probes_are_followed_by_quiet() {
        let pace = Pace::new(Duration::from_millis(5), 1000);
        assert_eq!(pace.quiet(150), 4800);
        // The host was busy.
        assert_eq!(pace.quiet(100_000), 16_000);
    }

    #[test]
    fn dear_migrations_are_rare() {
        let pace = Pace::new(Duration::from_millis(5), 1000);
        assert_eq!(pace.stay(7), 200_000);
        assert_eq!(pace.stay(20_000), 1_280_000);
        assert_eq!(pace.stay(u64::MAX), u64::MAX);
    }
}
