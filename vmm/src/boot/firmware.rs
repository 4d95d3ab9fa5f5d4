//! Puts firmware into memory: its image, its tables and its configuration.
//!
//! Firmware is entered in the kernel's place and gets the kernel's registers in
//! its configuration. `docs/guide/firmware.md` is the contract.

use std::path::PathBuf;

use firmware::config::{self, Config, CounterRequest, KernelEntry, Mode, Protocol};
use firmware::layout;

use super::acpi::PORTS;
use super::elf;
use super::error::BootError;
use super::guest::BootEntry;
use super::image::Image;
use super::kernel::what_is_it;
use super::memory::{GuestMemory, write};
use super::multiboot::SEARCH_LEN;
use super::page_tables::{little_endian, write_page_tables};
use super::segments::{self, LoadSegment, Span};
use super::state::{InitialState, SegmentRegister};

/// The magic number of a flat image, at byte [`FLAT_MAGIC_AT`]. It keeps a file that was given by
/// mistake from being run.
const FLAT_MAGIC: &[u8; 8] = &config::MAGIC;
/// Behind a jump at the image's first byte.
const FLAT_MAGIC_AT: usize = 8;

/// Firmware that runs before the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirmwareRequest {
    /// The program.
    pub image: FirmwareImage,
    /// The counters that it reserves.
    pub counters: Vec<CounterRequest>,
    /// Milliseconds for which it stays in its phase after that.
    pub delay_ms: u32,
}

/// Where the program comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FirmwareImage {
    /// Built together with this program.
    Builtin(&'static [u8]),
    /// A file: ELF64 or flat.
    File(PathBuf),
}

/// The image with its headers checked.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    segments: Vec<LoadSegment>,
    entry: u64,
}

/// The kernel and the machine, for the firmware's configuration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Surroundings {
    pub(crate) kernel: BootEntry,
    pub(crate) cpus: u32,
    pub(crate) pm_timer: bool,
}

/// Loads the firmware and gives the boot processor's registers at its entry,
/// and the range that its image takes.
pub(crate) fn load(
    mem: &GuestMemory,
    request: &FirmwareRequest,
    around: Surroundings,
) -> Result<(InitialState, Span), BootError> {
    let image = match &request.image {
        FirmwareImage::Builtin(bytes) => {
            Image::from_bytes(ROLE, "builtin".as_ref(), bytes.to_vec())
        }
        FirmwareImage::File(path) => Image::open(ROLE, path)?,
    };
    let program = parse(&image).map_err(|error| of_firmware(&image, error))?;
    let span = segments::load_where(&image, mem, &program.segments, |span| inside(&image, span))
        .map_err(|error| of_firmware(&image, error))?;
    let state = InitialState::firmware(program.entry);
    write_tables(mem, &state)?;
    let mut area = [0; config::SIZE];
    configuration(request, around)?.write(&mut area);
    write(mem, layout::CONFIG, &area)?;
    Ok((state, span))
}

const ROLE: &str = "firmware";

fn malformed(image: &Image, what: String) -> BootError {
    BootError::Firmware {
        path: image.path().to_owned(),
        what,
    }
}

/// Turns an error of the kernel readers into one about firmware.
fn of_firmware(image: &Image, error: BootError) -> BootError {
    match error {
        BootError::Malformed { what, .. } => malformed(image, what),
        BootError::NotAKernel { seen, .. } => malformed(image, format!("it is {seen}")),
        other => other,
    }
}

fn parse(image: &Image) -> Result<Program, BootError> {
    let head = image.head(SEARCH_LEN)?;
    if elf::is_elf(&head) {
        return parse_elf(image);
    }
    let magic = head.get(FLAT_MAGIC_AT..);
    if !magic.is_some_and(|rest| rest.starts_with(FLAT_MAGIC)) {
        let seen = what_is_it(&head);
        let what = format!("it is {seen}, and neither an ELF64 file nor a flat image");
        return Err(malformed(image, what));
    }
    let segment = LoadSegment {
        offset: 0,
        address: layout::IMAGE,
        linked: layout::IMAGE,
        file_len: image.len(),
        // The image's zeroed memory follows the file.
        memory_len: image.len().max(layout::IMAGE_SIZE),
    };
    Ok(Program {
        segments: vec![segment],
        entry: layout::IMAGE,
    })
}

