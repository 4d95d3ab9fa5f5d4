//! Interrupts that a PMU raises: PMIs at overflows, and those that announce
//! notices of the reservations.

use kvm_bindings::{KVM_MP_STATE_HALTED, KVM_MP_STATE_RUNNABLE};
use kvm_ioctls::VmFd;
use pmu_virt::{PmiForwarded, PmiLine, PmiRequest, Tsc, Vendor};

use super::{Lent, Traps};
use crate::error::KvmPmuError;
use crate::observe::TrapEvent;
use crate::pmi::{self, Lvtpc};
use crate::vcpu::VcpuAccess;

/// The local APIC's part in a PMI, as of its overflow. The PMI itself is pending
/// in the PMU until it is sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct PmiRouting {
    lvtpc: Lvtpc,
    /// When its overflow was due, if the PMU knew.
    due: Option<Tsc>,
}

/// Whether a processor in KVM's `state` has had its start-up IPI.
fn has_started(state: u32) -> bool {
    matches!(state, KVM_MP_STATE_RUNNABLE | KVM_MP_STATE_HALTED)
}

/// The local APIC that KVM has, for one entry.
struct LapicLine<'a> {
    vcpu: VcpuAccess<'a>,
    vm: &'a VmFd,
    vendor: Vendor,
    /// When the overflow was due, if the PMU knows.
    due: Option<Tsc>,
    latched: &'a mut Option<PmiRouting>,
    /// For the observer.
    event: Option<TrapEvent>,
}

impl PmiLine for LapicLine<'_> {
    type Error = KvmPmuError;

    fn latch(&mut self, request: PmiRequest) -> Result<bool, KvmPmuError> {
        let (lvtpc, due) = (Lvtpc::read(self.vcpu)?, self.due);
        if let Some(delivery) = pmi::refusal(lvtpc) {
            self.event = Some(TrapEvent::Pmi {
                request,
                delivery,
                due,
            });
            return Ok(false);
        }
        *self.latched = lvtpc.map(|lvtpc| PmiRouting { lvtpc, due });
        Ok(true)
    }

    fn send(&mut self, request: PmiRequest) -> Result<bool, KvmPmuError> {
        let Some(PmiRouting { lvtpc, due }) = *self.latched else {
            return Ok(false);
        };
        let delivery = pmi::send(self.vcpu, self.vm, self.vendor, lvtpc)?;
        self.event = Some(TrapEvent::Pmi {
            request,
            delivery,
            due,
        });
        Ok(true)
    }
}

impl Traps {
    #[inline(never)]
    pub(super) fn forward_pmi(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        now: Tsc,
    ) -> Result<(), KvmPmuError> {
        let Some(pmu) = &mut self.pmu else {
            return Ok(());
        };
        let mut line = LapicLine {
            vcpu,
            vm: lent.vm,
            vendor: pmu.model().vendor(),
            due: self.due,
            latched: &mut self.pmi_routing,
            event: None,
        };
        let forwarded = pmu.interrupts_mut().forward(now, &mut line)?;
        let event = match forwarded {
            PmiForwarded::Nothing => None,
            PmiForwarded::Late => Some(TrapEvent::PmiLate),
            PmiForwarded::Dropped | PmiForwarded::Sent => line.event,
        };
        if forwarded == PmiForwarded::Sent {
            self.gp.look_soon(self.debug.fresh_for());
        }
        if let Some(event) = event {
            lent.observer.event(vcpu.id(), event);
        }
        Ok(())
    }

    /// Raises the interrupts that announce notices of the reservations: an SMI for
    /// firmware that has left code in SMM. A notice whose interrupt finds the local APIC
    /// off stays in the guest's queue.
    #[cold]
    pub(super) fn forward_notices(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        while let Some(vector) = self
            .pmu
            .as_mut()
            .and_then(|pmu| pmu.claims_mut().take_notice())
        {
            let sent = pmi::interrupt(vcpu, lent.vm, vector)?;
            let event = TrapEvent::Notice { vector, sent };
            lent.observer.event(vcpu.id(), event);
        }
        let Some(pmu) = self.pmu.as_mut().filter(|pmu| pmu.claims().wants_smi()) else {
            return Ok(());
        };
        // Code in SMM reads all notices before it leaves. KVM never halts a processor that
        // waits for its start and has an SMI pending.
        if !vcpu.in_smm() && has_started(vcpu.get_mp_state()?.mp_state) {
            vcpu.smi()?;
            pmu.claims_mut().smi_sent();
        }
        Ok(())
    }
}
