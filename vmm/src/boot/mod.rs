//! Puts a guest into memory: kernel, initrd, modules, command line, ACPI tables, and the
//! registers that the boot processor starts with.
//!
//! Nothing here calls KVM; memory goes in, memory and plain data come out.

pub mod acpi;
mod bzimage;
mod elf;
mod error;
mod image;
mod kernel;
pub mod memory;
mod multiboot;
mod place;
mod pvh;
mod segments;
pub mod state;
#[cfg(test)]
mod testing;
mod unpack;
mod wire;
mod zero_page;

use std::fmt;
use std::path::PathBuf;

pub use error::BootError;
pub use state::InitialState;
pub use unpack::Compression;

use acpi::{AcpiConfig, MAX_CPUS};
use bzimage::BzImage;
use elf::Elf;
use image::Image;
use kernel::Kernel;
use memory::{BOOT_INFO_START, GuestMemory, MIB, ZERO_PAGE_START, low_end, regions};
use multiboot::{BOOTLOADER_MAGIC, MAX_MODULES, MultibootKernel};
use segments::Span;
use zero_page::write_zero_page;

/// `COMMAND_LINE_SIZE` of x86 Linux, less the terminator; for kernels without a setup header.
const LINUX_CMDLINE_LIMIT: usize = 2047;

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
    /// Number of vCPUs that the interrupt tables describe, 1 to [`MAX_CPUS`].
    pub cpus: u32,
    /// Whether a bzImage is unpacked here.
    pub unpack: Unpack,
    /// Whether the machine has a power-management timer at [`acpi::AcpiPorts::pm_timer`].
    pub pm_timer: bool,
}

/// A file for a Multiboot kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleRequest {
    /// The file.
    pub path: PathBuf,
    /// What follows the file's name in the module's string.
    pub cmdline: String,
}

/// Whether a bzImage is unpacked by this program or by its own decompressor in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unpack {
    /// Here, if the guest would take minutes for it.
    Auto {
        /// Whether this host's KVM runs guest code at CPL 0 in an emulator.
        slow_cpl0: bool,
    },
    /// Always here.
    Always,
    /// Always in the guest.
    Never,
}

impl Unpack {
    fn on_host(self) -> bool {
        match self {
            Self::Auto { slow_cpl0 } => slow_cpl0,
            Self::Always => true,
            Self::Never => false,
        }
    }
}

/// How the kernel is entered. All addresses are guest-physical.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
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

impl Entry {
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

impl fmt::Display for Entry {
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
    pub entry: Entry,
    /// Registers of the boot processor. The other vCPUs wait for their start-up IPI.
    pub state: InitialState,
    parts: Parts,
}

/// Where things went, for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Parts {
    kernel: Span,
    unpacked: Option<(Compression, usize)>,
    initrd: Option<Span>,
    modules: usize,
}

