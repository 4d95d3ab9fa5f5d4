//! What each exit leads to.

use arbiter::{Caller, Layer};
use pmu_virt::{MsrIndex, ReadOutcome, Register, WriteOutcome};

use super::end::VcpuEnd;
use super::observe::TrapEvent;
use super::run::{Core, SYNCED_EXITS, VcpuFailure};
use crate::devices::DeviceOutcome;
use crate::kvm::{Answer, InternalError, KvmVcpu, VmExit};
use crate::trap::StepStop;

impl Core {
    /// One line per kind of exit.
    pub(super) fn handle(
        &mut self,
        kvm: &mut KvmVcpu,
        exit: VmExit,
    ) -> Result<Option<VcpuEnd>, VcpuFailure> {
        if !matches!(exit, VmExit::Debug(_)) {
            self.step_stop(kvm, StepStop::Exit)?;
        }
        match exit {
            VmExit::Rdmsr { index } => self.rdmsr(kvm, MsrIndex(index)),
            VmExit::Wrmsr { index, value } => self.wrmsr(kvm, MsrIndex(index), value)?,
            VmExit::Debug(debug) => self.debug_exit(kvm, &debug)?,
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

    fn rdmsr(&mut self, kvm: &mut KvmVcpu, msr: MsrIndex) {
        // RDMSR is privileged: the processor checks CPL before the intercept.
        let outcome = match &mut self.pmu {
            Some(pmu) => pmu.rdmsr(msr, Caller::legacy(Layer::GuestKernel)),
            None => ReadOutcome::Gp,
        };
        kvm.answer(&match outcome {
            ReadOutcome::Value(value) => Answer::Msr(value),
            // MSRs that the model shares with KVM are not trapped yet.
            ReadOutcome::Merge(_) | ReadOutcome::Gp | ReadOutcome::NotHandled => Answer::MsrFault,
        });
        self.report(kvm.id(), || TrapEvent::MsrRead { msr, outcome });
    }

    fn wrmsr(&mut self, kvm: &mut KvmVcpu, msr: MsrIndex, value: u64) -> Result<(), VcpuFailure> {
        let outcome = match &mut self.pmu {
            Some(pmu) => pmu.wrmsr(msr, value, Caller::legacy(Layer::GuestKernel)),
            None => WriteOutcome::Gp,
        };
        kvm.answer(&match outcome {
            WriteOutcome::Done => Answer::Done,
            WriteOutcome::Rest(_) | WriteOutcome::Gp | WriteOutcome::NotHandled => Answer::MsrFault,
        });
        self.report(kvm.id(), || TrapEvent::MsrWrite {
            msr,
            value,
            outcome,
        });
        let register = self.pmu.as_ref().and_then(|pmu| pmu.model().decode(msr));
        if outcome == WriteOutcome::Done && register.is_some_and(starts_counting) {
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

/// True for the registers that a guest writes before it reads counts.
fn starts_counting(register: Register) -> bool {
    matches!(
        register,
        Register::Select(_) | Register::FixedControl | Register::GlobalControl
    )
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
