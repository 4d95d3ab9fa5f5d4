//! Traps that KVM has no exit for: RDPMC behind the #GP handler, steps, and the guest's
//! own debugging beside ours.

use std::sync::Arc;

use guest_exit::{DebugExit, VmExit};
use pmu_virt::{ReadOutcome, Ticks, Tsc, VcpuPmu};

use super::OnCore;
use crate::debug::{DebugControl, DebugEvent, DebugQuirks};
use crate::error::{VcpuError, VcpuId};
use crate::gp_watch::{GpWatch, Look, Looked, OutStop};
use crate::memory::{GuestBytes, OutOfReach};
use crate::observe::{Armed, TrapEvent, TrapObserver};
use crate::step_driver::{StepDriver, StepSupport};
use crate::sys::KickTarget;
use crate::thread::earliest;
use crate::trap::{StepStop, page_of};
use crate::vcpu::KvmVcpu;
use crate::vm_traps::VmTraps;

/// A stopped vCPU, and what the traps can see of its memory.
#[derive(Clone, Copy)]
pub(super) struct Guest<'a> {
    pub(super) vcpu: &'a KvmVcpu,
    pub(super) memory: &'a dyn GuestBytes,
}

impl<'a> Guest<'a> {
    pub(super) fn of(vcpu: &'a KvmVcpu, memory: &'a dyn GuestBytes) -> Self {
        let memory = if vcpu.in_smm() { &OutOfReach } else { memory };
        Self { vcpu, memory }
    }
}

/// The traps of one vCPU. What is put into debug registers is the stepper's while it
/// steps, and that of the watch on the handler otherwise.
#[derive(Debug)]
pub(super) struct Traps {
    debug: DebugControl,
    gp: GpWatch,
    stepping: StepDriver,
}

impl Traps {
    pub(super) fn new(
        vcpu: VcpuId,
        vm: Arc<VmTraps>,
        (quirks, step): (DebugQuirks, StepSupport),
        refresh: Ticks,
        tsc_khz: u32,
    ) -> Self {
        Self {
            debug: DebugControl::new(quirks, refresh),
            gp: GpWatch::new(vm, vcpu, tsc_khz),
            stepping: StepDriver::new(step),
        }
    }

    /// Whether the vCPU's PMU is one that may be read.
    pub(super) fn programmed(&mut self, programmed: bool) {
        self.gp.programmed(programmed);
    }

    /// Prepares the next instruction, if the guest is stepped.
    pub(super) fn plan_step(
        &mut self,
        Guest { vcpu, memory }: Guest<'_>,
        (pmu, core): OnCore<'_>,
    ) -> Result<(), VcpuError> {
        if !pmu.needs().stepping && !self.stepping.is_active() {
            return Ok(());
        }
        let handler = self.gp.gate().map(|gate| gate.handler);
        let debug = &mut self.debug;
        let ended = self
            .stepping
            .before_entry(vcpu, memory, debug, (pmu, core), handler)?;
        if ended {
            debug.want(self.gp.breakpoint().as_slice());
        }
        Ok(())
    }

    /// Prepares an entry of a vCPU with `pmu`: looks at the #GP handler if that is due, and
    /// hands KVM what has changed.
    pub(super) fn prepare(
        &mut self,
        guest: Guest<'_>,
        pmu: Option<&VcpuPmu>,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), VcpuError> {
        if let Some(pmu) = pmu {
            // One that was restored, or reset, has had no write.
            self.gp.programmed(pmu.is_programmed());
        }
        if self.gp.is_over() {
            self.end_watch(guest.vcpu, observer);
        }
        let stepped = is_stepped(pmu);
        if self.gp.is_due(stepped) {
            self.watch(guest, stepped, self.gp.walk_holds(), observer)?;
        }
        if !self.debug.is_idle() {
            self.debug.apply(guest.vcpu)?;
        }
        Ok(())
    }

    /// The vCPU goes into its `KVM_RUN` on `thread`.
    #[inline]
    pub(super) fn enter(
        &mut self,
        guest: Guest<'_>,
        pmu: Option<&VcpuPmu>,
        thread: KickTarget,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), VcpuError> {
        while !self.gp.enter(thread) {
            if self.gp.is_on() {
                let walked = self.gp.walk_holds();
                self.watch(guest, is_stepped(pmu), walked, observer)?;
                self.debug.apply(guest.vcpu)?;
            }
        }
        Ok(())
    }

    /// The vCPU is outside of its `KVM_RUN`. True if handlers were patched or
    /// restored meanwhile.
    #[inline]
    pub(super) fn leave(&mut self) -> bool {
        self.gp.leave()
    }

    /// When the guest has to be stopped for a look at the latest: at its debug registers,
    /// and if it `has_pmu`, at its handler.
    pub(super) fn deadline(&self, has_pmu: bool) -> Option<Tsc> {
        let debug = self.debug.deadline(self.stepping.is_active());
        let handler = has_pmu.then(|| self.gp.deadline());
        earliest(debug, handler.flatten())
    }

