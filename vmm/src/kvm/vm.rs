//! One VM: memory, irqchip, and the MSRs that exit.

use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_USER_SPACE_MSR, KVM_PIT_SPEAKER_DUMMY, KVM_PMU_CAP_DISABLE,
    kvm_enable_cap, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{
    MsrExitReason, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VmFd,
};
use kvm_pmu::{VcpuError, VcpuId};
use pmu_virt::PmuModel;
use thiserror::Error;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::errno;
use vmm_sys_util::eventfd::EventFd;

use super::host::Host;
use super::smm;
use super::vcpu::KvmVcpu;

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
    /// Memory for system management mode, where KVM has that mode. Without it an
    /// SMI ends the VM.
    pub smm: bool,
}

impl VmOptions {
    /// With an irqchip, and exits for the PMU's registers: those of every model,
    /// and what `model` shares with the processor.
    #[must_use]
    pub fn with_pmu(model: Option<&PmuModel>) -> Self {
        let mut trapped_msrs = pmu_virt::all_pmu_msr_ranges();
        let shared = model.map_or(&[][..], PmuModel::shared_msrs);
        trapped_msrs.extend(shared.iter().map(|msr| (msr.0, msr.0)));
        trapped_msrs.sort_unstable();
        Self {
            irqchip: true,
            trapped_msrs,
            smm: true,
        }
    }
}

/// One VM.
#[derive(Debug)]
pub struct KvmVm {
    fd: VmFd,
    // Keeps the memory mapped for as long as KVM may use it.
    memory: GuestMemoryMmap,
    smram: Option<GuestMemoryMmap>,
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
        let smram = match options.smm && host.features().smm {
            true => Some(smm::map(&fd, &memory)?),
            false => None,
        };
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
        Ok(Self { fd, memory, smram })
    }

    /// Its descriptor, for the PMUs of its vCPUs.
    #[must_use]
    pub fn fd(&self) -> &VmFd {
        &self.fd
    }

    /// Guest memory.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// The memory that only code in system management mode sees, if there is such
    /// a mode.
    #[must_use]
    pub fn smram(&self) -> Option<&GuestMemoryMmap> {
        self.smram.as_ref()
    }

    /// Makes vCPU `id`.
    ///
    /// # Errors
    /// The error of `KVM_CREATE_VCPU`.
    pub fn create_vcpu(&self, id: VcpuId) -> Result<KvmVcpu, VmError> {
        let fd = self
            .fd
            .create_vcpu(id.0.into())
            .map_err(|error| VmError::Ioctl("KVM_CREATE_VCPU", error))?;
        KvmVcpu::new(fd, id, self.fd.run_size())
            .map_err(|error| VmError::Ioctl("mmap of kvm_run", error))
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
        map_piece(fd, slot, memory, (region.start_addr().0, region.len()))?;
    }
    Ok(())
}

/// Shows the guest `len` bytes of `memory` from `start` on, in KVM's slot `slot`.
pub(super) fn map_piece(
    fd: &VmFd,
    slot: u32,
    memory: &GuestMemoryMmap,
    (start, len): (u64, u64),
) -> Result<(), VmError> {
    let host_address = memory
        .get_host_address(GuestAddress(start))
        .map_err(|_| VmError::Unmapped(start))?;
    let entry = kvm_userspace_memory_region {
        slot,
        flags: 0,
        guest_phys_addr: start,
        memory_size: len,
        userspace_addr: host_address as u64,
    };
    super::sys::set_memory_region(fd, entry)
        .map_err(|error| VmError::Ioctl("KVM_SET_USER_MEMORY_REGION", error))
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
    let windows = windows(ranges);
    let filter: Vec<MsrFilterRange<'_>> = windows
        .iter()
        .map(|window| MsrFilterRange {
            flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
            base: window.base,
            msr_count: window.count,
            bitmap: &window.bitmap,
        })
        .collect();
    fd.set_msr_filter(MsrFilterDefaultAction::ALLOW, &filter)
        .map_err(|error| VmError::Ioctl("KVM_X86_SET_MSR_FILTER", error))
}

/// One range of KVM's filter: a zero bit denies, and a denied access exits.
#[derive(Debug, PartialEq, Eq)]
struct Window {
    base: u32,
    count: u32,
    bitmap: Vec<u8>,
}

/// Packs `ranges` into few windows, because KVM takes 16 only
/// (`KVM_MSR_FILTER_MAX_RANGES`): neighbours share one, with the MSRs between
/// them allowed.
fn windows(ranges: &[(u32, u32)]) -> Vec<Window> {
    const NEIGHBOURS: u32 = 0x400;
    let mut groups: Vec<Vec<(u32, u32)>> = Vec::new();
    for &range in ranges {
        match groups.last_mut() {
            Some(group)
                if group
                    .last()
                    .is_some_and(|last| range.0 - last.1 <= NEIGHBOURS) =>
            {
                group.push(range);
            }
            _ => groups.push(vec![range]),
        }
    }
    groups
        .iter()
        .filter_map(|group| {
            let (base, last) = (group.first()?.0, group.last()?.1);
            let count = last - base + 1;
            let mut bitmap = vec![0xff; count.div_ceil(8) as usize];
            for msr in group.iter().flat_map(|&(first, last)| first..=last) {
                let bit = msr - base;
                bitmap[(bit / 8) as usize] &= !(1 << (bit % 8));
            }
            Some(Window {
                base,
                count,
                bitmap,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_a_window_and_leave_what_lies_between_to_kvm() {
        let found = windows(&[(0x10, 0x11), (0x18, 0x18), (0xc000_0000, 0xc000_0000)]);
        let expected = [
            (0x10, 9, vec![0b1111_1100, 0b1111_1110]),
            (0xc000_0000, 1, vec![0b1111_1110]),
        ]
        .map(|(base, count, bitmap)| Window {
            base,
            count,
            bitmap,
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn every_pmu_msr_fits_in_kvms_filter() {
        let model = PmuModel::parse("intel-v2,full-width=on").unwrap();
        let ranges = VmOptions::with_pmu(Some(&model)).trapped_msrs;
        let windows = windows(&ranges);
        assert!(windows.len() <= 16, "{windows:x?}");
        let places: [std::ops::Range<u32>; 3] = [
            0..0x2000,
            0xc000_0000..0xc001_2000,
            0x554d_5000..0x554d_8000,
        ];
        for msr in places.into_iter().flatten() {
            let denied = windows.iter().any(|window| {
                msr.checked_sub(window.base).is_some_and(|bit| {
                    bit < window.count && window.bitmap[(bit / 8) as usize] >> (bit % 8) & 1 == 0
                })
            });
            let wanted = ranges
                .iter()
                .any(|&(first, last)| (first..=last).contains(&msr));
            assert_eq!(denied, wanted, "MSR {msr:#x}");
        }
    }
}
