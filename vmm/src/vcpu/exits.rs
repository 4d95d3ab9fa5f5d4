//! What each exit leads to that is not the PMU's.

use super::outcome::{VcpuEnd, VcpuFailure};
use crate::devices::{DeviceOutcome, Platform};
use crate::kvm::{Answer, InternalError, KvmVcpu, VmExit};

/// What an exit leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Handled {
    /// The guest runs on.
    RunsOn,
    /// The guest runs on with this answer.
    Answered(Answer),
    /// The vCPU has ended.
    Ended(VcpuEnd),
    /// What it means is known to the engine alone.
    Engine,
}

/// What each exit leads to that means the same on every engine. `data` are the bytes of an IN
/// or OUT.
pub(crate) fn handle(exit: VmExit, data: &mut [u8], platform: &dyn Platform) -> Handled {
    match exit {
        // All that comes to here is the PMU's, and somebody else's if it is there.
        VmExit::Rdmsr { .. } | VmExit::Wrmsr { .. } | VmExit::Rdpmc { .. } => {
            Handled::Answered(Answer::MsrFault)
        }
        VmExit::IoIn { port, width, .. } => {
            data.fill(0xff);
            platform.port_read(port, width, data);
            Handled::RunsOn
        }
        VmExit::IoOut { port, width, .. } => match platform.port_write(port, width, data) {
            DeviceOutcome::Continue => Handled::RunsOn,
            DeviceOutcome::Exit(end) => Handled::Ended(VcpuEnd::Guest(end)),
        },
        VmExit::MmioRead { address, len } => {
            let mut data = [0xff; 8];
            platform.mmio_read(address, &mut data[..len]);
            Handled::Answered(Answer::Mmio(data))
        }
        VmExit::MmioWrite { address, data, len } => {
            platform.mmio_write(address, &data[..len]);
            Handled::RunsOn
        }
        VmExit::Debug(_) | VmExit::Interrupted => Handled::RunsOn,
        VmExit::Budget
        | VmExit::Window
        | VmExit::Paused
        | VmExit::Unimplemented { .. }
        | VmExit::Halted
        | VmExit::Shutdown
        | VmExit::InternalError(_)
        | VmExit::FailEntry { .. }
        | VmExit::SystemEvent { .. }
        | VmExit::MemoryFault { .. }
        | VmExit::Unexpected { .. } => Handled::Engine,
    }
}

/// What each exit of KVM's leads to; an end, or the guest runs on.
pub(super) fn handle_kvm(
    kvm: &mut KvmVcpu,
    platform: &dyn Platform,
    exit: VmExit,
) -> Result<Option<VcpuEnd>, VcpuFailure> {
    match handle(exit, kvm.io_data(), platform) {
        Handled::RunsOn => Ok(None),
        Handled::Answered(answer) => {
            kvm.answer(answer);
            Ok(None)
        }
        Handled::Ended(end) => Ok(Some(end)),
        Handled::Engine => end_of(kvm, exit).map(Some),
    }
}

fn end_of(kvm: &KvmVcpu, exit: VmExit) -> Result<VcpuEnd, VcpuFailure> {
    Ok(VcpuEnd::Stuck(match exit {
        VmExit::Shutdown => return triple_fault(kvm),
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
        other => format!("{other:?} is no exit of KVM's"),
    }))
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
