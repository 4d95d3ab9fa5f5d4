//! Interrupts that a PMU raises: PMIs at overflows, and those that announce
//! notices of the reservations.

use kvm_bindings::{KVM_MP_STATE_HALTED, KVM_MP_STATE_RUNNABLE};
use pmu_virt::{PmiDue, Tsc};

use super::{Lent, Traps};
use crate::error::KvmPmuError;
use crate::observe::TrapEvent;
use crate::pmi::{self, Lvtpc};
use crate::registers::VcpuAccess;

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
        let vendor = pmu.model().vendor();
        if let Some(request) = pmu.interrupts().to_route() {
            let (lvtpc, due) = (Lvtpc::read(vcpu)?, self.due);
            if let Some(delivery) = pmi::refusal(lvtpc) {
                pmu.interrupts_mut().dropped();
                let event = TrapEvent::Pmi {
                    request,
                    delivery,
                    due,
                };
                lent.observer.event(vcpu.id(), event);
                return Ok(());
            }
            self.pmi_routing = lvtpc.map(|lvtpc| PmiRouting { lvtpc, due });
        }
        let request = match pmu.interrupts_mut().due(now) {
            PmiDue::Nothing => return Ok(()),
            PmiDue::Late => {
                lent.observer.event(vcpu.id(), TrapEvent::PmiLate);
                return Ok(());
            }
            PmiDue::Send(request) => request,
        };
        let Some(PmiRouting { lvtpc, due }) = self.pmi_routing else {
            return Ok(());
        };
        let delivery = pmi::send(vcpu, lent.vm, vendor, lvtpc)?;
        pmu.interrupts_mut().sent();
        self.gp.look_soon(self.debug.fresh_for());
        let event = TrapEvent::Pmi {
            request,
            delivery,
            due,
        };
        lent.observer.event(vcpu.id(), event);
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