impl LoadedGuest {
    /// One line for the log: entry point, and where kernel, initrd and modules lie.
    #[must_use]
    pub fn describe(&self) -> String {
        let Parts {
            kernel,
            unpacked,
            initrd,
            modules,
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
        match modules {
            0 => {}
            1 => line += ", 1 module",
            count => line += &format!(", {count} modules"),
        }
        line
    }
}

/// Puts everything that the request names into fresh guest memory.
///
/// # Errors
/// When a file cannot be read, is not what it should be or does not fit, or when memory does not
/// come from [`memory::create`]. Memory may be partly written then and must not be run.
pub fn load(mem: &GuestMemory, request: &BootRequest) -> Result<LoadedGuest, BootError> {
    if !(1..=MAX_CPUS).contains(&request.cpus) {
        return Err(BootError::CpuCount {
            cpus: request.cpus,
            limit: MAX_CPUS,
        });
    }
    if request.modules.len() > MAX_MODULES {
        let count = request.modules.len();
        return Err(BootError::TooManyModules {
            count,
            limit: MAX_MODULES,
        });
    }
    let kernel = Image::open("kernel", &request.kernel)?;
    let initrd = request
        .initrd
        .as_deref()
        .map(|path| Image::open("initrd", path))
        .transpose()?;
    let guest = load_kernel(mem, request, &kernel, initrd.as_ref())?;
    let config = AcpiConfig {
        cpus: request.cpus,
        pm_timer: request.pm_timer,
    };
    acpi::write_tables(mem, config)?;
    guest.state.write_tables(mem)?;
    Ok(guest)
}

fn load_kernel(
    mem: &GuestMemory,
    request: &BootRequest,
    image: &Image,
    initrd: Option<&Image>,
) -> Result<LoadedGuest, BootError> {
    let kernel = kernel::recognise(image)?;
    match (&kernel, request.modules.first(), initrd) {
        (Kernel::Multiboot(_), _, Some(initrd)) => Err(BootError::InitrdWithMultiboot {
            path: initrd.path().to_owned(),
        }),
        (Kernel::BzImage(_) | Kernel::Elf(_), Some(module), _) => {
            Err(BootError::ModuleWithoutMultiboot {
                module: module.path.clone(),
                kernel: image.path().to_owned(),
            })
        }
        _ => Ok(()),
    }?;
    match kernel {
        Kernel::BzImage(header) if request.unpack.on_host() => {
            load_unpacked(mem, request, image, &header, initrd)
        }
        Kernel::BzImage(header) => {
            let (start, kernel) = header.load(image, mem)?;
            let linux = Linux {
                rip: BzImage::entry_64(start),
                kernel,
                header: Some(&header),
            };
            finish_linux(mem, request, &linux, initrd, None)
        }
        Kernel::Elf(Elf {
            pvh_entry: Some(rip),
            segments,
            ..
        }) => {
            let kernel = segments::load(image, mem, &segments)?;
            finish_pvh(
                mem,
                request,
                entry_within(image, kernel, Some(rip))?,
                kernel,
                initrd,
            )
        }
        Kernel::Elf(Elf {
            is_64: true,
            entry,
            segments,
            ..
        }) => {
            let kernel = segments::load(image, mem, &segments)?;
            let rip = entry_within(image, kernel, entry)?;
            finish_linux(
                mem,
                request,
                &Linux {
                    rip,
                    kernel,
                    header: None,
                },
                initrd,
                None,
            )
        }
        Kernel::Elf(_) => Err(BootError::NotAKernel {
            path: image.path().to_owned(),
            seen: "a 32-bit ELF file with neither a Multiboot header nor a PVH note".into(),
        }),
        Kernel::Multiboot(kernel) => load_multiboot(mem, request, image, &kernel),
    }
}

/// Unpacks a bzImage and loads the vmlinux inside, which is linked to its final addresses.
fn load_unpacked(
    mem: &GuestMemory,
    request: &BootRequest,
    image: &Image,
    header: &BzImage,
    initrd: Option<&Image>,
) -> Result<LoadedGuest, BootError> {
    let failed = |what: String| BootError::Unpack {
        path: image.path().to_owned(),
        what,
    };
    let limit = usize::try_from(low_end(mem)?).unwrap_or(usize::MAX);
    let (compression, bytes) = unpack::unpack(&header.payload(image)?, limit)
        .map_err(|error| failed(error.to_string()))?;
    if !elf::is_elf(&bytes) {
        return Err(failed(
            "its payload is not an ELF file; give the vmlinux instead".into(),
        ));
    }
    let unpacked = Some((compression, bytes.len()));
    let vmlinux = Image::from_bytes("kernel", image.path(), bytes);
    let Elf {
        is_64,
        entry,
        segments,
        ..
    } = elf::parse(&vmlinux)?;
    if !is_64 {
        return Err(failed(
            "its payload is a 32-bit kernel; give an x86-64 kernel".into(),
        ));
    }
    let kernel = segments::load(&vmlinux, mem, &segments)?;
    let rip = entry_within(&vmlinux, kernel, entry)?;
    let linux = Linux {
        rip,
        kernel,
        header: Some(header),
    };
    finish_linux(mem, request, &linux, initrd, unpacked)
}

/// A Linux kernel in memory.
struct Linux<'a> {
    rip: u64,
    kernel: Span,
    header: Option<&'a BzImage>,
}

