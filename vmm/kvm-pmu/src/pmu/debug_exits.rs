//! Debug exits: RDPMC behind the #GP handler, steps, and the guest's own.

use pmu_virt::ReadOutcome;

use super::{Lent, SYNCED_EXITS, Traps};
use crate::debug::DebugEvent;
use crate::error::KvmPmuError;
use crate::observe::TrapEvent;
use crate::registers::VcpuAccess;
use crate::sys::DebugExit;
use crate::trap::StepStop;

impl Traps {
    /// A debug exit: a breakpoint or step of ours, or the guest's own #DB.
    pub(super) fn debug_exit(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        exit: &DebugExit,
    ) -> Result<(), KvmPmuError> {
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
        Ok(())
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
            } if self.stepping.is_active() => self.stepping.emulated_rdpmc(ring, (pmu, core)),
            _ => self.step_stop(vcpu, lent, StepStop::Breakpoint(address))?,
        }
        lent.observer.event(vcpu.id(), event);
        Ok(())
    }

    /// Reports to the stepper, if it is at work, that the guest stopped.
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
}
