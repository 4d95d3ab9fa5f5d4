//! A vCPU among others on one core: timeslices, and looks at it while it waits.

use kvm_bindings::KVM_MP_STATE_RUNNABLE;
use kvm_pmu::{ExitOwner, ThreadContext, Tsc, now};
use pmu_virt::{Ticks, VcpuPmu};

use super::outcome::{RunOutcome, Runnability, Timeslice};
use super::run::{RunState, Vcpu, VcpuFailure, dead_machine};
use super::timer::{self, Expiry};
use crate::kvm::{KvmVcpu, VcpuError, set_signal_mask};
use crate::sys::SignalMask;

/// `IA32_TIME_STAMP_COUNTER`: the guest's own TSC.
const TSC: u32 = 0x10;
/// `IA32_TSC_DEADLINE`.
const TSC_DEADLINE: u32 = 0x6e0;

impl RunState {
    /// Could `kvm` run? KVM answers only while the vCPU is outside `KVM_RUN`.
    pub(super) fn runnability(&self, kvm: &KvmVcpu) -> Result<Runnability, VcpuError> {
        if self.is_blocked() {
            return Ok(Runnability::Blocked);
        }
        if let Some(until) = self.pmu.locked_out_until() {
            return Ok(Runnability::LockedOut { until });
        }
        // Halted, or a processor that waits for INIT or SIPI.
        match kvm.get_mp_state()?.mp_state {
            KVM_MP_STATE_RUNNABLE => Ok(Runnability::Runnable),
            _ => Ok(Runnability::Idle),
        }
    }
}

impl Vcpu {
    /// Runs the guest for one timeslice. Afterwards any thread may run it on: KVM has
    /// completed its last access.
    ///
    /// # Errors
    /// [`VcpuFailure`]: an ioctl failed, which no guest should be able to cause.
    pub fn run_for(
        &mut self,
        thread: &mut ThreadContext,
        timeslice: &Timeslice<'_>,
    ) -> Result<RunOutcome, VcpuFailure> {
        if self.looking {
            set_signal_mask(&self.kvm, None)?;
            self.looking = false;
        }
        self.run_until(thread, Some(timeslice))
    }

    /// Asks whether an idle vCPU has been woken, without entering the guest: with
    /// a signal pending, `KVM_RUN` makes one pass of its halt check. A LAPIC timer
    /// that has expired needs two: the first one makes an interrupt of it.
    ///
    /// `mask` lets [`hold_pending_signal`](crate::sys::hold_pending_signal)'s
    /// signal of the calling thread through.
    ///
    /// # Errors
    /// [`VcpuFailure`]: an ioctl failed, which no guest should be able to cause.
    pub fn probe(
        &mut self,
        thread: &mut ThreadContext,
        mask: SignalMask,
    ) -> Result<RunOutcome, VcpuFailure> {
        let outcome = self.look(thread, mask);
        outcome.or_else(|failure| dead_machine(failure).map(RunOutcome::Ended))
    }

    fn look(
        &mut self,
        thread: &mut ThreadContext,
        mask: SignalMask,
    ) -> Result<RunOutcome, VcpuFailure> {
        if !self.looking {
            set_signal_mask(&self.kvm, Some(mask))?;
            self.looking = true;
        }
        // A kick at the very end of the last timeslice has left it set, and `KVM_RUN`
        // would return before it looks.
        self.kvm.set_immediate_exit(false);
        let core = &mut self.core;
        // A vCPU that halts is not left again, and time goes on for its leases.
        core.tick(thread);
        let (pmu, mut lent) = core.lend(thread);
        pmu.before_probe(&mut self.kvm, &mut lent)?;
        // A look is no exit of the guest, so tools do not see it.
        let exit = self.kvm.enter();
        let (pmu, mut lent) = core.lend(thread);
        if pmu.take_exit(&mut self.kvm, &mut lent, exit)? == ExitOwner::Vmm
            && let Ok(exit) = exit
            && let Some(end) = core.handle(&mut self.kvm, exit)?
        {
            return Ok(RunOutcome::Ended(end));
        }
        let runnability = self.core.runnability(&self.kvm)?;
        if runnability == Runnability::Runnable {
            self.core.note_rest(runnability);
        }
        Ok(RunOutcome::Paused(runnability))
    }

    /// Its PMU, which gets the counters of a core and gives them back.
    pub(crate) fn pmu_mut(&mut self) -> Option<&mut VcpuPmu> {
        self.core.pmu.pmu_mut()
    }

    /// Could it run?
    ///
    /// # Errors
    /// The error of `KVM_GET_MP_STATE`.
    pub fn runnability(&self) -> Result<Runnability, VcpuFailure> {
        Ok(self.core.runnability(&self.kvm)?)
    }

    /// The instant at which something is known to happen that may wake it: its
    /// timer expires, or a lease, a question or a revocation's notice ends.
    ///
    /// # Errors
    /// The error of `KVM_GET_LAPIC` or `KVM_GET_MSRS`.
    pub fn wake_due(&self) -> Result<Option<Tsc>, VcpuFailure> {
        let decision = self.core.pmu.pmu().and_then(|pmu| pmu.claims().due());
        Ok([self.timer_due()?, decision].into_iter().flatten().min())
    }

    /// The instant at which the timer of its local APIC will have expired, if it
    /// is set.
    fn timer_due(&self) -> Result<Option<Tsc>, VcpuFailure> {
        let ticks = match timer::expiry(&self.kvm.get_lapic()?) {
            Expiry::Never => None,
            Expiry::After(cycles) => Some(timer::ticks(cycles, self.tsc_khz())),
            Expiry::AtDeadline => {
                let deadline = self.kvm.read_msr(TSC_DEADLINE)?.unwrap_or(0);
                let tsc = self.kvm.read_msr(TSC)?.unwrap_or(0);
                // 0 is "not set" (SDM vol. 3A, 12.5.4.1); one that has passed is
                // on its way.
                deadline.checked_sub(tsc).map(Ticks)
            }
        };
        let margin = timer::margin(self.tsc_khz());
        Ok(ticks.map(|ticks| now() + ticks + margin))
    }

    /// Enters and leaves `KVM_RUN` without running the guest, so that what KVM
    /// does for a vCPU on a new thread is done and its cost can be reported.
    ///
    /// # Errors
    /// [`VcpuFailure`]: an ioctl failed, which no guest should be able to cause.
    pub fn settle_in(&mut self) -> Result<(), VcpuFailure> {
        self.kvm.set_immediate_exit(true);
        self.kvm.run()?;
        self.kvm.set_immediate_exit(false);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cores hand vCPUs to each other.
    #[test]
    fn a_vcpu_can_move_to_another_thread() {
        fn movable<T: Send>() {}
        movable::<Vcpu>();
    }
}