    /// For how long a look at the guest's own state is good.
    pub(super) fn fresh_for(&self) -> Ticks {
        self.debug.fresh_for()
    }

    /// An interrupt was sent whose handler is likely to read counters.
    pub(super) fn look_soon(&mut self) {
        self.gp.look_soon(self.debug.fresh_for());
    }

    /// Whether an instruction is under way that tells itself when it is over.
    pub(super) fn is_under_way(&self) -> bool {
        self.stepping.is_under_way()
    }

    /// The guest has set a counter up: whoever programs counters will read them.
    pub(super) fn sets_up(
        &mut self,
        guest: Guest<'_>,
        pmu: Option<&VcpuPmu>,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), VcpuError> {
        self.debug.note_busy();
        self.gp.programmed(true);
        self.watch(guest, is_stepped(pmu), self.debug.fresh_for(), observer)
    }

    /// Looks at the #GP handler, and has it watched. A way through page tables that was
    /// walked less than `walked` ago is trusted.
    #[inline(never)]
    fn watch(
        &mut self,
        Guest { vcpu, memory }: Guest<'_>,
        stepped: bool,
        walked: Ticks,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), VcpuError> {
        let before = self.gp.armed();
        // What the stepper waits for stays: without it a delivery goes by unseen. Its next
        // plan has the handler that is found now.
        let awaited = self.stepping.is_active();
        let awaited = awaited.then(|| self.debug.wanted().to_vec());
        let look = Look {
            stepped,
            walked,
            pause: self.debug.fresh_for(),
        };
        let looked = self.gp.arm(vcpu, memory, look)?;
        if looked == Looked::Now {
            self.debug.watch(vcpu, self.gp.breakpoint().as_slice())?;
        }
        let full = looked == Looked::Now && self.gp.is_news(self.debug.unplaced());
        if let Some(awaited) = awaited {
            self.debug.want(&awaited);
        }
        self.tell_armed(vcpu, before, observer);
        if full {
            self.tell_full(vcpu, observer);
        }
        Ok(())
    }

    /// The machine was reset: the handler is the guest's, until it programs a counter.
    #[cold]
    fn end_watch(&mut self, vcpu: &KvmVcpu, observer: &mut dyn TrapObserver) {
        let before = self.gp.armed();
        self.gp.end();
        self.debug.want(&[]);
        self.tell_armed(vcpu, before, observer);
    }

    #[cold]
    fn tell_armed(&self, vcpu: &KvmVcpu, before: Armed, observer: &mut dyn TrapObserver) {
        let armed = self.gp.armed();
        if armed != before {
            observer.event(vcpu.id(), TrapEvent::Armed(armed));
        }
    }

    /// The guest has just taken the last debug register.
    fn tell_full(&mut self, vcpu: &KvmVcpu, observer: &mut dyn TrapObserver) {
        self.gp.warn_full(vcpu.id());
        observer.event(vcpu.id(), TrapEvent::DebugRegistersFull);
    }

    /// While debug registers are ours: takes in what the guest did to its own.
    #[inline]
    pub(super) fn share_debug_registers(
        &mut self,
        vcpu: &KvmVcpu,
        pmu: &VcpuPmu,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), VcpuError> {
        if self.debug.is_active() {
            self.look_at_debug_registers(vcpu, pmu, observer)?;
        }
        Ok(())
    }

    #[cold]
    fn look_at_debug_registers(
        &mut self,
        vcpu: &KvmVcpu,
        pmu: &VcpuPmu,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), VcpuError> {
        let looked = self.debug.refresh_stale(vcpu)?;
        if self.stepping.is_active() {
            return Ok(());
        }
        if self.gp.is_news(self.debug.unplaced()) {
            self.tell_full(vcpu, observer);
        }
        if looked {
            self.debug.note_look(pmu.has_enabled());
        }
        Ok(())
    }

    /// A debug exit: a breakpoint or step of ours, or the guest's own #DB.
    #[inline(never)]
    pub(super) fn debug_exit(
        &mut self,
        guest: Guest<'_>,
        pmu: Option<OnCore<'_>>,
        exit: &DebugExit,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), VcpuError> {
        let vcpu = guest.vcpu;
        vcpu.expect_use();
        match (self.debug.on_exit(vcpu, exit)?, pmu) {
            (DebugEvent::Breakpoint(address), Some(pmu)) => {
                self.breakpoint(guest, pmu, address, observer)?;
            }
            (DebugEvent::Breakpoint(address), None) => self.debug.pass(vcpu, address)?,
            (DebugEvent::Guest(dr6), pmu) => {
                if let Some(pmu) = pmu {
                    // After a data breakpoint the instruction is complete, before
                    // an instruction breakpoint it has not begun.
                    self.step_stop(guest, pmu, StepStop::Exit)?;
                }
                self.stepping.abandon();
                observer.event(vcpu.id(), TrapEvent::GuestDebug { dr6 });
            }
            (DebugEvent::Stepped, Some(pmu)) => self.step_stop(guest, pmu, StepStop::Trap)?,
            (DebugEvent::Stepped, None) | (DebugEvent::Passed, _) => {}
        }
        Ok(())
    }

