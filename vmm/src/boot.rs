//! Puts a guest into memory: kernel, initrd, modules, command line, ACPI tables, and the
//! registers that the boot processor starts with.
//!
//! Nothing here calls KVM. Memory goes in, memory and plain data come out.

pub mod acpi;
mod bzimage;
mod elf;
mod error;
mod firmware;
mod guest;
mod image;
mod kernel;
pub mod memory;
mod multiboot;
mod page_tables;
mod place;
mod pvh;
mod request;
mod segments;
pub mod state;
#[cfg(test)]
pub(crate) mod testing;
mod unpack;
mod wire;
mod zero_page;

pub use error::BootError;
pub use firmware::{FirmwareImage, FirmwareRequest};
pub use guest::{BootEntry, LoadedGuest};
pub use request::{BootRequest, ModuleRequest, Unpack};
pub use state::InitialState;
pub use unpack::Compression;

use acpi::{AcpiConfig, MAX_CPUS};
use bzimage::BzImage;
use elf::Elf;
use guest::LoadedParts;
use image::Image;
use kernel::Kernel;
use memory::{BOOT_INFO_START, Conventional, GuestMemory, MIB, ZERO_PAGE_START, low_end, regions};
use multiboot::{MAX_MODULES, MultibootKernel};
use segments::Span;
use zero_page::{write_rng_seed, write_zero_page};

/// `COMMAND_LINE_SIZE` of x86 Linux, less the terminator; for kernels without a setup header.
const LINUX_CMDLINE_LIMIT: usize = 2047;

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
    let mut guest = load_kernel(mem, request, &kernel, initrd.as_ref())?;
    let config = AcpiConfig {
        cpus: request.cpus,
        pm_timer: request.pm_timer,
        virtio: request.virtio,
    };
    acpi::write_tables(mem, config)?;
    guest.state.write_tables(mem)?;
    if let Some(firmware) = &request.firmware {
        let around = firmware::Surroundings {
            kernel: guest.entry,
            cpus: request.cpus,
            pm_timer: request.pm_timer,
        };
        let (state, span) = firmware::load(mem, firmware, around)?;
        guest.state = state;
        guest.parts.firmware = Some(span);
    }
    Ok(guest)
}

/// Whether firmware keeps a part of conventional memory.
fn conventional(request: &BootRequest) -> Conventional {
    match request.firmware {
        Some(_) => Conventional::Firmware,
        None => Conventional::Free,
    }
}

/// Whether this kind of kernel takes what comes with it.
fn check_companions(
    kernel: &Kernel,
    request: &BootRequest,
    image: &Image,
    initrd: Option<&Image>,
) -> Result<(), BootError> {
    match (kernel, request.modules.first(), initrd) {
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
    }
}

fn load_kernel(
    mem: &GuestMemory,
    request: &BootRequest,
    image: &Image,
    initrd: Option<&Image>,
) -> Result<LoadedGuest, BootError> {
    let kernel = kernel::recognise(image)?;
    check_companions(&kernel, request, image, initrd)?;
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
    let seed = request.rng_seed.as_ref();
    let seed = seed.map_or(Ok(0), |seed| write_rng_seed(mem, seed))?;
    write_zero_page(
        mem,
        setup_header,
        kernel.start,
        initrd,
        &regions(mem, conventional(request))?,
        seed,
    )?;
    let entry = BootEntry::Linux64 {
        rip,
        zero_page: ZERO_PAGE_START,
    };
    Ok(ready(
        entry,
        LoadedParts {
            kernel,
            unpacked,
            initrd,
            modules: 0,
            firmware: None,
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
    pvh::write_start_info(mem, initrd, &regions(mem, conventional(request))?)?;
    let entry = BootEntry::Pvh {
        rip,
        start_info: BOOT_INFO_START,
    };
    Ok(ready(
        entry,
        LoadedParts {
            kernel,
            unpacked: None,
            initrd,
            modules: 0,
            firmware: None,
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
    multiboot::write_info(mem, &loaded, &regions(mem, conventional(request))?)?;
    let entry = BootEntry::Multiboot {
        rip,
        info: BOOT_INFO_START,
    };
    let parts = LoadedParts {
        kernel: span,
        unpacked: None,
        initrd: None,
        modules: loaded.len(),
        firmware: None,
    };
    Ok(ready(entry, parts))
}

fn ready(entry: BootEntry, parts: LoadedParts) -> LoadedGuest {
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
