//! What a thread lends to the vCPU that it runs, and its kick at a deadline.

use std::sync::Arc;
use std::time::Duration;

use pmu_virt::CorePmu;
use vmm_sys_util::errno;

use crate::error::KvmPmuError;
use crate::sys::{KickFlag, KickGuard, KickTarget, KickTimer};
use crate::time::Tsc;

/// What a thread lends to the vCPU that it runs: its kicks, and the counters of
/// its core. It serves one vCPU after the other, on the thread that made it.
#[derive(Debug)]
pub struct ThreadContext {
    timer: DeadlineTimer,
    target: KickTarget,
    core: u16,
    counters: Option<Box<CorePmu>>,
    /// The VMM's own deadline.
    until: Option<u64>,
    bound: Option<KickGuard>,
}

impl ThreadContext {
    /// Of the calling thread; `tsc_khz` is the TSC's frequency.
    ///
    /// # Errors
    /// [`KvmPmuError::Timer`].
    pub fn new(tsc_khz: u32) -> Result<Self, KvmPmuError> {
        Ok(Self {
            timer: DeadlineTimer::new(tsc_khz.max(1)).map_err(KvmPmuError::Timer)?,
            target: KickTarget::current(),
            core: 0,
            counters: None,
            until: None,
            bound: None,
        })
    }

    /// Of core `number`: one that vCPUs share, or the number of the one vCPU.
    #[must_use]
    pub fn of_core(mut self, number: usize) -> Self {
        self.core = u16::try_from(number).unwrap_or(u16::MAX);
        self
    }

    /// With the counters of the core, which belong to this thread from now on. A
    /// vCPU that has a PMU is run with counters only.
    #[must_use]
    pub fn with_counters(mut self, counters: Option<Box<CorePmu>>) -> Self {
        self.counters = counters;
        self
    }

    /// The counters of the core.
    #[must_use]
    pub fn counters(&self) -> Option<&CorePmu> {
        self.counters.as_deref()
    }

    /// The counters of the core, to be changed while no guest runs.
    #[must_use]
    pub fn counters_mut(&mut self) -> Option<&mut CorePmu> {
        self.counters.as_deref_mut()
    }

    /// The counters of the core, which are this thread's no more.
    #[must_use]
    pub fn into_counters(self) -> Option<Box<CorePmu>> {
        self.counters
    }

    /// The number of the core.
    #[must_use]
    pub fn core(&self) -> u16 {
        self.core
    }

    /// The thread to kick.
    #[must_use]
    pub fn target(&self) -> KickTarget {
        self.target
    }

    /// Has the thread kicked at `until` at the latest, for a reason of the VMM's
    /// own, from the next entry on; `None`: no more.
    pub fn kick_at(&mut self, until: Option<Tsc>) {
        self.until = until.map(|until| until.0);
    }

    /// A kick that nobody waits for any more has perhaps come.
    pub fn forget_kick(&mut self) {
        self.timer.kicked();
    }

    /// From now on a kick ends or prevents the `KVM_RUN` of `vcpu`.
    #[inline]
    pub(crate) fn bind(&mut self, vcpu: &Arc<KickFlag>) {
        match &self.bound {
            Some(bound) if bound.is_of(vcpu) => bound.renew(),
            _ => {
                // The old guard goes first, for it resets what the new one sets.
                self.bound = None;
                self.bound = Some(vcpu.bind());
            }
        }
    }

    /// Kicks concern no vCPU from now on.
    pub(crate) fn unbind(&mut self) {
        self.bound = None;
    }

    /// Makes sure that a kick comes at `deadline`, or before.
    #[inline]
    pub(crate) fn set_deadline(&mut self, now: u64, deadline: Option<u64>) {
        self.timer.set(now, earliest(deadline, self.until));
    }
}

/// The first of two times.
pub(crate) fn earliest(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}

/// Turns TSC deadlines into kicks of this thread.
///
/// The timer is set again only when it would fire too late: an early kick
/// costs one exit, setting the timer at every entry would cost a system call
/// an exit.
#[derive(Debug)]
struct DeadlineTimer {
    timer: KickTimer,
    tsc_khz: u64,
    /// TSC at which the timer fires, while it is armed.
    armed: Option<u64>,
}

impl DeadlineTimer {
    fn new(tsc_khz: u32) -> errno::Result<Self> {
        Ok(Self {
            timer: KickTimer::for_this_thread()?,
            tsc_khz: tsc_khz.into(),
            armed: None,
        })
    }

    /// The thread was kicked, perhaps by this timer. `CLOCK_MONOTONIC` is slewed
    /// and the TSC is not, so the timer may fire before its TSC value is reached;
    /// it is not to be relied on any more.
    fn kicked(&mut self) {
        self.armed = None;
    }

    /// Makes sure that a kick comes at `deadline` (TSC), or before.
    fn set(&mut self, now: u64, deadline: Option<u64>) {
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