fn parse_elf(image: &Image) -> Result<Program, BootError> {
    let elf = elf::parse(image)?;
    if !elf.is_64 {
        let what = "it is a 32-bit ELF file, and firmware is entered in 64-bit mode";
        return Err(malformed(image, what.into()));
    }
    let inside = |entry: &u64| {
        elf.segments
            .iter()
            .any(|s| (s.address..s.address.saturating_add(s.memory_len)).contains(entry))
    };
    let entry = elf.entry.filter(inside);
    let what = "its entry point lies in none of its segments";
    Ok(Program {
        entry: entry.ok_or_else(|| malformed(image, what.into()))?,
        segments: elf.segments,
    })
}

/// Checks that a part of the image lies where firmware may.
fn inside(image: &Image, span: Span) -> Result<(), BootError> {
    let end = layout::IMAGE + layout::IMAGE_SIZE;
    if span.start >= layout::IMAGE && span.end <= end {
        return Ok(());
    }
    let what = format!(
        "it wants {:#x}-{:#x}, and firmware's place is {:#x}-{end:#x}",
        span.start,
        span.end,
        layout::IMAGE
    );
    Err(malformed(image, what))
}

/// The descriptor table with the selectors of [`layout`], and the identity map.
fn write_tables(mem: &GuestMemory, state: &InitialState) -> Result<(), BootError> {
    let code_32 = SegmentRegister::flat(layout::CODE_32, SegmentRegister::CODE, false);
    let entries = [
        0,
        code_32.descriptor(),
        state.cs.descriptor(),
        state.data.descriptor(),
        state.tr.descriptor(),
        0,
    ];
    write(mem, state.gdt.base, &little_endian(&entries))?;
    Ok(write_page_tables(mem, state.cr3)?)
}

fn configuration(request: &FirmwareRequest, around: Surroundings) -> Result<Config, BootError> {
    let limit = config::MAX_CPUS;
    let cpus = u8::try_from(around.cpus)
        .ok()
        .filter(|&cpus| usize::from(cpus) <= limit)
        .ok_or(BootError::CpuCount {
            cpus: around.cpus,
            limit: u32::try_from(limit).unwrap_or(u32::MAX),
        })?;
    let pm_timer = if around.pm_timer { PORTS.pm_timer } else { 0 };
    let mut config = Config::new(cpus, pm_timer, kernel_entry(around.kernel));
    config.delay_ms = request.delay_ms;
    for &counter in &request.counters {
        let count = request.counters.len();
        let limit = config::MAX_COUNTERS;
        config
            .push(counter)
            .map_err(|_| BootError::TooManyFirmwareCounters { count, limit })?;
    }
    Ok(config)
}

/// The kernel's registers, as the firmware has to set them.
fn kernel_entry(entry: BootEntry) -> KernelEntry {
    let state = entry.initial_state();
    let protocol = match entry {
        BootEntry::Linux64 { .. } => Protocol::Linux64,
        BootEntry::Pvh { .. } => Protocol::Pvh,
        BootEntry::Multiboot { .. } => Protocol::Multiboot,
    };
    let mode = if state.cs.long {
        Mode::Long
    } else {
        Mode::Protected
    };
    KernelEntry {
        protocol,
        mode,
        code: state.cs.selector,
        data: state.data.selector,
        gdt_base: state.gdt.base,
        gdt_limit: state.gdt.limit,
        rip: state.rip,
        rsp: state.rsp,
        rax: state.rax,
        rbx: state.rbx,
        rsi: state.rsi,
        cr0: state.cr0,
        cr3: state.cr3,
        cr4: state.cr4,
        efer: state.efer,
    }
}

#[cfg(test)]
mod tests;
