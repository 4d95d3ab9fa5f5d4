//! Debug exits: RDPMC behind the #GP handler, steps, and the guest's own.

use pmu_virt::{ReadOutcome, VcpuPmu};

use super::{ExitOwner, Lent, SYNCED_EXITS, Traps};
use crate::debug::DebugEvent;
use crate::error::KvmPmuError;
use crate::exit::{DebugExit, VmExit};
use crate::observe::TrapEvent;
use crate::trap::StepStop;
use crate::vcpu::VcpuAccess;

/// Looks, a millisecond apart, that find neither a counter enabled nor a debug register in
/// the guest's use, after which the guest is kicked for one as seldom as
/// [`DebugControl::deadline`] says. Counted in looks, for time goes by also where the host
/// does not run the guest.
const IDLE_LOOKS: u8 = 100;

impl Traps {
    /// While debug registers are ours: takes in what the guest did to its own.
    #[cold]
    pub(super) fn share_debug_registers(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        let looked = self.debug.refresh_stale(vcpu)?;
        if self.stepping.is_active() {
            return Ok(());
        }
        if self.gp.is_news(&self.debug) {
            self.report_full(vcpu, lent);
        }
        if looked {
            let enabled = self.pmu.as_ref().is_some_and(VcpuPmu::has_enabled);
            self.idle_looks = if enabled || self.debug.guest_uses_some() {
                0
            } else {
                self.idle_looks.saturating_add(1)
            };
        }
        Ok(())
    }

    /// Whether nothing happens that a kick each millisecond would be for: a guest whose
    /// counters are all off may read them for ever, and shall not pay for that.
    pub(super) fn is_quiet(&self) -> bool {
        self.idle_looks >= IDLE_LOOKS && !self.stepping.is_active()
    }

    /// The guest has just taken the last debug register.
    pub(super) fn report_full(&mut self, vcpu: VcpuAccess<'_>, lent: &mut Lent<'_>) {
        // Once: a guest that takes and leaves the last one in turn must not
        // fill the host's log.
        if !std::mem::replace(&mut self.warned_full, true) {
            log::warn!(
                "{}: the guest uses all four debug registers, its RDPMC will fault",
                vcpu.id()
            );
        }
        lent.observer
            .event(vcpu.id(), TrapEvent::DebugRegistersFull);
    }

    /// A debug exit: a breakpoint or step of ours, or the guest's own #DB.
    #[inline(never)]
    pub(super) fn debug_exit(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        exit: &DebugExit,
    ) -> Result<ExitOwner, KvmPmuError> {
        self.registers_wanted = SYNCED_EXITS;
        match self.debug.on_exit(vcpu, exit)? {
            DebugEvent::Breakpoint(address) => self.breakpoint(vcpu, lent, address)?,
            DebugEvent::Guest(dr6) => {
                // After a data breakpoint the instruction is complete, before
                // an instruction breakpoint it has not begun.
                self.step_stop(vcpu, lent, StepStop::Exit)?;
                self.stepping.abandon();
                lent.observer
                    .event(vcpu.id(), TrapEvent::GuestDebug { dr6 });
            }
            DebugEvent::Stepped => self.step_stop(vcpu, lent, StepStop::Trap)?,
            DebugEvent::Passed => {}
        }
        Ok(ExitOwner::Pmu)
    }

    /// One of our breakpoints: the #GP handler, or another that a step leads to.
    fn breakpoint(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        address: u64,
    ) -> Result<(), KvmPmuError> {
        let memory = lent.memory;
        let gate = self.gp.gate().filter(|gate| gate.handler == address);
        let (Some(gate), Some(pmu), Some(core)) = (gate, &mut self.pmu, lent.thread.counters_mut())
        else {
            let woke = self.stepping.is_halted();
            self.step_stop(vcpu, lent, StepStop::Breakpoint(address))?;
            if !woke {
                self.debug.pass(vcpu, address)?;
            }
            return Ok(());
        };
        if self.stepping.is_active() {
            self.stepping.hide_tf_in_frame(vcpu, memory, &gate)?;
        }
        let event = self
            .gp
            .on_breakpoint(vcpu, memory, &mut self.debug, (pmu, core))?;
        match event {
            TrapEvent::Rdpmc {
                ring,
                outcome: ReadOutcome::Value(_),
                ..
            } if self.stepping.is_active() => {
                self.stepping
                    .emulated_rdpmc(vcpu, memory, ring, (pmu, core))?;
            }
            _ => self.step_stop(vcpu, lent, StepStop::Breakpoint(address))?,
        }
        lent.observer.event(vcpu.id(), event);
        Ok(())
    }

    /// Reports to the stepper, if it is at work, that the guest stopped.
    #[cold]
    pub(super) fn step_stop(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        stop: StepStop,
    ) -> Result<(), KvmPmuError> {
        if self.stepping.is_active()
            && let (Some(pmu), Some(core)) = (&mut self.pmu, lent.thread.counters_mut())
        {
            let memory = lent.memory;
            self.stepping
                .stopped(vcpu, memory, &mut self.debug, (pmu, core), stop)?;
        }
        Ok(())
    }

    /// Any exit but a debug exit, which says itself where the step ended, ends a step; an
    /// entry that was prevented stepped nothing.
    pub(super) fn end_step(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        exit: VmExit,
    ) -> Result<(), KvmPmuError> {
        let stopped = match exit {
            VmExit::Debug(_) => false,
            VmExit::Interrupted => self.entered.is_some(),
            _ => true,
        };
        if stopped && self.stepping.is_active() {
            self.step_stop(vcpu, lent, StepStop::Exit)?;
        }
        Ok(())
    }
}
