//! Debug exits: RDPMC behind the #GP handler, steps, and the guest's own.

use pmu_virt::ReadOutcome;

use super::debug::DebugEvent;
use super::kick::Seat;
use super::observe::TrapEvent;
use super::run::{Core, SYNCED_EXITS, VcpuFailure};
use crate::kvm::{DebugExit, KvmVcpu};
use crate::trap::StepStop;

impl Core {
    /// A debug exit: a breakpoint or step of ours, or the guest's own #DB.
    pub(super) fn debug_exit(
        &mut self,
        kvm: &KvmVcpu,
        seat: &mut Seat,
        exit: &DebugExit,
    ) -> Result<(), VcpuFailure> {
        self.registers_wanted = SYNCED_EXITS;
        match self.debug.on_exit(kvm, exit)? {
            DebugEvent::Breakpoint(address) => self.breakpoint(kvm, seat, address)?,
            DebugEvent::Guest(dr6) => {
                // After a data breakpoint the instruction is complete, before
                // an instruction breakpoint it has not begun.
                self.step_stop(kvm, seat, StepStop::Exit)?;
                self.stepping.abandon();
                self.report(kvm.id(), || TrapEvent::GuestDebug { dr6 });
            }
            DebugEvent::Stepped => self.step_stop(kvm, seat, StepStop::Trap)?,
            DebugEvent::Passed => {}
        }
        Ok(())
    }

    /// One of our breakpoints: the #GP handler, or another that a step leads to.
    fn breakpoint(
        &mut self,
        kvm: &KvmVcpu,
        seat: &mut Seat,
        address: u64,
    ) -> Result<(), VcpuFailure> {
        let memory = self.vm.memory();
        let gate = self.gp.gate().filter(|gate| gate.handler == address);
        let (Some(gate), Some(pmu), Some(core)) = (gate, &mut self.pmu, &mut seat.pmu) else {
            let woke = self.stepping.is_halted();
            self.step_stop(kvm, seat, StepStop::Breakpoint(address))?;
            if !woke {
                self.debug.pass(kvm, address)?;
            }
            return Ok(());
        };
        if self.stepping.is_active() {
            self.stepping.hide_tf_in_frame(kvm, memory, &gate)?;
        }
        let event = self
            .gp
            .on_breakpoint(kvm, memory, &mut self.debug, (pmu, core))?;
        if matches!(event, TrapEvent::Rdpmc { .. }) {
            self.tally.was_rdpmc();
        }
        match event {
            TrapEvent::Rdpmc {
                ring,
                outcome: ReadOutcome::Value(_),
                ..
            } if self.stepping.is_active() => self.stepping.emulated_rdpmc(ring, pmu, core),
            _ => self.step_stop(kvm, seat, StepStop::Breakpoint(address))?,
        }
        self.report(kvm.id(), || event);
        Ok(())
    }

    /// Tells the stepper, if it is at work, that the guest stopped.
    pub(super) fn step_stop(
        &mut self,
        kvm: &KvmVcpu,
        seat: &mut Seat,
        stop: StepStop,
    ) -> Result<(), VcpuFailure> {
        if let (true, Some(pmu), Some(core)) =
            (self.stepping.is_active(), &mut self.pmu, &mut seat.pmu)
        {
            let memory = self.vm.memory();
            self.stepping
                .stopped(kvm, memory, &mut self.debug, (pmu, core), stop)?;
        }
        Ok(())
    }
}
