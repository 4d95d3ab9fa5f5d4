//! The times that a core keeps.

use std::time::Duration;

use pmu_virt::Ticks;

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

/// The times that a core keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// For how long a vCPU runs while others wait.
    pub slice: Ticks,
    /// How often an idle vCPU is asked whether it has been woken.
    pub probe_every: Ticks,
    /// From entry to the first look whether a vCPU has halted, while others wait.
    pub first_look: Ticks,
    /// A rest of a slice below this counts as none.
    pub shortest: Ticks,
    /// How long others must have been waiting before one of them migrates.
    pub patience: Ticks,
    /// How long a vCPU stays on a core at least.
    pub settle: Ticks,
}

impl Pace {
    /// The pace for slices of `slice` on a TSC of `tsc_khz`.
    #[must_use]
    pub fn new(slice: Duration, tsc_khz: u32) -> Self {
        let longest = Ticks::of(LONGEST_PROBE, tsc_khz).0;
        let slice = Ticks::of(slice, tsc_khz).0.max(FIRST_LOOK);
        Self {
            slice: Ticks(slice),
            probe_every: Ticks((slice / PROBE_DEN * PROBE_NUM).min(longest).max(1)),
            first_look: Ticks(slice / FIRST_LOOK),
            shortest: Ticks(slice / SHORTEST),
            patience: Ticks(slice) * PATIENCE,
            settle: Ticks(slice) * SETTLE,
        }
    }

    /// For how long no round of probes follows one that took `took`.
    #[must_use]
    pub fn quiet(&self, took: Ticks) -> Ticks {
        (took * QUIET).min(self.probe_every * LONGEST_QUIET)
    }

    /// How long a vCPU stays on a core to which it came for `cost`.
    #[must_use]
    pub fn stay(&self, cost: Ticks) -> Ticks {
        self.settle.max(cost * WORTH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_slice() {
        fn check(slice_ms: u64, probe_us: u64, look_us: u64) {
            let pace = Pace::new(Duration::from_millis(slice_ms), 1000);
            assert_eq!(pace.slice, Ticks(slice_ms * 1000));
            let looks = (Ticks(probe_us), Ticks(look_us));
            assert_eq!((pace.probe_every, pace.first_look), looks);
        }
        check(1, 800, 62);
        check(5, 4000, 312);
        check(1000, 4000, 62_500);
        assert_eq!(Pace::new(Duration::ZERO, 1).slice, Ticks(FIRST_LOOK));
    }

    #[test]
    fn probes_are_followed_by_quiet() {
        let pace = Pace::new(Duration::from_millis(5), 1000);
        assert_eq!(pace.quiet(Ticks(150)), Ticks(4800));
        // The host was busy.
        assert_eq!(pace.quiet(Ticks(100_000)), Ticks(16_000));
    }

    #[test]
    fn dear_migrations_are_rare() {
        let pace = Pace::new(Duration::from_millis(5), 1000);
        assert_eq!(pace.stay(Ticks(7)), Ticks(200_000));
        assert_eq!(pace.stay(Ticks(20_000)), Ticks(1_280_000));
        assert_eq!(pace.stay(Ticks(u64::MAX)), Ticks(u64::MAX));
    }
}
