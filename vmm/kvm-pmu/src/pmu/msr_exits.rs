//! RDMSR and WRMSR of the PMU's registers.
//!
//! KVM's local APIC has no extended vector table. Its registers are the PMU's, as far as
//! the guest gets at them: in x2APIC mode, where KVM refuses them and a VM that wants to
//! know ([`MsrFilter::with_invalid`](crate::MsrFilter::with_invalid)) gets an exit.

use arbiter::Caller;
use guest_exit::Answer;
use pmu_virt::ibs::X2APIC_MSRS;
use pmu_virt::{MsrIndex, MsrRead, MsrWrite, ReadOutcome, Ring, VcpuPmu, WriteOutcome};

use super::OnCore;
use crate::error::VcpuError;
use crate::observe::TrapEvent;
use crate::pmi;
use crate::trap::Presented;
use crate::vcpu::KvmVcpu;

/// MSRs that are a PMU's, whoever's model, as inclusive ranges.
#[derive(Debug)]
pub(super) struct MsrTraps {
    ranges: Vec<(u32, u32)>,
}

/// An access to a register of a PMU's, done.
#[derive(Debug)]
pub(super) struct MsrAccess {
    /// What the guest gets.
    pub(super) answer: Answer,
    /// What is reported.
    pub(super) event: TrapEvent,
    /// It set up a counter, which is likely to be read.
    pub(super) sets_up: bool,
}

impl MsrTraps {
    pub(super) fn new() -> Self {
        Self {
            ranges: pmu_virt::all_pmu_msr_ranges(),
        }
    }

    fn contains(&self, msr: MsrIndex) -> bool {
        let mut ranges = self.ranges.iter();
        ranges.any(|&(first, last)| (first..=last).contains(&msr.0))
    }

    /// RDMSR of `index`; `None`: the register is not the PMU's.
    pub(super) fn rdmsr(
        &self,
        vcpu: &KvmVcpu,
        pmu: Option<OnCore<'_>>,
        index: u32,
    ) -> Result<Option<MsrAccess>, VcpuError> {
        let msr = MsrIndex(index);
        let MsrRead { outcome, secret } = match pmu {
            Some((pmu, _)) if is_absent_in_xapic(vcpu, pmu, msr)? => return Ok(None),
            Some((pmu, core)) => {
                let caller = caller(vcpu, pmu, msr, false)?;
                pmu.rdmsr(core, msr, caller)
            }
            None if self.contains(msr) => MsrRead::without_pmu(msr),
            None => return Ok(None),
        };
        if outcome == ReadOutcome::NotHandled && !self.contains(msr) {
            return Ok(None);
        }
        let outcome = merged(vcpu, msr, outcome)?;
        let value = match outcome {
            ReadOutcome::Value(value) => Some(value),
            ReadOutcome::Merge { .. } | ReadOutcome::Gp | ReadOutcome::NotHandled => None,
        };
        let event = if secret {
            TrapEvent::Secret {
                msr,
                write: false,
                gp: value.is_none(),
            }
        } else {
            TrapEvent::MsrRead { msr, outcome }
        };
        Ok(Some(MsrAccess {
            answer: value.map_or(Answer::MsrFault, Answer::Msr),
            event,
            sets_up: false,
        }))
    }

    /// WRMSR of `value` to `index`; `None`: the register is not the PMU's.
    pub(super) fn wrmsr(
        &self,
        vcpu: &KvmVcpu,
        mut pmu: Option<OnCore<'_>>,
        index: u32,
        value: u64,
    ) -> Result<Option<MsrAccess>, VcpuError> {
        let msr = MsrIndex(index);
        let written = match &mut pmu {
            Some((pmu, _)) if is_absent_in_xapic(vcpu, pmu, msr)? => return Ok(None),
            Some((pmu, core)) => {
                let caller = caller(vcpu, pmu, msr, true)?;
                pmu.wrmsr(core, msr, value, caller)
            }
            None if self.contains(msr) => MsrWrite::without_pmu(msr),
            None => return Ok(None),
        };
        if written.outcome == WriteOutcome::NotHandled && !self.contains(msr) {
            return Ok(None);
        }
        let outcome = match (written.rest, &mut pmu) {
            (Some(rest), Some((pmu, _))) => {
                if takes_rest(vcpu, msr, rest)? {
                    pmu.rest_taken(msr, value);
                    WriteOutcome::Done
                } else {
                    WriteOutcome::Gp
                }
            }
            _ => written.outcome,
        };
        let done = outcome == WriteOutcome::Done;
        let event = if written.secret {
            TrapEvent::Secret {
                msr,
                write: true,
                gp: !done,
            }
        } else {
            TrapEvent::MsrWrite {
                msr,
                value,
                outcome,
            }
        };
        // What is set while nothing counts is set to be read. While something does, it is
        // often the next period of a counter, and the handler is looked at otherwise.
        let set = written.sets_count && !pmu.is_some_and(|(pmu, _)| pmu.has_enabled());
        Ok(Some(MsrAccess {
            answer: if done { Answer::Done } else { Answer::MsrFault },
            event,
            sets_up: written.starts_counting || set,
        }))
    }
}

/// Who performs an RDMSR or WRMSR, and with which cookie. Both are privileged:
/// the processor checks CPL before the intercept. The registers are fetched
/// only where one of them can matter.
fn caller(vcpu: &KvmVcpu, pmu: &VcpuPmu, msr: MsrIndex, write: bool) -> Result<Caller, VcpuError> {
    let layer = pmu.claims().layer(Ring::Kernel, vcpu.in_smm());
    if !pmu.claims().takes_cookie(msr, write) {
        return Ok(Caller::legacy(layer));
    }
    // Drivers set a counter up with several such accesses.
    vcpu.expect_use();
    let Presented(presented) = Presented::now(&vcpu.get_regs()?, &vcpu.get_sregs()?);
    Ok(Caller { layer, presented })
}

/// Whether an access to `msr` is one to a register that is not there: those of the
/// x2APIC outside of its mode.
fn is_absent_in_xapic(vcpu: &KvmVcpu, pmu: &VcpuPmu, msr: MsrIndex) -> Result<bool, VcpuError> {
    let is_ibs = pmu.model().ibs() != 0 && X2APIC_MSRS.contains(&msr.0);
    Ok(is_ibs && !pmi::is_x2apic(&vcpu.get_sregs()?))
}

/// The bits of an MSR that KVM has beside those of the PMU.
fn merged(vcpu: &KvmVcpu, msr: MsrIndex, outcome: ReadOutcome) -> Result<ReadOutcome, VcpuError> {
    Ok(match outcome {
        ReadOutcome::Merge { ours, value } => {
            let other = vcpu.read_msr(msr.0)?.unwrap_or(0) & !ours;
            ReadOutcome::Value(other | value)
        }
        outcome => outcome,
    })
}

/// Whether KVM takes its bits of an MSR that it shares with the PMU. One that it
/// does not have takes zeros.
fn takes_rest(vcpu: &KvmVcpu, msr: MsrIndex, rest: u64) -> Result<bool, VcpuError> {
    let taken = vcpu.write_msr(msr.0, rest)?;
    Ok(taken || rest == 0 && vcpu.read_msr(msr.0)?.is_none())
}
