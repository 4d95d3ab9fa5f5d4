//! One VM: memory, irqchip, and the MSRs that exit.

use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_USER_SPACE_MSR, KVM_PIT_SPEAKER_DUMMY, KVM_PMU_CAP_DISABLE,
    kvm_enable_cap, kvm_msi, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{MsrExitReason, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VmFd};
use thiserror::Error;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::errno;
use vmm_sys_util::eventfd::EventFd;

use super::host::Host;
use super::vcpu::{KvmVcpu, VcpuError, VcpuId};

/// Three pages below 4 GiB that KVM needs on some Intel hosts
/// (`KVM_SET_TSS_ADDR`), and the identity map page before them.
const TSS_ADDRESS: usize = 0xfffb_d000;
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

/// Why a VM could not be made.
#[derive(Debug, Error)]
pub enum VmError {
    /// An ioctl failed.
    #[error("{0} failed: {1}")]
    Ioctl(&'static str, errno::Error),
    /// The guest memory has a region without a host mapping.
    #[error("guest memory at {0:#x} has no host mapping")]
    Unmapped(u64),
    /// `KVM_SIGNAL_MSI` found no destination.
    #[error("KVM_SIGNAL_MSI found no vCPU with APIC ID {0}")]
    NoDestination(u32),
    /// A vCPU could not be made.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
}

/// What a VM is made of.
#[derive(Debug, Clone, Default)]
pub struct VmOptions {
    /// In-kernel PIC, IOAPIC, local APICs and PIT.
    pub irqchip: bool,
    /// Inclusive MSR ranges that exit to us, sorted and apart.
    pub trapped_msrs: Vec<(u32, u32)>,
}

/// One VM.
#[derive(Debug)]
pub struct KvmVm {
    fd: VmFd,
    // Keeps the memory mapped for as long as KVM may use it.
    memory: GuestMemoryMmap,
}

impl KvmVm {
    /// Makes a VM with `memory`.
    ///
    /// KVM's own vPMU, where there is one, is switched off: it would answer
    /// RDPMC and the PMU's MSRs itself.
    ///
    /// # Errors
    /// [`VmError`] names the ioctl that failed.
    pub fn new(host: &Host, memory: GuestMemoryMmap, options: &VmOptions) -> Result<Self, VmError> {
        let fd = create(host)?;
        if host.features().pmu_capability {
            fd.enable_cap(&capability(KVM_CAP_PMU_CAPABILITY, KVM_PMU_CAP_DISABLE))
                .map_err(|error| VmError::Ioctl("KVM_CAP_PMU_CAPABILITY", error))?;
        }
        map_memory(&fd, &memory)?;
        // Both are for old Intel hosts; AMD's KVM and software KVMs may refuse.
        let _ = fd.set_identity_map_address(IDENTITY_MAP_ADDRESS);
        let _ = fd.set_tss_address(TSS_ADDRESS);
        if options.irqchip {
            fd.create_irq_chip()
                .map_err(|error| VmError::Ioctl("KVM_CREATE_IRQCHIP", error))?;
            let pit = kvm_pit_config {
                flags: KVM_PIT_SPEAKER_DUMMY,
                ..Default::default()
            };
            fd.create_pit2(pit)
                .map_err(|error| VmError::Ioctl("KVM_CREATE_PIT2", error))?;
        }
        trap_msrs(&fd, &options.trapped_msrs)?;
        Ok(Self { fd, memory })
    }

    /// Guest memory.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Makes vCPU `id`.
    ///
    /// # Errors
    /// The error of `KVM_CREATE_VCPU`.
    pub fn create_vcpu(&self, host: &Host, id: VcpuId) -> Result<KvmVcpu, VmError> {
        let fd = self
            .fd
            .create_vcpu(id.0.into())
            .map_err(|error| VmError::Ioctl("KVM_CREATE_VCPU", error))?;
        Ok(KvmVcpu::new(fd, id, self.fd.run_size(), host.features()))
    }

