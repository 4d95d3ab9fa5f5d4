//! RDMSR and WRMSR of the PMU's registers.

use arbiter::{Caller, Layer, PcrRegister};
use pmu_virt::{MsrIndex, ReadOutcome, Register, Ring, WriteOutcome};

use super::{Lent, SYNCED_EXITS, Traps};
use crate::error::{KvmPmuError, VcpuError};
use crate::observe::TrapEvent;
use crate::registers::VcpuAccess;
use crate::trap::Presented;

impl Traps {
    /// What a RDMSR reads, where that is `None` a #GP; `None` at all if the
    /// register is not the PMU's.
    pub(super) fn rdmsr(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        index: u32,
    ) -> Result<Option<Option<u64>>, KvmPmuError> {
        let msr = MsrIndex(index);
        let caller = self.msr_caller(vcpu, msr, false)?;
        let outcome = match &mut self.pmu {
            Some(pmu) => merged(vcpu, msr, pmu.rdmsr(msr, caller))?,
            None if is_among(&self.ranges, msr) => ReadOutcome::Gp,
            None => ReadOutcome::NotHandled,
        };
        if outcome == ReadOutcome::NotHandled && !is_among(&self.ranges, msr) {
            return Ok(None);
        }
        let value = match outcome {
            ReadOutcome::Value(value) => Some(value),
            ReadOutcome::Merge(_) | ReadOutcome::Gp | ReadOutcome::NotHandled => None,
        };
        let event = if is_secret(msr, false) {
            TrapEvent::Secret {
                msr,
                write: false,
                gp: value.is_none(),
            }
        } else {
            TrapEvent::MsrRead { msr, outcome }
        };
        lent.observer.event(vcpu.id(), event);
        Ok(Some(value))
    }

    /// Who performs an RDMSR or WRMSR, and with which cookie. Both are privileged:
    /// the processor checks CPL before the intercept. The registers are fetched
    /// only where one of them can matter.
    fn msr_caller(
        &mut self,
        vcpu: VcpuAccess<'_>,
        msr: MsrIndex,
        write: bool,
    ) -> Result<Caller, VcpuError> {
        let Some(pmu) = &self.pmu else {
            return Ok(Caller::legacy(Layer::GuestKernel));
        };
        let layer = pmu.layer(Ring::Kernel, vcpu.in_smm());
        if !pmu.takes_cookie(msr, write) {
            return Ok(Caller::legacy(layer));
        }
        // Drivers set a counter up with several such accesses.
        self.registers_wanted = SYNCED_EXITS;
        let Presented(presented) = Presented::now(&vcpu.get_regs()?, &vcpu.get_sregs()?);
        Ok(Caller { layer, presented })
    }

    /// Whether a WRMSR is done, and raises no #GP; `None` if the register is not the
    /// PMU's.
    pub(super) fn wrmsr(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        index: u32,
        value: u64,
    ) -> Result<Option<bool>, KvmPmuError> {
        let msr = MsrIndex(index);
        let caller = self.msr_caller(vcpu, msr, true)?;
        let outcome = match &mut self.pmu {
            Some(pmu) => match pmu.wrmsr(msr, value, caller) {
                WriteOutcome::Rest(rest) if takes_rest(vcpu, msr, rest)? => {
                    pmu.rest_taken(msr, value);
                    WriteOutcome::Done
                }
                WriteOutcome::Rest(_) => WriteOutcome::Gp,
                outcome => outcome,
            },
            None if is_among(&self.ranges, msr) => WriteOutcome::Gp,
            None => WriteOutcome::NotHandled,
        };
        if outcome == WriteOutcome::NotHandled && !is_among(&self.ranges, msr) {
            return Ok(None);
        }
        let done = outcome == WriteOutcome::Done;
        let event = if is_secret(msr, true) {
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
        lent.observer.event(vcpu.id(), event);
        if done && self.starts_counting(msr) {
            self.registers_wanted = SYNCED_EXITS;
            self.arm_rdpmc(vcpu, lent)?;
        }
        Ok(Some(done))
    }

    /// True for the registers that a guest writes before it reads counts: those
    /// that start a counter or give access to one, and the first steps towards it.
    fn starts_counting(&self, msr: MsrIndex) -> bool {
        if PcrRegister::contains(msr.0) {
            let register = PcrRegister::decode(msr.0);
            return matches!(
                register,
                Some(
                    PcrRegister::Select(_)
                        | PcrRegister::AccessKey(_)
                        | PcrRegister::Phase
                        | PcrRegister::Request
                )
            );
        }
        let register = self.pmu.as_ref().and_then(|pmu| pmu.model().decode(msr));
        matches!(
            register,
            Some(Register::Select(_) | Register::FixedControl | Register::GlobalControl)
        )
    }

    /// A guest that programs counters will read them: watch its #GP handler.
    fn arm_rdpmc(&mut self, vcpu: VcpuAccess<'_>, lent: &mut Lent<'_>) -> Result<(), KvmPmuError> {
        let full = self.gp.arm(vcpu, lent.memory, &mut self.debug)?;
        if full {
            // Once: a guest that takes and leaves the last one in turn must not
            // fill the host's log.
            if !std::mem::replace(&mut self.warned_full, true) {
                log::warn!(
                    "{}: the guest uses all four debug registers, its RDPMC will fault",
                    vcpu.id()
                );
            }
            lent.observer
                .event(vcpu.id(), TrapEvent::DebugRegistersFull);
        }
        Ok(())
    }
}

fn is_among(ranges: &[(u32, u32)], msr: MsrIndex) -> bool {
    let mut ranges = ranges.iter();
    ranges.any(|&(first, last)| (first..=last).contains(&msr.0))
}

/// The bits of an MSR that KVM has beside those of the PMU.
fn merged(
    vcpu: VcpuAccess<'_>,
    msr: MsrIndex,
    outcome: ReadOutcome,
) -> Result<ReadOutcome, VcpuError> {
    Ok(match outcome {
        ReadOutcome::Merge(bits) => ReadOutcome::Value(vcpu.read_msr(msr.0)?.unwrap_or(0) | bits),
        outcome => outcome,
    })
}

/// Whether KVM takes its bits of an MSR that it shares with the PMU. One that it
/// does not have takes zeros.
fn takes_rest(vcpu: VcpuAccess<'_>, msr: MsrIndex, rest: u64) -> Result<bool, VcpuError> {
    let taken = vcpu.write_msr(msr.0, rest)?;
    Ok(taken || rest == 0 && vcpu.read_msr(msr.0)?.is_none())
}

/// Whether the value of a register must not be seen in logs, traces and tests.
fn is_secret(msr: MsrIndex, write: bool) -> bool {
    let register = PcrRegister::decode(msr.0);
    if write {
        matches!(
            register,
            Some(PcrRegister::ManagementKey(_) | PcrRegister::AccessKey(_))
        )
    } else {
        matches!(register, Some(PcrRegister::Random))
    }
}
