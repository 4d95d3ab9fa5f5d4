//! Multiboot v1 (Multiboot Specification 0.6.96): finding and checking a kernel's header, and the
//! information structure that the kernel gets.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::elf::{self, Elf};
use super::error::BootError;
use super::image::Image;
use super::memory::{
    BOOT_INFO_START, CMDLINE_START, GuestMemory, HIGH_MEMORY_START, MODULE_LIST_SIZE,
    MODULE_LIST_START, Region, low_end, write,
};
use super::segments::{LoadSegment, Span, physical_entry};

/// What EAX holds when the kernel starts.
pub(crate) const BOOTLOADER_MAGIC: u32 = 0x2bad_b002;
/// The header lies within this many bytes.
pub(crate) const SEARCH_LEN: usize = 8192;
/// How many modules the table holds.
pub(crate) const MAX_MODULES: usize = MODULE_LIST_SIZE / size_of::<ModuleEntry>();

const HEADER_MAGIC: u32 = 0x1bad_b002;
/// Header flags: modules begin on pages (they always do here).
const ALIGN_MODULES: u32 = 1 << 0;
/// Header flags: memory sizes are wanted (they are always there).
const MEMORY_INFO: u32 = 1 << 1;
/// Header flags: a video mode is wanted.
const VIDEO_MODE: u32 = 1 << 2;
/// Header flags: a loader that does not know one of these must refuse.
const MANDATORY: u32 = 0xffff;
/// Header flags: load addresses are in the header ("a.out kludge").
const ADDRESSES: u32 = 1 << 16;

const INFO_MEMORY: u32 = 1 << 0;
const INFO_CMDLINE: u32 = 1 << 2;
const INFO_MODULES: u32 = 1 << 3;
const INFO_MMAP: u32 = 1 << 6;
const INFO_LOADER_NAME: u32 = 1 << 9;
const LOADER_NAME: &[u8] = b"Umpire\0";
const LOADER_NAME_START: u64 = BOOT_INFO_START + 0x80;
const MMAP_START: u64 = BOOT_INFO_START + 0x100;

/// The fields that begin every header (3.1.1).
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct HeaderStart {
    magic: U32,
    flags: U32,
    checksum: U32,
}

/// The load addresses that follow the header where [`ADDRESSES`] is set.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct LoadAddresses {
    header_addr: U32,
    load_addr: U32,
    load_end_addr: U32,
    bss_end_addr: U32,
    entry_addr: U32,
}

/// The information structure (3.3).
#[derive(Default, Immutable, IntoBytes)]
#[repr(C)]
struct Information {
    flags: U32,
    mem_lower: U32,
    mem_upper: U32,
    boot_device: U32,
    cmdline: U32,
    mods_count: U32,
    mods_addr: U32,
    syms: [U32; 4],
    mmap_length: U32,
    mmap_addr: U32,
    drives: [U32; 2],
    config_table: U32,
    boot_loader_name: U32,
    apm_table: U32,
    /// VBE and frame buffer: this machine has no display.
    graphics: [U32; 11],
}

/// An entry of the memory map.
#[derive(Immutable, IntoBytes)]
#[repr(C)]
struct MmapEntry {
    size: U32,
    base_addr: U64,
    length: U64,
    kind: U32,
}

/// An entry of the module table.
#[derive(Immutable, IntoBytes)]
#[repr(C)]
struct ModuleEntry {
    mod_start: U32,
    mod_end: U32,
    string: U32,
    reserved: U32,
}

/// A Multiboot kernel's parts.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MultibootKernel {
    /// Guest-physical entry point, if it lies in a segment.
    pub(crate) entry: Option<u64>,
    pub(crate) segments: Vec<LoadSegment>,
}

/// A header whose checksum is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MultibootHeader {
    offset: usize,
    flags: u32,
}

/// A module in memory, and where its string lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoadedModule {
    pub(crate) span: Span,
    pub(crate) string: u64,
}

/// Finds the header in the start of a file.
pub(crate) fn find_header(head: &[u8]) -> Option<MultibootHeader> {
    let head = &head[..head.len().min(SEARCH_LEN)];
    (0..head.len()).step_by(4).find_map(|offset| {
        let (start, _) = HeaderStart::ref_from_prefix(&head[offset..]).ok()?;
        let (magic, flags) = (start.magic.get(), start.flags.get());
        let sum = magic.wrapping_add(flags).wrapping_add(start.checksum.get());
        (magic == HEADER_MAGIC && sum == 0).then_some(MultibootHeader { offset, flags })
    })
}

