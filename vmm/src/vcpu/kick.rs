//! The kick at a deadline: the PMU's, or the end of a vCPU's turn.

use std::time::Duration;

use pmu_virt::CorePmu;
use vmm_sys_util::errno;

use super::run::VcpuFailure;
use crate::sys::{KickTarget, KickTimer};

/// What a thread lends to the vCPU that it runs: its kicks and the counters of
/// its core. It serves one vCPU after the other, on the thread that made it.
#[derive(Debug)]
pub struct Seat {
    pub(super) timer: DeadlineTimer,
    target: KickTarget,
    core: u16,
    /// None where vCPUs have no PMU.
    pub(crate) pmu: Option<Box<CorePmu>>,
}

impl Seat {
    /// The calling thread's seat; `tsc_khz` is the TSC's frequency.
    ///
    /// # Errors
    /// [`VcpuFailure::Timer`].
    pub fn new(tsc_khz: u32) -> Result<Self, VcpuFailure> {
        Ok(Self {
            timer: DeadlineTimer::new(tsc_khz.max(1)).map_err(VcpuFailure::Timer)?,
            target: KickTarget::current(),
            core: 0,
            pmu: None,
        })
    }

    /// The same as that of core `number`: of a core that vCPUs share, or the
    /// number of the one vCPU.
    #[must_use]
    pub fn of_core(mut self, number: usize) -> Self {
        self.core = u16::try_from(number).unwrap_or(u16::MAX);
        self
    }

    /// The same with the counters of the core.
    #[must_use]
    pub fn with_pmu(mut self, pmu: Option<Box<CorePmu>>) -> Self {
        self.pmu = pmu;
        self
    }

    pub(super) fn core(&self) -> u16 {
        self.core
    }

    /// The thread to kick.
    #[must_use]
    pub fn target(&self) -> KickTarget {
        self.target
    }
}

/// Turns TSC deadlines into kicks of this thread.
///
/// The timer is set again only when it would fire too late: an early kick
/// costs one exit, setting the timer at every entry would cost a system call
/// an exit.
#[derive(Debug)]
pub(super) struct DeadlineTimer {
    timer: KickTimer,
    tsc_khz: u64,
    /// TSC at which the timer fires, while it is armed.
    armed: Option<u64>,
}

impl DeadlineTimer {
    pub(super) fn new(tsc_khz: u32) -> errno::Result<Self> {
        Ok(Self {
            timer: KickTimer::for_this_thread()?,
            tsc_khz: tsc_khz.into(),
            armed: None,
        })
    }

    /// The thread was kicked, perhaps by this timer. `CLOCK_MONOTONIC` is slewed
    /// and the TSC is not, so the timer may fire before its TSC value is reached;
    /// it is not to be relied on any more.
    pub(super) fn kicked(&mut self) {
        self.armed = None;
    }

    /// Makes sure that a kick comes at `deadline` (TSC), or before.
    pub(super) fn set(&mut self, now: u64, deadline: Option<u64>) {
        let Some(deadline) = deadline else { return };
        // A timer whose time has passed has fired, or is about to.
        let armed = self.armed.filter(|&at| at > now);
        if armed.is_some_and(|at| at <= deadline) {
            return;
        }
        let ticks = deadline.saturating_sub(now);
        let ns = u128::from(ticks) * 1_000_000 / u128::from(self.tsc_khz);
        let ns = u64::try_from(ns).unwrap_or(u64::MAX);
        self.timer.arm(Duration::from_nanos(ns));
        self.armed = Some(deadline);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One tick a millisecond, so that nothing fires during the test.
    fn timer() -> DeadlineTimer {
        DeadlineTimer::new(1).unwrap()
    }

    #[test]
    fn an_earlier_kick_serves_a_later_deadline() {
        let mut timer = timer();
        timer.set(0, Some(1 << 20));
        timer.set(1, Some(1 << 21));
        assert_eq!(timer.armed, Some(1 << 20));
        timer.set(2, Some(1 << 19));
        assert_eq!(timer.armed, Some(1 << 19));
    }

    #[test]
    fn a_timer_that_fired_before_its_tsc_value_is_armed_again() {
        let mut timer = timer();
        timer.set(0, Some(1 << 20));
        timer.kicked();
        assert_eq!(timer.armed, None);
        timer.set((1 << 20) - 1, Some(1 << 20));
        assert_eq!(timer.armed, Some(1 << 20));
    }
}
