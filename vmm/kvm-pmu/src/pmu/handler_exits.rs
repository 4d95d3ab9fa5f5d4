//! Exits at the guest's #GP handler, where that is patched: the OUT that stands there,
//! and the guest's own stores to its page.

use pmu_virt::Ticks;

use super::{ExitOwner, Lent, SYNCED_EXITS, Traps};
use crate::error::{KvmPmuError, VcpuId};
use crate::gp_watch::{GpWatch, OutStop};
use crate::observe::{Armed, TrapEvent};
use crate::trap::page_of;
use crate::vcpu::VcpuAccess;

impl Traps {
    /// Looks at the #GP handler, and has it watched. A way through page tables that was
    /// walked less than `walked` ago is trusted.
    #[inline(never)]
    pub(super) fn watch_gp_handler(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        walked: Ticks,
    ) -> Result<(), KvmPmuError> {
        let stepped = self.pmu.as_ref().is_some_and(|pmu| pmu.needs().stepping);
        let before = self.gp.armed();
        let how = (stepped, walked);
        // What the stepper waits for stays: without it a delivery goes by unseen. Its next
        // plan has the handler that is found now.
        let awaited = self.stepping.is_active();
        let awaited = awaited.then(|| self.debug.wanted().to_vec());
        let full = self.gp.arm(vcpu, lent.memory, &mut self.debug, how)?;
        if let Some(awaited) = awaited {
            self.debug.want(&awaited);
        }
        self.tell_armed(vcpu, lent, before);
        if full {
            self.report_full(vcpu, lent);
        }
        Ok(())
    }

    /// The machine was reset: the handler is the guest's, until it programs a counter.
    #[cold]
    pub(super) fn end_watch(&mut self, vcpu: VcpuAccess<'_>, lent: &mut Lent<'_>) {
        let before = self.gp.armed();
        self.gp.end();
        self.gp.want(&mut self.debug);
        self.tell_armed(vcpu, lent, before);
    }

    #[cold]
    fn tell_armed(&self, vcpu: VcpuAccess<'_>, lent: &mut Lent<'_>, before: Armed) {
        let armed = self.gp.armed();
        if armed != before {
            lent.observer.event(vcpu.id(), TrapEvent::Armed(armed));
        }
    }

    /// The OUT in the #GP handler.
    #[inline(never)]
    pub(super) fn handler_out(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        stop: OutStop,
    ) -> Result<ExitOwner, KvmPmuError> {
        self.registers_wanted = SYNCED_EXITS;
        let pmu = self.pmu.as_mut().zip(lent.thread.counters_mut());
        let event = GpWatch::on_out(vcpu, lent.memory, &mut self.debug, stop, pmu)?;
        lent.observer.event(vcpu.id(), event);
        Ok(ExitOwner::Pmu)
    }

    /// A store that KVM could not do.
    #[cold]
    pub(super) fn handler_stored(
        &self,
        lent: &mut Lent<'_>,
        vcpu: VcpuId,
        (address, data): (u64, &[u8]),
    ) -> ExitOwner {
        if !self.gp.vm().store(address, data) {
            return ExitOwner::Vmm;
        }
        lent.observer.event(vcpu, TrapEvent::HandlerWritten);
        ExitOwner::Pmu
    }

    /// An access that KVM could not do, perhaps because it was a store to the page of
    /// a handler that is patched, or was until the exit (`changed`) or since: a store of
    /// another vCPU's may have opened it. It is tried again.
    #[cold]
    pub(super) fn handler_fault(
        &mut self,
        lent: &mut Lent<'_>,
        vcpu: VcpuId,
        page: Option<u64>,
        changed: bool,
    ) -> ExitOwner {
        if self.gp.written(page.map(page_of)) {
            lent.observer.event(vcpu, TrapEvent::HandlerWritten);
        } else if !changed && !self.gp.has_news() {
            return ExitOwner::Vmm;
        }
        ExitOwner::Pmu
    }
}
