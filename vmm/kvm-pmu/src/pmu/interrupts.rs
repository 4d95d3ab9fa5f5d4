//! Interrupts that a PMU raises: PMIs at overflows, those that announce samples of IBS,
//! and those that announce notices of the reservations.

use kvm_bindings::{KVM_MP_STATE_HALTED, KVM_MP_STATE_RUNNABLE};
use pmu_virt::{IbsDue, PmiForwarded, PmiLine, PmiRequest, Tsc, VcpuPmu, Vendor};

use crate::error::KvmPmuError;
use crate::observe::{TrapEvent, TrapObserver};
use crate::pmi::{self, ApicPmi};
use crate::vcpu::KvmVcpu;

/// The way of the PMI that is pending in the PMU, from its overflow on.
#[derive(Debug, Default)]
pub(super) struct PmiSender {
    latched: Option<Latched>,
}

/// The local APIC's part in a PMI, as of its overflow. The PMI itself is pending
/// in the PMU until it is sent.
#[derive(Debug, Clone, Copy)]
struct Latched {
    apic: ApicPmi,
    /// When its overflow was due, if the PMU knew.
    due: Option<Tsc>,
}

/// The local APIC that KVM has, for one entry.
struct LapicLine<'a> {
    vcpu: &'a KvmVcpu,
    vendor: Vendor,
    /// When the overflow was due, if the PMU knows.
    due: Option<Tsc>,
    latched: &'a mut Option<Latched>,
    /// For the observer.
    event: Option<TrapEvent>,
}

impl PmiLine for LapicLine<'_> {
    type Error = KvmPmuError;

    fn latch(&mut self, request: PmiRequest) -> Result<bool, KvmPmuError> {
        let (apic, due) = (ApicPmi::read(self.vcpu)?, self.due);
        if let Some(delivery) = pmi::refusal(apic) {
            self.event = Some(TrapEvent::Pmi {
                request,
                delivery,
                due,
            });
            return Ok(false);
        }
        *self.latched = apic.map(|apic| Latched { apic, due });
        Ok(true)
    }

    fn send(&mut self, request: PmiRequest) -> Result<bool, KvmPmuError> {
        let Some(Latched { apic, due }) = *self.latched else {
            return Ok(false);
        };
        let delivery = apic.send(self.vcpu, self.vendor)?;
        self.event = Some(TrapEvent::Pmi {
            request,
            delivery,
            due,
        });
        Ok(true)
    }
}

impl PmiSender {
    /// Sends the PMI that is pending in `pmu`, if it may go at `now`; `due` is when the
    /// overflow was, if the PMU knew at the entry. What became of it, and what of that is
    /// reported.
    #[inline(never)]
    pub(super) fn forward(
        &mut self,
        vcpu: &KvmVcpu,
        pmu: &mut VcpuPmu,
        now: Tsc,
        due: Option<Tsc>,
    ) -> Result<(PmiForwarded, Option<TrapEvent>), KvmPmuError> {
        let mut line = LapicLine {
            vcpu,
            vendor: pmu.model().vendor(),
            due,
            latched: &mut self.latched,
            event: None,
        };
        let forwarded = pmu.interrupts_mut().forward(now, &mut line)?;
        let event = match forwarded {
            PmiForwarded::Nothing => None,
            PmiForwarded::Late => Some(TrapEvent::PmiLate),
            PmiForwarded::Dropped | PmiForwarded::Sent => line.event,
        };
        Ok((forwarded, event))
    }
}

/// Sends the interrupt of samples, if it is due. KVM's local APIC has no extended vector
/// table: what the guest has there is the PMU's.
pub(super) fn forward_samples(
    vcpu: &KvmVcpu,
    pmu: &mut VcpuPmu,
    now: Tsc,
) -> Result<IbsDue, KvmPmuError> {
    let due = pmu.ibs_interrupt(now);
    if let IbsDue::Send { vector } = due {
        pmi::send_extended(vcpu, vector)?;
    }
    Ok(due)
}

/// Raises the interrupts that announce notices of the reservations: an SMI for
/// firmware that has left code in SMM. A notice whose interrupt finds the local APIC
/// off stays in the guest's queue.
#[cold]
pub(super) fn forward_notices(
    vcpu: &KvmVcpu,
    pmu: &mut VcpuPmu,
    observer: &mut dyn TrapObserver,
) -> Result<(), KvmPmuError> {
    while let Some(vector) = pmu.claims_mut().take_notice() {
        let sent = pmi::interrupt(vcpu, vector)?;
        let event = TrapEvent::Notice { vector, sent };
        observer.event(vcpu.id(), event);
    }
    // Code in SMM reads all notices before it leaves. KVM never halts a processor that
    // waits for its start and has an SMI pending.
    if pmu.claims().wants_smi() && !vcpu.in_smm() && has_started(vcpu.get_mp_state()?.mp_state) {
        vcpu.smi()?;
        pmu.claims_mut().smi_sent();
    }
    Ok(())
}

/// Whether a processor in KVM's `state` has had its start-up IPI.
fn has_started(state: u32) -> bool {
    matches!(state, KVM_MP_STATE_RUNNABLE | KVM_MP_STATE_HALTED)
}
