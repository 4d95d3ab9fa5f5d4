//! What the control socket asks of this VMM: kicks, halted time, and the memory
//! that the guest takes. `vmm_control` knows neither KVM nor signals.

use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress};
use vmm_control::{ExitKind, GuestMemoryUse, HaltTimes, Halted, KickThread};

use crate::kvm::VmExit;
use crate::sys::{HaltStats, KickTarget, resident_bytes};

/// A thread that a kick leads out of `KVM_RUN`.
#[derive(Debug)]
pub(crate) struct VcpuThread(pub(crate) KickTarget);

impl KickThread for VcpuThread {
    fn kick(&self) {
        self.0.kick();
    }

    fn thread_id(&self) -> i32 {
        self.0.thread()
    }
}

/// KVM's statistics of a vCPU's halts.
#[derive(Debug)]
pub(crate) struct VcpuHalts(pub(crate) HaltStats);

impl HaltTimes for VcpuHalts {
    fn halted(&mut self) -> Option<Halted> {
        let halted = self.0.halted().ok()?;
        Some(Halted {
            slept: halted.waited,
            polled: halted.polled,
        })
    }
}

/// The memory of a VM.
#[derive(Debug)]
pub(crate) struct VmMemory(pub(crate) GuestMemoryMmap);

impl GuestMemoryUse for VmMemory {
    fn resident_bytes(&mut self) -> Option<u64> {
        let bytes = |region: &vm_memory::GuestRegionMmap| {
            let start = region.get_host_address(MemoryRegionAddress(0)).ok()?;
            let len = usize::try_from(region.len()).ok()?;
            resident_bytes(start, len).ok()
        };
        self.0.iter().map(bytes).sum()
    }
}

/// The kind by which tools count an exit.
#[inline]
pub(crate) fn exit_kind(exit: VmExit) -> ExitKind {
    match exit {
        VmExit::Rdmsr { .. } | VmExit::Wrmsr { .. } => ExitKind::Msr,
        VmExit::IoIn { .. } | VmExit::IoOut { .. } => ExitKind::Port,
        VmExit::MmioRead { .. } | VmExit::MmioWrite { .. } => ExitKind::Mmio,
        VmExit::Debug(_) => ExitKind::Debug,
        VmExit::Interrupted => ExitKind::Kick,
        _ => ExitKind::Other,
    }
}