fn finish_linux(
    mem: &GuestMemory,
    request: &BootRequest,
    linux: &Linux<'_>,
    initrd: Option<&Image>,
    unpacked: Option<(Compression, usize)>,
) -> Result<LoadedGuest, BootError> {
    let Linux {
        rip,
        kernel,
        header,
    } = *linux;
    let (cmdline_limit, initrd_limit) = header.map_or((LINUX_CMDLINE_LIMIT, u64::MAX), |header| {
        (header.cmdline_limit, header.initrd_addr_max)
    });
    place::cmdline(mem, &request.cmdline, cmdline_limit)?;
    let initrd = initrd
        .map(|image| place::initrd(mem, image, kernel, initrd_limit))
        .transpose()?;
    let setup_header = header.map(|header| header.setup_header.as_slice());
    write_zero_page(mem, setup_header, kernel.start, initrd, &regions(mem)?)?;
    let entry = Entry::Linux64 {
        rip,
        zero_page: ZERO_PAGE_START,
    };
    Ok(ready(
        entry,
        Parts {
            kernel,
            unpacked,
            initrd,
            modules: 0,
        },
    ))
}

fn finish_pvh(
    mem: &GuestMemory,
    request: &BootRequest,
    rip: u64,
    kernel: Span,
    initrd: Option<&Image>,
) -> Result<LoadedGuest, BootError> {
    place::cmdline(mem, &request.cmdline, LINUX_CMDLINE_LIMIT)?;
    let initrd = initrd
        .map(|image| place::initrd(mem, image, kernel, u64::MAX))
        .transpose()?;
    pvh::write_start_info(mem, initrd, &regions(mem)?)?;
    let entry = Entry::Pvh {
        rip,
        start_info: BOOT_INFO_START,
    };
    Ok(ready(
        entry,
        Parts {
            kernel,
            unpacked: None,
            initrd,
            modules: 0,
        },
    ))
}

fn load_multiboot(
    mem: &GuestMemory,
    request: &BootRequest,
    image: &Image,
    kernel: &MultibootKernel,
) -> Result<LoadedGuest, BootError> {
    let span = segments::load(image, mem, &kernel.segments)?;
    let rip = entry_within(image, span, kernel.entry)?;
    place::cmdline(mem, &place::with_name(image, &request.cmdline), usize::MAX)?;
    let modules = request
        .modules
        .iter()
        .map(|module| Ok((Image::open("module", &module.path)?, module)))
        .collect::<Result<Vec<_>, BootError>>()?;
    let loaded = place::modules(mem, &modules, span)?;
    multiboot::write_info(mem, &loaded, &regions(mem)?)?;
    let entry = Entry::Multiboot {
        rip,
        info: BOOT_INFO_START,
    };
    let parts = Parts {
        kernel: span,
        unpacked: None,
        initrd: None,
        modules: loaded.len(),
    };
    Ok(ready(entry, parts))
}

fn ready(entry: Entry, parts: Parts) -> LoadedGuest {
    LoadedGuest {
        entry,
        state: entry.initial_state(),
        parts,
    }
}

/// Checks that the first instruction lies where something was loaded.
fn entry_within(image: &Image, span: Span, entry: Option<u64>) -> Result<u64, BootError> {
    entry
        .filter(|rip| (span.start..span.end).contains(rip))
        .ok_or_else(|| BootError::Malformed {
            path: image.path().to_owned(),
            what: format!(
                "its entry point lies outside what is loaded ({} MiB from {:#x})",
                (span.end - span.start).div_ceil(MIB),
                span.start
            ),
        })
}

#[cfg(test)]
mod tests;