    /// One of our breakpoints: the #GP handler, or another that a step leads to.
    fn breakpoint(
        &mut self,
        guest: Guest<'_>,
        (pmu, core): OnCore<'_>,
        address: u64,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), VcpuError> {
        let Guest { vcpu, memory } = guest;
        let gate = self.gp.gate().filter(|gate| gate.handler == address);
        let Some(gate) = gate else {
            let woke = self.stepping.is_halted();
            self.step_stop(guest, (pmu, core), StepStop::Breakpoint(address))?;
            if !woke {
                self.debug.pass(vcpu, address)?;
            }
            return Ok(());
        };
        if self.stepping.is_active() {
            self.stepping
                .at_gp_handler(vcpu, memory, (pmu, core), &gate)?;
        }
        let (event, onward) = self.gp.on_breakpoint(vcpu, memory, (pmu, core))?;
        self.debug.go_on(vcpu, onward)?;
        match event {
            TrapEvent::Rdpmc {
                ring,
                outcome: ReadOutcome::Value(_),
                ..
            } if self.stepping.is_active() => {
                self.stepping
                    .emulated_rdpmc(vcpu, memory, ring, (pmu, core))?;
            }
            _ => self.step_stop(guest, (pmu, core), StepStop::Breakpoint(address))?,
        }
        observer.event(vcpu.id(), event);
        Ok(())
    }

    /// Reports to the stepper, if it is at work, that the guest stopped.
    #[cold]
    fn step_stop(
        &mut self,
        Guest { vcpu, memory }: Guest<'_>,
        pmu: OnCore<'_>,
        stop: StepStop,
    ) -> Result<(), VcpuError> {
        if self.stepping.is_active() {
            self.stepping
                .stopped(vcpu, memory, &mut self.debug, pmu, stop)?;
        }
        Ok(())
    }

    /// Any exit but a debug exit, which says itself where the step ended, ends a step; an
    /// entry that was prevented (`entered` is false) stepped nothing.
    #[inline]
    pub(super) fn end_step(
        &mut self,
        guest: Guest<'_>,
        pmu: Option<OnCore<'_>>,
        exit: VmExit,
        entered: bool,
    ) -> Result<(), VcpuError> {
        let stopped = match exit {
            VmExit::Debug(_) => false,
            VmExit::Interrupted => entered,
            _ => true,
        };
        match pmu {
            Some(pmu) if stopped && self.stepping.is_active() => {
                self.step_stop(guest, pmu, StepStop::Exit)
            }
            _ => Ok(()),
        }
    }

    /// OUT of one byte: perhaps the one that stands in the #GP handler. False if not.
    pub(super) fn out(
        &mut self,
        Guest { vcpu, memory }: Guest<'_>,
        pmu: Option<OnCore<'_>>,
        port: u16,
        observer: &mut dyn TrapObserver,
    ) -> Result<bool, VcpuError> {
        let Some(stop) = self.gp.at_out(vcpu, memory, port)? else {
            return Ok(false);
        };
        vcpu.at_handler();
        self.handler_out((vcpu, memory), pmu, stop, observer)?;
        Ok(true)
    }

    #[inline(never)]
    fn handler_out(
        &mut self,
        (vcpu, memory): (&KvmVcpu, &dyn GuestBytes),
        pmu: Option<OnCore<'_>>,
        stop: OutStop,
        observer: &mut dyn TrapObserver,
    ) -> Result<(), VcpuError> {
        vcpu.expect_use();
        let (event, onward) = GpWatch::on_out(vcpu, memory, stop, pmu)?;
        self.debug.go_on(vcpu, onward)?;
        observer.event(vcpu.id(), event);
        Ok(())
    }

    /// A store that KVM could not do. True if it was one to a page that is protected for a
    /// patch, and is done.
    #[cold]
    pub(super) fn stored(&self, address: u64, data: &[u8]) -> bool {
        self.gp.vm().store(address, data)
    }

    /// An access that KVM could not do, perhaps because it was a store to the page of
    /// a handler that is patched, or was until the exit (`changed`) or since: a store of
    /// another vCPU's may have opened it. It is then tried again.
    #[cold]
    pub(super) fn fault(&mut self, page: Option<u64>, changed: bool) -> Fault {
        if self.gp.written(page.map(page_of)) {
            Fault::Opened
        } else if changed || self.gp.has_news() {
            Fault::OpenedBefore
        } else {
            Fault::NotOurs
        }
    }
}

/// Why an access could not be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// Its page was protected for a patch, and is no more.
    Opened,
    /// Likewise, by somebody else.
    OpenedBefore,
    /// It has nothing to do with patches.
    NotOurs,
}

/// Whether instructions are counted one by one.
fn is_stepped(pmu: Option<&VcpuPmu>) -> bool {
    pmu.is_some_and(|pmu| pmu.needs().stepping)
}
