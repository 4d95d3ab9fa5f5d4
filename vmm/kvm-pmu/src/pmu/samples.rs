//! Instruction-based sampling: where the guest stands when a sample is due, and the
//! interrupt that announces it.
//!
//! KVM's local APIC has no extended vector table. Its registers are the PMU's, as far as
//! the guest gets at them: in x2APIC mode, where KVM refuses them and a VM that wants to
//! know ([`MsrFilter::with_invalid`](crate::MsrFilter::with_invalid)) gets an exit.

use pmu_virt::ibs::{OpSample, X2APIC_MSRS};
use pmu_virt::{IbsDue, IbsKind, IbsSample, MsrIndex};

use super::{Lent, Traps};
use crate::error::{KvmPmuError, VcpuError};
use crate::observe::TrapEvent;
use crate::pmi;
use crate::step_samples::fetched;
use crate::time;
use crate::trap::CpuContext;
use crate::vcpu::VcpuAccess;

impl Traps {
    /// Takes the samples that are due, of a guest that stands where it was found: an op
    /// was executed somewhere before, and the fetch is that of the instruction to come. In
    /// SMM that is the firmware's, and the samples wait.
    #[inline]
    pub(super) fn sample_ibs(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        match &self.pmu {
            _ if vcpu.in_smm() => Ok(()),
            // The instruction that is being stepped tells itself when it is over.
            Some(pmu) if pmu.needs().stepping && self.stepping.is_under_way() => Ok(()),
            Some(pmu) if pmu.ibs_due().is_some() => self.take_samples(vcpu, lent),
            _ => Ok(()),
        }
    }

    #[cold]
    fn take_samples(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        let (regs, sregs) = (vcpu.get_regs()?, vcpu.get_sregs()?);
        let context = CpuContext {
            regs: &regs,
            sregs: &sregs,
            memory: lent.memory,
        };
        let rip = context.code_at(regs.rip);
        while let Some(pmu) = &mut self.pmu
            && let Some(kind) = pmu.ibs_due()
        {
            let sample = match kind {
                IbsKind::Op => IbsSample::Op(OpSample::Near { rip }),
                IbsKind::Fetch => IbsSample::Fetch(fetched(&context, rip)),
            };
            pmu.ibs_sampled(lent.thread.counters_mut(), sample);
        }
        Ok(())
    }

    /// Sends the interrupt of samples, if it is due.
    pub(super) fn forward_samples(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
    ) -> Result<(), KvmPmuError> {
        let due = self.pmu.as_mut().map(|pmu| pmu.ibs_interrupt(time::now()));
        match due {
            Some(IbsDue::Send { vector }) => {
                pmi::send_extended(vcpu, lent.vm, vector)?;
                self.gp.look_soon(self.debug.fresh_for());
            }
            Some(IbsDue::Late) => lent.observer.event(vcpu.id(), TrapEvent::PmiLate),
            Some(IbsDue::Nothing) | None => {}
        }
        Ok(())
    }

    /// Whether an access to `msr` is one to a register that is not there: those of the
    /// x2APIC outside of its mode.
    pub(super) fn is_absent_in_xapic(
        &self,
        vcpu: VcpuAccess<'_>,
        msr: MsrIndex,
    ) -> Result<bool, VcpuError> {
        let has_ibs = self.pmu.as_ref().is_some_and(|pmu| pmu.model().ibs() != 0);
        Ok(has_ibs && X2APIC_MSRS.contains(&msr.0) && !pmi::is_x2apic(&vcpu.get_sregs()?))
    }
}
