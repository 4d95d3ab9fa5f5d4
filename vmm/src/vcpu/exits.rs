//! What each exit leads to that is not the PMU's.

use super::outcome::VcpuEnd;
use super::run::{RunState, VcpuFailure};
use crate::devices::DeviceOutcome;
use crate::kvm::{Answer, InternalError, KvmVcpu, VmExit};

impl RunState {
    /// One line per kind of exit.
    pub(super) fn handle(
        &self,
        kvm: &mut KvmVcpu,
        exit: VmExit,
    ) -> Result<Option<VcpuEnd>, VcpuFailure> {
        match exit {
            // All that the filter lets through is the PMU's.
            VmExit::Rdmsr { .. } | VmExit::Wrmsr { .. } => kvm.answer(&Answer::MsrFault),
            VmExit::Debug(_) | VmExit::Interrupted => {}
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
            VmExit::MemoryFault { address } => {
                let at = address.map(|at| format!(" at {at:#x}")).unwrap_or_default();
                return Ok(Some(VcpuEnd::Stuck(format!(
                    "the host cannot give the guest its memory{at}"
                ))));
            }
            VmExit::Unexpected { what } => {
                return Ok(Some(VcpuEnd::Stuck(format!("unexpected exit: {what}"))));
            }
        }
        Ok(None)
    }
}

fn describe_internal_error(kvm: &KvmVcpu, error: &InternalError) -> String {
    let rip = kvm.get_regs().map_or(0, |regs| regs.rip);
    let bytes: Vec<String> = error
        .bytes
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let code = if bytes.is_empty() {
        "unknown bytes".to_owned()
    } else {
        bytes.join(" ")
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
