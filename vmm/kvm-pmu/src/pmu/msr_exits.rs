//! RDMSR and WRMSR of the PMU's registers.
//!
//! KVM's local APIC has no extended vector table. Its registers are the PMU's, as far as
//! the guest gets at them: in x2APIC mode, where KVM refuses them and a VM that wants to
//! know ([`MsrFilter::with_invalid`](crate::MsrFilter::with_invalid)) gets an exit.

use arbiter::Caller;
use guest_exit::Answer;
use pmu_virt::ibs::X2APIC_MSRS;
use pmu_virt::{CorePmu, MsrIndex, MsrRead, MsrWrite, ReadOutcome, Ring, VcpuPmu, WriteOutcome};

use crate::error::VcpuError;
use crate::observe::TrapEvent;
use crate::pmi;
use crate::trap::Presented;
use crate::vcpu::KvmVcpu;

/// A stopped vCPU, of whatever engine: what an access to an MSR of its PMU depends on beside
/// the PMU.
pub trait MsrHolder {
    /// The vCPU could not be asked.
    type Error;

    /// It is in system management mode.
    fn in_smm(&self) -> bool;

    /// Its local APIC is in x2APIC mode.
    ///
    /// # Errors
    /// The vCPU could not be asked.
    fn is_x2apic(&self) -> Result<bool, Self::Error>;

    /// The cookie that its registers present (`docs/reference/pcr.md`, "Presenting a
    /// cookie"). It may be a secret.
    ///
    /// # Errors
    /// The vCPU could not be asked.
    fn presented(&self) -> Result<u64, Self::Error>;

    /// The processor's own value of an MSR, of which a part is the PMU's; `None`: it has no
    /// such register.
    ///
    /// # Errors
    /// The vCPU could not be asked.
    fn read_own(&self, msr: MsrIndex) -> Result<Option<u64>, Self::Error>;

    /// Writes the processor's own part of an MSR; false if the processor does not take it.
    ///
    /// # Errors
    /// The vCPU could not be asked.
    fn write_own(&mut self, msr: MsrIndex, value: u64) -> Result<bool, Self::Error>;
}

/// KVM's.
pub(super) struct OnKvm<'a>(pub(super) &'a KvmVcpu);

impl MsrHolder for OnKvm<'_> {
    type Error = VcpuError;

    fn in_smm(&self) -> bool {
        self.0.in_smm()
    }

    fn is_x2apic(&self) -> Result<bool, VcpuError> {
        Ok(pmi::is_x2apic(&self.0.get_sregs()?))
    }

    fn presented(&self) -> Result<u64, VcpuError> {
        // Drivers set a counter up with several such accesses.
        self.0.expect_use();
        let Presented(presented) = Presented::now(&self.0.get_regs()?, &self.0.get_sregs()?);
        Ok(presented)
    }

    fn read_own(&self, msr: MsrIndex) -> Result<Option<u64>, VcpuError> {
        self.0.read_msr(msr.0)
    }

    fn write_own(&mut self, msr: MsrIndex, value: u64) -> Result<bool, VcpuError> {
        self.0.write_msr(msr.0, value)
    }
}

/// MSRs that are a PMU's, whoever's model, as inclusive ranges.
#[derive(Debug)]
pub struct MsrTraps {
    ranges: Vec<(u32, u32)>,
}

/// An access to a register of a PMU's, done.
#[derive(Debug)]
pub struct MsrAccess {
    /// What the guest gets.
    pub answer: Answer,
    /// What is reported.
    pub event: TrapEvent,
    /// It set up a counter, which is likely to be read.
    pub sets_up: bool,
}

impl Default for MsrTraps {
    fn default() -> Self {
        Self::new()
    }
}

impl MsrTraps {
    /// Those of any PMU.
    #[must_use]
    pub fn new() -> Self {
        Self {
            ranges: pmu_virt::all_pmu_msr_ranges(),
        }
    }

    fn contains(&self, msr: MsrIndex) -> bool {
        let mut ranges = self.ranges.iter();
        ranges.any(|&(first, last)| (first..=last).contains(&msr.0))
    }

    /// RDMSR of `index`; `None`: the register is not the PMU's.
    ///
    /// # Errors
    /// Those of `vcpu`.
    pub fn rdmsr<H: MsrHolder>(
        &self,
        vcpu: &H,
        pmu: Option<(&mut VcpuPmu, &mut CorePmu)>,
        index: u32,
    ) -> Result<Option<MsrAccess>, H::Error> {
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
    ///
    /// # Errors
    /// Those of `vcpu`.
    pub fn wrmsr<H: MsrHolder>(
        &self,
        vcpu: &mut H,
        mut pmu: Option<(&mut VcpuPmu, &mut CorePmu)>,
        index: u32,
        value: u64,
    ) -> Result<Option<MsrAccess>, H::Error> {
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
fn caller<H: MsrHolder>(
    vcpu: &H,
    pmu: &VcpuPmu,
    msr: MsrIndex,
    write: bool,
) -> Result<Caller, H::Error> {
    let layer = pmu.claims().layer(Ring::Kernel, vcpu.in_smm());
    if !pmu.claims().takes_cookie(msr, write) {
        return Ok(Caller::legacy(layer));
    }
    let presented = vcpu.presented()?;
    Ok(Caller { layer, presented })
}

/// Whether an access to `msr` is one to a register that is not there: those of the
/// x2APIC outside of its mode.
fn is_absent_in_xapic<H: MsrHolder>(
    vcpu: &H,
    pmu: &VcpuPmu,
    msr: MsrIndex,
) -> Result<bool, H::Error> {
    let is_ibs = pmu.model().ibs() != 0 && X2APIC_MSRS.contains(&msr.0);
    Ok(is_ibs && !vcpu.is_x2apic()?)
}

/// The bits of an MSR that the processor has beside those of the PMU.
fn merged<H: MsrHolder>(
    vcpu: &H,
    msr: MsrIndex,
    outcome: ReadOutcome,
) -> Result<ReadOutcome, H::Error> {
    Ok(match outcome {
        ReadOutcome::Merge { ours, value } => {
            let other = vcpu.read_own(msr)?.unwrap_or(0) & !ours;
            ReadOutcome::Value(other | value)
        }
        outcome => outcome,
    })
}

/// Whether the processor takes its bits of an MSR that it shares with the PMU. One that it
/// does not have takes zeros.
fn takes_rest<H: MsrHolder>(vcpu: &mut H, msr: MsrIndex, rest: u64) -> Result<bool, H::Error> {
    let taken = vcpu.write_own(msr, rest)?;
    Ok(taken || rest == 0 && vcpu.read_own(msr)?.is_none())
}
