//! What the caller wants to boot.

use std::path::PathBuf;

use super::acpi::VirtioDevice;
use super::firmware::FirmwareRequest;

/// What to boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootRequest {
    /// A bzImage, an ELF vmlinux or a Multiboot v1 kernel.
    pub kernel: PathBuf,
    /// Initial ramdisk, for Linux and PVH kernels.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    pub cmdline: String,
    /// Modules, for Multiboot kernels.
    pub modules: Vec<ModuleRequest>,
    /// Number of vCPUs that the interrupt tables describe, 1 to [`MAX_CPUS`](super::acpi::MAX_CPUS).
    pub cpus: u32,
    /// Whether a bzImage is unpacked here.
    pub unpack: Unpack,
    /// Whether the machine has a power-management timer at [`AcpiPorts::pm_timer`](super::acpi::AcpiPorts::pm_timer).
    pub pm_timer: bool,
    /// A virtio device that the machine has.
    pub virtio: Option<VirtioDevice>,
    /// What a Linux kernel begins its random numbers with, where its processor has no noise of
    /// its own.
    pub rng_seed: Option<[u8; 32]>,
    /// What runs before the kernel.
    pub firmware: Option<FirmwareRequest>,
}

/// A file for a Multiboot kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleRequest {
    pub path: PathBuf,
    /// What follows the file's name in the module's string.
    pub cmdline: String,
}

/// Whether a bzImage is unpacked by this program or by its own decompressor in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unpack {
    /// Here, if the guest would take minutes for it.
    Auto {
        /// Whether guest code at CPL 0 runs in an emulator: this KVM's, or the engine's.
        slow_cpl0: bool,
    },
    Always,
    /// Always in the guest.
    Never,
}

impl Unpack {
    /// Whether to unpack here.
    pub(crate) fn on_host(self) -> bool {
        match self {
            Self::Auto { slow_cpl0 } => slow_cpl0,
            Self::Always => true,
            Self::Never => false,
        }
    }
}
