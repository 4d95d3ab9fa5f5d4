//! What each exit leads to.

use arbiter::{Caller, Layer};
use pmu_virt::{MsrIndex, MsrRead, MsrWrite, ReadOutcome, Ring, WriteOutcome};

use super::end::VcpuEnd;
use super::kick::Seat;
use super::observe::TrapEvent;
use super::run::{Core, SYNCED_EXITS, VcpuFailure};
use crate::devices::DeviceOutcome;
use crate::kvm::{Answer, InternalError, KvmVcpu, VmExit};
use crate::trap::{Presented, StepStop};

impl Core {
    /// One line per kind of exit.
    pub(super) fn handle(
        &mut self,
        kvm: &mut KvmVcpu,
        seat: &mut Seat,
        exit: VmExit,
    ) -> Result<Option<VcpuEnd>, VcpuFailure> {
        if !matches!(exit, VmExit::Debug(_)) {
            self.step_stop(kvm, seat, StepStop::Exit)?;
        }
        match exit {
            VmExit::Rdmsr { index } => self.rdmsr(kvm, seat, MsrIndex(index))?,
            VmExit::Wrmsr { index, value } => self.wrmsr(kvm, seat, MsrIndex(index), value)?,
            VmExit::Debug(debug) => self.debug_exit(kvm, seat, &debug)?,
            VmExit::Interrupted => {}
            VmExit::IoIn { port, width, len } => {
                let mut data = vec![0xff; len];
                self.platform.port_read(port, width, &mut data);
                kvm.answer(&Answer::Io(data));
            }
            VmExit::IoOut { port, width, data } => {
                return Ok(match self.platform.port_write(port, width, &data) {
                    DeviceOutcome::Continue => None,
                    DeviceOutcome::Exit(end) => Some(VcpuEnd::Guest(end)),
                });
            }
            VmExit::MmioRead { address, len } => {
                let mut data = [0xff; 8];
                self.platform.mmio_read(address, &mut data[..len]);
                kvm.answer(&Answer::Mmio(data));
            }
            VmExit::MmioWrite { address, data, len } => {
                self.platform.mmio_write(address, &data[..len]);
            }
            VmExit::SystemEvent { kind } => {
                return Ok(Some(VcpuEnd::Stuck(format!(
                    "KVM reports system event {kind}, which no x86 guest of ours can cause"
                ))));
            }
            VmExit::Shutdown => {
                // kvm_amd has reset the vCPU by now.
                const RESET_RIP: u64 = 0xfff0;
                let rip = kvm.get_regs()?.rip;
                return Ok(Some(VcpuEnd::TripleFault {
                    rip: (rip != RESET_RIP).then_some(rip),
                }));
            }
            VmExit::Halted => {
                return Ok(Some(VcpuEnd::Stuck(
                    "HLT exited to the VMM: this machine has no in-kernel irqchip".to_owned(),
                )));
            }
            VmExit::InternalError(error) => {
                return Ok(Some(VcpuEnd::Stuck(describe_internal_error(kvm, &error))));
            }
            VmExit::FailEntry { reason } => {
                return Ok(Some(VcpuEnd::Stuck(format!(
                    "the processor refused the guest's state (hardware reason {reason:#x})"
                ))));
            }
            VmExit::Unexpected { what } => {
                return Ok(Some(VcpuEnd::Stuck(format!("unexpected exit: {what}"))));
            }
        }
        Ok(None)
    }

    fn rdmsr(
        &mut self,
        kvm: &mut KvmVcpu,
        seat: &mut Seat,
        msr: MsrIndex,
    ) -> Result<(), VcpuFailure> {
        let caller = self.msr_caller(kvm, msr, false)?;
        let MsrRead { outcome, secret } = match (&mut self.pmu, &mut seat.pmu) {
            (Some(pmu), Some(core)) => pmu.rdmsr(core, msr, caller),
            _ => MsrRead::without_pmu(msr),
        };
        let outcome = merged(kvm, msr, outcome)?;
        kvm.answer(&match outcome {
            ReadOutcome::Value(value) => Answer::Msr(value),
            ReadOutcome::Merge(_) | ReadOutcome::Gp | ReadOutcome::NotHandled => Answer::MsrFault,
        });
        self.report(kvm.id(), || match secret {
            true => TrapEvent::Secret {
                msr,
                write: false,
                gp: !matches!(outcome, ReadOutcome::Value(_)),
            },
            false => TrapEvent::MsrRead { msr, outcome },
        });
        Ok(())
    }