/// Reads what to load, from the header itself or from the ELF file around it.
pub(crate) fn parse(image: &Image, header: MultibootHeader) -> Result<MultibootKernel, BootError> {
    let unsupported = |what: String| BootError::Unsupported {
        path: image.path().to_owned(),
        what,
    };
    let unknown = header.flags & MANDATORY & !(ALIGN_MODULES | MEMORY_INFO);
    if unknown & VIDEO_MODE != 0 {
        let what = "its Multiboot header demands a video mode (flag bit 2) and this machine has \
                    no display; build it without";
        return Err(unsupported(what.into()));
    }
    if unknown != 0 {
        return Err(unsupported(format!(
            "its Multiboot header demands unknown features (flags {unknown:#x}); build it without"
        )));
    }
    if header.flags & ADDRESSES != 0 {
        return parse_addresses(image, header);
    }
    if !elf::is_elf(&image.head(4)?) {
        return Err(BootError::Malformed {
            path: image.path().to_owned(),
            what: "it has a Multiboot header without load addresses and is no ELF file".into(),
        });
    }
    let Elf {
        entry, segments, ..
    } = elf::parse(image)?;
    Ok(MultibootKernel { entry, segments })
}

/// The header's own addresses: `header_addr`, `load_addr`, `load_end_addr`, `bss_end_addr`,
/// `entry_addr`.
fn parse_addresses(image: &Image, header: MultibootHeader) -> Result<MultibootKernel, BootError> {
    let malformed = |what: &str| BootError::Malformed {
        path: image.path().to_owned(),
        what: what.into(),
    };
    let fields = image.read(
        (header.offset + size_of::<HeaderStart>()) as u64,
        size_of::<LoadAddresses>(),
        "the Multiboot header",
    )?;
    let addresses = LoadAddresses::ref_from_bytes(&fields).expect("as many bytes were read");
    let load_addr = u64::from(addresses.load_addr);
    let offset = u64::from(addresses.header_addr)
        .checked_sub(load_addr)
        .and_then(|before| (header.offset as u64).checked_sub(before))
        .ok_or_else(|| malformed("its Multiboot header's load_addr precedes the file"))?;
    // 0 stands for "to the end of the file" and "nothing to clear".
    let file_len = match u64::from(addresses.load_end_addr) {
        0 => image.len() - offset,
        end => end
            .checked_sub(load_addr)
            .ok_or_else(|| malformed("its Multiboot header's load_end_addr precedes load_addr"))?,
    };
    let memory_len = match u64::from(addresses.bss_end_addr) {
        0 => file_len,
        end => end
            .checked_sub(load_addr)
            .filter(|&len| len >= file_len)
            .ok_or_else(|| malformed("its Multiboot header's bss_end_addr precedes the data"))?,
    };
    let segments = vec![LoadSegment {
        offset,
        address: load_addr,
        linked: load_addr,
        file_len,
        memory_len,
    }];
    Ok(MultibootKernel {
        entry: physical_entry(&segments, addresses.entry_addr.into()),
        segments,
    })
}

/// Writes the information structure, the memory map and the module table.
///
/// The caller has bounded the number of modules by [`MAX_MODULES`].
pub(crate) fn write_info(
    mem: &GuestMemory,
    modules: &[LoadedModule],
    regions: &[Region],
) -> Result<(), BootError> {
    let mmap: Vec<MmapEntry> = regions
        .iter()
        .map(|region| MmapEntry {
            // The size field does not count itself.
            size: 20.into(),
            base_addr: region.start.into(),
            length: region.len.into(),
            kind: region.kind.e820_type().into(),
        })
        .collect();
    let table: Vec<ModuleEntry> = modules
        .iter()
        .map(|module| ModuleEntry {
            mod_start: low_half(module.span.start),
            mod_end: low_half(module.span.end),
            string: low_half(module.string),
            reserved: 0.into(),
        })
        .collect();
    write(mem, MODULE_LIST_START, table.as_bytes())?;
    write(mem, LOADER_NAME_START, LOADER_NAME)?;
    write(mem, MMAP_START, mmap.as_bytes())?;

    let flags = INFO_MEMORY | INFO_CMDLINE | INFO_MODULES | INFO_MMAP | INFO_LOADER_NAME;
    let info = Information {
        flags: flags.into(),
        mem_lower: low_half(regions.first().map_or(0, |region| region.len) / 1024),
        mem_upper: low_half((low_end(mem)? - HIGH_MEMORY_START) / 1024),
        cmdline: low_half(CMDLINE_START),
        mods_count: low_half(modules.len() as u64),
        mods_addr: low_half(MODULE_LIST_START),
        mmap_length: low_half(mmap.as_bytes().len() as u64),
        mmap_addr: low_half(MMAP_START),
        boot_loader_name: low_half(LOADER_NAME_START),
        ..Information::default()
    };
    Ok(write(mem, BOOT_INFO_START, info.as_bytes())?)
}

/// Everything that the structure points at lies below the hole, so the upper half is 0.
fn low_half(value: u64) -> U32 {
    u32::try_from(value).unwrap_or(u32::MAX).into()
}

#[cfg(test)]
mod tests;
