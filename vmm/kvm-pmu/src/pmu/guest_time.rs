//! When the guest was entered, and how much of the time until its exit it ran.

use pmu_virt::{Ticks, Tsc};

use crate::error::VcpuError;
use crate::halt::HaltClock;
use crate::time;
use crate::vcpu::KvmVcpu;

/// The times of one vCPU's stays in the guest.
#[derive(Debug)]
pub(super) struct GuestTime {
    halt: HaltClock,
    /// It was started; known once something has counted.
    started: bool,
    counting: bool,
    /// TSC at the last entry; `None` if the guest was not entered.
    entered: Option<Tsc>,
    /// The PMU's deadline as of the last entry.
    due: Option<Tsc>,
}

impl GuestTime {
    /// Of a vCPU that was never entered, on a TSC of `tsc_khz`.
    pub(super) fn new(vcpu: &KvmVcpu, tsc_khz: u32) -> Self {
        Self {
            halt: HaltClock::new(vcpu, tsc_khz),
            started: false,
            counting: false,
            entered: None,
            due: None,
        }
    }

    /// The guest is about to be entered; `counting`: something counts.
    #[inline]
    pub(super) fn entering(&mut self, counting: bool) {
        if counting {
            self.halt.entering(time::now(), !self.counting);
        }
        self.counting = counting;
    }

    /// It is entered at `now`, with the PMU's deadline.
    #[inline]
    pub(super) fn enter(&mut self, now: Tsc, due: Option<Tsc>) {
        self.entered = Some(now);
        self.due = due;
    }

    /// When the guest was entered; `None`: it was not.
    pub(super) fn entered(&self) -> Option<Tsc> {
        self.entered
    }

    /// The PMU's deadline as of the last entry.
    pub(super) fn due(&self) -> Option<Tsc> {
        self.due
    }

    /// The exit is dealt with, or the guest is not entered.
    pub(super) fn outside(&mut self) {
        self.entered = None;
    }

    /// The vCPU leaves its thread.
    pub(super) fn leave(&mut self) {
        self.halt.leave(self.counting);
    }

    /// What of the time from `entered` to `left` the vCPU did not run, as far as it is known,
    /// and of stays before.
    #[inline]
    pub(super) fn halted(
        &mut self,
        vcpu: &KvmVcpu,
        (entered, left): (Tsc, Tsc),
        counting: bool,
    ) -> Result<Ticks, VcpuError> {
        let halted = self.halt.passed(entered, left, counting);
        if counting && !self.started {
            // Until its start-up IPI a processor executes nothing, however long its
            // thread was awake for kicks.
            self.started = !vcpu.awaits_startup()?;
            if !self.started {
                return Ok(left - entered);
            }
        }
        Ok(halted)
    }
}