    /// Who performs an RDMSR or WRMSR, and with which cookie. Both are privileged:
    /// the processor checks CPL before the intercept. The registers are fetched
    /// only where one of them can matter.
    fn msr_caller(
        &mut self,
        kvm: &KvmVcpu,
        msr: MsrIndex,
        write: bool,
    ) -> Result<Caller, VcpuFailure> {
        let Some(pmu) = &self.pmu else {
            return Ok(Caller::legacy(Layer::GuestKernel));
        };
        let layer = pmu.layer(Ring::Kernel, kvm.in_smm());
        if !pmu.takes_cookie(msr, write) {
            return Ok(Caller::legacy(layer));
        }
        // Drivers set a counter up with several such accesses.
        self.registers_wanted = SYNCED_EXITS;
        let Presented(presented) = Presented::now(&kvm.get_regs()?, &kvm.get_sregs()?);
        Ok(Caller { layer, presented })
    }

    fn wrmsr(
        &mut self,
        kvm: &mut KvmVcpu,
        seat: &mut Seat,
        msr: MsrIndex,
        value: u64,
    ) -> Result<(), VcpuFailure> {
        let caller = self.msr_caller(kvm, msr, true)?;
        let written = match (&mut self.pmu, &mut seat.pmu) {
            (Some(pmu), Some(core)) => pmu.wrmsr(core, msr, value, caller),
            _ => MsrWrite::without_pmu(msr),
        };
        let outcome = match (written.rest, &mut self.pmu) {
            (Some(rest), Some(pmu)) => match takes_rest(kvm, msr, rest)? {
                true => {
                    pmu.rest_taken(msr, value);
                    WriteOutcome::Done
                }
                false => WriteOutcome::Gp,
            },
            _ => written.outcome,
        };
        kvm.answer(&match outcome {
            WriteOutcome::Done => Answer::Done,
            WriteOutcome::Gp | WriteOutcome::NotHandled => Answer::MsrFault,
        });
        self.report(kvm.id(), || match written.secret {
            true => TrapEvent::Secret {
                msr,
                write: true,
                gp: outcome != WriteOutcome::Done,
            },
            false => TrapEvent::MsrWrite {
                msr,
                value,
                outcome,
            },
        });
        if written.starts_counting {
            self.registers_wanted = SYNCED_EXITS;
            self.arm_rdpmc(kvm)?;
        }
        Ok(())
    }

    /// A guest that programs counters will read them: watch its #GP handler.
    fn arm_rdpmc(&mut self, kvm: &mut KvmVcpu) -> Result<(), VcpuFailure> {
        let full = self.gp.arm(kvm, self.vm.memory(), &mut self.debug)?;
        if full {
            // Once: a guest that takes and leaves the last one in turn must not
            // fill the host's log.
            if !std::mem::replace(&mut self.warned_full, true) {
                log::warn!(
                    "{}: the guest uses all four debug registers, its RDPMC will fault",
                    kvm.id()
                );
            }
            self.report(kvm.id(), || TrapEvent::DebugRegistersFull);
        }
        Ok(())
    }
}

/// The bits of an MSR that KVM has beside those of the PMU.
fn merged(kvm: &KvmVcpu, msr: MsrIndex, outcome: ReadOutcome) -> Result<ReadOutcome, VcpuFailure> {
    Ok(match outcome {
        ReadOutcome::Merge(bits) => ReadOutcome::Value(kvm.read_msr(msr.0)?.unwrap_or(0) | bits),
        outcome => outcome,
    })
}

/// Whether KVM takes its bits of an MSR that it shares with the PMU. One that it
/// does not have takes zeros.
fn takes_rest(kvm: &KvmVcpu, msr: MsrIndex, rest: u64) -> Result<bool, VcpuFailure> {
    let taken = kvm.write_msr(msr.0, rest)?;
    Ok(taken || rest == 0 && kvm.read_msr(msr.0)?.is_none())
}

fn describe_internal_error(kvm: &KvmVcpu, error: &InternalError) -> String {
    let rip = kvm.get_regs().map_or(0, |regs| regs.rip);
    let bytes: Vec<String> = error
        .bytes
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let code = match bytes.is_empty() {
        true => "unknown bytes".to_owned(),
        false => bytes.join(" "),
    };
    match error.suberror {
        1 => format!(
            "KVM cannot emulate the instruction at RIP {rip:#x} ({code}): where `umpire doctor` says \
             that guest kernel code runs in KVM's emulator, hide what needs it (--hide-feature \
             NAME); elsewhere the guest used it on memory or devices that are not there"
        ),
        other => format!("KVM internal error {other} at RIP {rip:#x} ({code})"),
    }
}
