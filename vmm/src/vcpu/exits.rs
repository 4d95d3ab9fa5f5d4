//! What each exit leads to that is not the PMU's.

use super::outcome::{VcpuEnd, VcpuFailure};
use crate::devices::{DeviceOutcome, Platform};
use crate::kvm::{Answer, InternalError, KvmVcpu, VmExit};

/// What each kind of exit leads to; an end, or the guest runs on.
pub(super) fn handle(
    kvm: &mut KvmVcpu,
    platform: &dyn Platform,
    exit: VmExit,
) -> Result<Option<VcpuEnd>, VcpuFailure> {
    let stuck = match exit {
        // All that the filter lets through is the PMU's.
        VmExit::Rdmsr { .. } | VmExit::Wrmsr { .. } => {
            kvm.answer(Answer::MsrFault);
            return Ok(None);
        }
        VmExit::Debug(_) | VmExit::Interrupted => return Ok(None),
        VmExit::IoIn { port, width, .. } => {
            let data = kvm.io_data();
            data.fill(0xff);
            platform.port_read(port, width, data);
            return Ok(None);
        }
        VmExit::IoOut { port, width, .. } => {
            return Ok(match platform.port_write(port, width, kvm.io_data()) {
                DeviceOutcome::Continue => None,
                DeviceOutcome::Exit(end) => Some(VcpuEnd::Guest(end)),
            });
        }
        VmExit::MmioRead { address, len } => {
            let mut data = [0xff; 8];
            platform.mmio_read(address, &mut data[..len]);
            kvm.answer(Answer::Mmio(data));
            return Ok(None);
        }
        VmExit::MmioWrite { address, data, len } => {
            platform.mmio_write(address, &data[..len]);
            return Ok(None);
        }
        VmExit::Shutdown => return Ok(Some(triple_fault(kvm)?)),
        VmExit::SystemEvent { kind } => {
            format!("KVM reports system event {kind}, which no x86 guest of ours can cause")
        }
        VmExit::Halted => "HLT exited to the VMM: this machine has no in-kernel irqchip".to_owned(),
        VmExit::InternalError(error) => describe_internal_error(kvm, &error),
        VmExit::FailEntry { reason } => {
            format!("the processor refused the guest's state (hardware reason {reason:#x})")
        }
        VmExit::MemoryFault { address } => {
            let at = address.map(|at| format!(" at {at:#x}")).unwrap_or_default();
            format!("the host cannot give the guest its memory{at}")
        }
        VmExit::Unexpected { reason } => format!("unexpected exit: KVM's reason {reason}"),
    };
    Ok(Some(VcpuEnd::Stuck(stuck)))
}

fn triple_fault(kvm: &KvmVcpu) -> Result<VcpuEnd, VcpuFailure> {
    // kvm_amd has reset the vCPU by now.
    const RESET_RIP: u64 = 0xfff0;
    let rip = kvm.get_regs()?.rip;
    Ok(VcpuEnd::TripleFault {
        rip: (rip != RESET_RIP).then_some(rip),
    })
}

fn describe_internal_error(kvm: &KvmVcpu, error: &InternalError) -> String {
    let rip = kvm.get_regs().map_or(0, |regs| regs.rip);
    let bytes: Vec<String> = error.bytes[..error.len]
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
