//! Virtual time, as devices read it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::TSC_HZ;
use crate::devices::DeviceClock;

/// The clock of a machine's devices. All copies are one clock.
#[derive(Clone, Debug)]
pub struct VirtualClock {
    ticks: Arc<AtomicU64>,
    began: u64,
}

impl VirtualClock {
    /// A clock at virtual time 0, when it was `began` seconds after the beginning of 1970.
    #[must_use]
    pub fn beginning_at(began: u64) -> Self {
        Self {
            ticks: Arc::default(),
            began,
        }
    }

    /// Seconds since 1970 when virtual time began.
    #[must_use]
    pub fn began(&self) -> u64 {
        self.began
    }

    /// It is `ticks` now. Only the machine's thread says so, before it serves a device.
    #[inline]
    pub(super) fn set(&self, ticks: u64) {
        self.ticks.store(ticks, Ordering::Relaxed);
    }
}

impl DeviceClock for VirtualClock {
    fn elapsed(&self) -> Duration {
        let ticks = self.ticks.load(Ordering::Relaxed);
        // A tick is a nanosecond.
        const { assert!(TSC_HZ == 1_000_000_000) };
        Duration::from_nanos(ticks)
    }

    fn unix_seconds(&self) -> u64 {
        self.began.saturating_add(self.elapsed().as_secs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_copies_are_one_clock() {
        let clock = VirtualClock::beginning_at(1_000);
        let device = clock.clone();
        clock.set(2_500_000_000);
        assert_eq!(device.elapsed(), Duration::from_millis(2500));
        assert_eq!(device.unix_seconds(), 1_002);
    }
}
