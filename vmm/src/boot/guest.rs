//! A guest in memory: how it is entered, and where its parts lie.

use std::fmt;

use super::multiboot::BOOTLOADER_MAGIC;
use super::segments::Span;
use super::state::InitialState;
use super::unpack::Compression;

/// How the kernel is entered. All addresses are guest-physical.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BootEntry {
    /// Linux's 64-bit boot protocol.
    Linux64 {
        /// First instruction.
        rip: u64,
        /// `boot_params`, in RSI.
        zero_page: u64,
    },
    /// 32-bit protected mode, Xen's PVH boot protocol.
    Pvh {
        /// First instruction.
        rip: u64,
        /// `hvm_start_info`, in EBX.
        start_info: u64,
    },
    /// 32-bit protected mode, Multiboot v1.
    Multiboot {
        /// First instruction.
        rip: u64,
        /// Information structure, in EBX.
        info: u64,
    },
}

impl BootEntry {
    /// The registers that this protocol asks for.
    #[must_use]
    pub fn initial_state(self) -> InitialState {
        match self {
            Self::Linux64 { rip, zero_page } => InitialState::linux64(rip, zero_page),
            Self::Pvh { rip, start_info } => InitialState::pvh(rip, start_info),
            Self::Multiboot { rip, info } => InitialState::multiboot(rip, info, BOOTLOADER_MAGIC),
        }
    }
}

impl fmt::Display for BootEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Linux64 { rip, .. } => write!(f, "Linux 64-bit entry at {rip:#x}"),
            Self::Pvh { rip, .. } => write!(f, "PVH entry at {rip:#x}"),
            Self::Multiboot { rip, .. } => write!(f, "Multiboot entry at {rip:#x}"),
        }
    }
}

/// A guest that is ready to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedGuest {
    /// How the kernel is entered.
    pub entry: BootEntry,
    /// Registers of the boot processor at the first instruction of the kernel, or of the firmware
    /// before it. The other vCPUs wait for their start-up IPI.
    pub state: InitialState,
    pub(crate) parts: LoadedParts,
}

/// Where things went, for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LoadedParts {
    pub(crate) kernel: Span,
    pub(crate) unpacked: Option<(Compression, usize)>,
    pub(crate) initrd: Option<Span>,
    pub(crate) modules: usize,
    pub(crate) firmware: Option<Span>,
}

impl LoadedGuest {
    /// One line for the log: entry point, and where kernel, initrd and modules lie.
    #[must_use]
    pub fn describe(&self) -> String {
        let LoadedParts {
            kernel,
            unpacked,
            initrd,
            modules,
            firmware,
        } = &self.parts;
        let mut line = format!(
            "{}, kernel at {:#x}-{:#x}",
            self.entry, kernel.start, kernel.end
        );
        if let Some((compression, len)) = unpacked {
            line += &format!(" (unpacked on the host from {compression} to {len} bytes)");
        }
        if let Some(span) = initrd {
            line += &format!(", initrd at {:#x}-{:#x}", span.start, span.end);
        }
        if let Some(span) = firmware {
            line += &format!(", firmware at {:#x}-{:#x}", span.start, span.end);
        }
        match modules {
            0 => {}
            1 => line += ", 1 module",
            count => line += &format!(", {count} modules"),
        }
        line
    }
}