    /// Raises interrupt line `gsi` whenever `event` is written.
    ///
    /// # Errors
    /// The error of `KVM_IRQFD`.
    pub fn connect_irq(&self, event: &EventFd, gsi: u32) -> Result<(), VmError> {
        self.fd
            .register_irqfd(event, gsi)
            .map_err(|error| VmError::Ioctl("KVM_IRQFD", error))
    }

    /// Sends a fixed, edge-triggered interrupt to the local APIC with ID
    /// `apic_id` (SDM vol. 3A, 12.11 "Message Signalled Interrupts").
    ///
    /// # Errors
    /// The error of `KVM_SIGNAL_MSI`, or that no vCPU took it.
    pub fn send_fixed(&self, apic_id: u32, vector: u8) -> Result<(), VmError> {
        let msi = kvm_msi {
            address_lo: 0xfee0_0000 | (apic_id & 0xff) << 12,
            // KVM reads destination bits 31:8 from here, which it ignores
            // unless KVM_X2APIC_API_USE_32BIT_IDS is on; IDs stay below 64.
            address_hi: 0,
            data: vector.into(),
            ..Default::default()
        };
        match self.fd.signal_msi(msi) {
            Ok(delivered) if delivered > 0 => Ok(()),
            Ok(_) => Err(VmError::NoDestination(apic_id)),
            Err(error) => Err(VmError::Ioctl("KVM_SIGNAL_MSI", error)),
        }
    }
}

/// `KVM_CREATE_VM`, again when a signal interrupted it.
fn create(host: &Host) -> Result<VmFd, VmError> {
    loop {
        match host.kvm().create_vm() {
            Ok(fd) => return Ok(fd),
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => return Err(VmError::Ioctl("KVM_CREATE_VM", error)),
        }
    }
}

fn capability(cap: u32, argument: u32) -> kvm_enable_cap {
    let mut request = kvm_enable_cap {
        cap,
        ..Default::default()
    };
    request.args[0] = argument.into();
    request
}

fn map_memory(fd: &VmFd, memory: &GuestMemoryMmap) -> Result<(), VmError> {
    for (slot, region) in (0u32..).zip(memory.iter()) {
        let start = region.start_addr();
        let host_address = memory
            .get_host_address(GuestAddress(start.0))
            .map_err(|_| VmError::Unmapped(start.0))?;
        let entry = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: start.0,
            memory_size: region.len(),
            userspace_addr: host_address as u64,
        };
        super::sys::set_memory_region(fd, entry)
            .map_err(|error| VmError::Ioctl("KVM_SET_USER_MEMORY_REGION", error))?;
    }
    Ok(())
}

/// Makes RDMSR and WRMSR of `ranges` exit; every other MSR stays KVM's.
///
/// Only the FILTER reason is enabled: MSRs that KVM does not know raise #GP in
/// the guest without a word from us, as on hardware.
fn trap_msrs(fd: &VmFd, ranges: &[(u32, u32)]) -> Result<(), VmError> {
    fd.enable_cap(&capability(
        KVM_CAP_X86_USER_SPACE_MSR,
        MsrExitReason::Filter.bits(),
    ))
    .map_err(|error| VmError::Ioctl("KVM_CAP_X86_USER_SPACE_MSR", error))?;
    // A zero bit denies, and a denied access exits.
    let counts: Vec<u32> = ranges.iter().map(|(first, last)| last - first + 1).collect();
    let bitmaps: Vec<Vec<u8>> = counts
        .iter()
        .map(|&count| vec![0; count.div_ceil(8) as usize])
        .collect();
    let filter: Vec<MsrFilterRange<'_>> = ranges
        .iter()
        .zip(&counts)
        .zip(&bitmaps)
        .map(|((&(base, _), &msr_count), bitmap)| MsrFilterRange {
            flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
            base,
            msr_count,
            bitmap,
        })
        .collect();
    fd.set_msr_filter(MsrFilterDefaultAction::ALLOW, &filter)
        .map_err(|error| VmError::Ioctl("KVM_X86_SET_MSR_FILTER", error))
}
