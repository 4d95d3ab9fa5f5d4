//! Clocks that are fractions of the TSC.

use serde::{Deserialize, Serialize};

/// A clock of `hz`, in ticks of a TSC of `tsc_hz`. Neither is 0.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Rate {
    hz: u64,
    tsc_hz: u64,
}

impl Rate {
    pub(crate) fn new(hz: u64, tsc_hz: u64) -> Self {
        Self {
            hz: hz.max(1),
            tsc_hz: tsc_hz.max(1),
        }
    }

    /// Cycles that are complete after `ticks` of the TSC.
    pub(crate) fn cycles(&self, ticks: u64) -> u64 {
        let cycles = u128::from(ticks) * u128::from(self.hz) / u128::from(self.tsc_hz);
        u64::try_from(cycles).unwrap_or(u64::MAX)
    }

    /// The fewest ticks in which so many cycles are complete; none before the TSC wraps.
    pub(crate) fn ticks(&self, cycles: u64) -> Option<u64> {
        let ticks = (u128::from(cycles) * u128::from(self.tsc_hz)).div_ceil(self.hz.into());
        u64::try_from(ticks).ok()
    }
}
