//! RDMSR and WRMSR of the PMU's registers.

use arbiter::{Caller, Layer};
use pmu_virt::{MsrIndex, MsrRead, MsrWrite, ReadOutcome, Ring, VcpuPmu, WriteOutcome};

use super::{Lent, MsrAnswer, SYNCED_EXITS, Traps};
use crate::error::{KvmPmuError, VcpuError};
use crate::observe::TrapEvent;
use crate::trap::Presented;
use crate::vcpu::VcpuAccess;

impl Traps {
    pub(super) fn rdmsr(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        index: u32,
    ) -> Result<MsrAnswer, KvmPmuError> {
        let msr = MsrIndex(index);
        if self.is_absent_in_xapic(vcpu, msr)? {
            return Ok(MsrAnswer::NotOurs);
        }
        let caller = self.msr_caller(vcpu, msr, false)?;
        let MsrRead { outcome, secret } = match (&mut self.pmu, lent.thread.counters_mut()) {
            (Some(pmu), Some(core)) => pmu.rdmsr(core, msr, caller),
            _ if is_among(&self.ranges, msr) => MsrRead::without_pmu(msr),
            _ => return Ok(MsrAnswer::NotOurs),
        };
        if outcome == ReadOutcome::NotHandled && !is_among(&self.ranges, msr) {
            return Ok(MsrAnswer::NotOurs);
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
        lent.observer.event(vcpu.id(), event);
        Ok(value.map_or(MsrAnswer::Gp, MsrAnswer::Done))
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
        let layer = pmu.claims().layer(Ring::Kernel, vcpu.in_smm());
        if !pmu.claims().takes_cookie(msr, write) {
            return Ok(Caller::legacy(layer));
        }
        // Drivers set a counter up with several such accesses.
        self.registers_wanted = SYNCED_EXITS;
        let Presented(presented) = Presented::now(&vcpu.get_regs()?, &vcpu.get_sregs()?);
        Ok(Caller { layer, presented })
    }

    pub(super) fn wrmsr(
        &mut self,
        vcpu: VcpuAccess<'_>,
        lent: &mut Lent<'_>,
        index: u32,
        value: u64,
    ) -> Result<MsrAnswer, KvmPmuError> {
        let msr = MsrIndex(index);
        if self.is_absent_in_xapic(vcpu, msr)? {
            return Ok(MsrAnswer::NotOurs);
        }
        let caller = self.msr_caller(vcpu, msr, true)?;
        let written = match (&mut self.pmu, lent.thread.counters_mut()) {
            (Some(pmu), Some(core)) => pmu.wrmsr(core, msr, value, caller),
            _ if is_among(&self.ranges, msr) => MsrWrite::without_pmu(msr),
            _ => return Ok(MsrAnswer::NotOurs),
        };
        if written.outcome == WriteOutcome::NotHandled && !is_among(&self.ranges, msr) {
            return Ok(MsrAnswer::NotOurs);
        }
        let outcome = match (written.rest, &mut self.pmu) {
            (Some(rest), Some(pmu)) => {
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
        lent.observer.event(vcpu.id(), event);
        // What is set while nothing counts is set to be read. While something does, it is
        // often the next period of a counter, and the handler is looked at otherwise.
        let set = written.sets_count && !self.pmu.as_ref().is_some_and(VcpuPmu::has_enabled);
        if written.starts_counting || set {
            self.registers_wanted = SYNCED_EXITS;
            self.idle_looks = 0;
            self.gp.programmed(true);
            // Whoever programs counters will read them.
            self.watch_gp_handler(vcpu, lent, self.debug.fresh_for())?;
        }
        Ok(if done {
            MsrAnswer::Done(0)
        } else {
            MsrAnswer::Gp
        })
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
        ReadOutcome::Merge { ours, value } => {
            let other = vcpu.read_msr(msr.0)?.unwrap_or(0) & !ours;
            ReadOutcome::Value(other | value)
        }
        outcome => outcome,
    })
}

/// Whether KVM takes its bits of an MSR that it shares with the PMU. One that it
/// does not have takes zeros.
fn takes_rest(vcpu: VcpuAccess<'_>, msr: MsrIndex, rest: u64) -> Result<bool, VcpuError> {
    let taken = vcpu.write_msr(msr.0, rest)?;
    Ok(taken || rest == 0 && vcpu.read_msr(msr.0)?.is_none())
}
