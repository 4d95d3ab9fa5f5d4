//! Multiboot v1 (Multiboot Specification 0.6.96): finding and checking a kernel's header, and the
//! information structure that the kernel gets.

use super::elf::{self, Elf};
use super::error::BootError;
use super::image::Image;
use super::memory::{
    BOOT_INFO_START, CMDLINE_START, GuestMemory, HIGH_MEMORY_START, MODULE_LIST_SIZE,
    MODULE_LIST_START, Region, low_end, write,
};
use super::segments::{Segment, Span, physical_entry};
use super::wire::{put, u32_at};

/// What EAX holds when the kernel starts.
pub(crate) const BOOTLOADER_MAGIC: u32 = 0x2bad_b002;
/// The header lies within this many bytes.
pub(crate) const SEARCH_LEN: usize = 8192;
/// How many modules the table holds.
pub(crate) const MAX_MODULES: usize = MODULE_LIST_SIZE / MODULE_ENTRY_SIZE;

const HEADER_MAGIC: u32 = 0x1bad_b002;
/// Magic, flags, checksum.
const HEADER_LEN: usize = 12;
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

const INFO_SIZE: usize = 116;
const INFO_MEMORY: u32 = 1 << 0;
const INFO_CMDLINE: u32 = 1 << 2;
const INFO_MODULES: u32 = 1 << 3;
const INFO_MMAP: u32 = 1 << 6;
const INFO_LOADER_NAME: u32 = 1 << 9;
const LOADER_NAME: &[u8] = b"Umpire\0";
const LOADER_NAME_START: u64 = BOOT_INFO_START + 0x80;
const MMAP_START: u64 = BOOT_INFO_START + 0x100;
const MODULE_ENTRY_SIZE: usize = 16;

/// A Multiboot kernel's parts.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MultibootKernel {
    /// Guest-physical entry point, if it lies in a segment.
    pub(crate) entry: Option<u64>,
    /// What to load.
    pub(crate) segments: Vec<Segment>,
}

/// A header whose checksum is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
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
pub(crate) fn find_header(head: &[u8]) -> Option<Header> {
    let head = &head[..head.len().min(SEARCH_LEN)];
    (0..head.len().saturating_sub(HEADER_LEN - 1))
        .step_by(4)
        .find_map(|offset| {
            let word = |number: usize| u32_at(head, offset + number * 4);
            let (magic, flags, checksum) = (word(0)?, word(1)?, word(2)?);
            let sum = magic.wrapping_add(flags).wrapping_add(checksum);
            (magic == HEADER_MAGIC && sum == 0).then_some(Header { offset, flags })
        })
}

/// Reads what to load, from the header itself or from the ELF file around it.
pub(crate) fn parse(image: &Image, header: Header) -> Result<MultibootKernel, BootError> {
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
fn parse_addresses(image: &Image, header: Header) -> Result<MultibootKernel, BootError> {
    let malformed = |what: &str| BootError::Malformed {
        path: image.path().to_owned(),
        what: what.into(),
    };
    let fields = image.read(
        (header.offset + HEADER_LEN) as u64,
        20,
        "the Multiboot header",
    )?;
    let field = |number: usize| u64::from(u32_at(&fields, number * 4).unwrap_or_default());
    let [header_addr, load_addr, load_end, bss_end, entry] = [0, 1, 2, 3, 4].map(field);
    let offset = header_addr
        .checked_sub(load_addr)
        .and_then(|before| (header.offset as u64).checked_sub(before))
        .ok_or_else(|| malformed("its Multiboot header's load_addr precedes the file"))?;
    // 0 stands for "to the end of the file" and "nothing to clear".
    let file_len = match load_end {
        0 => image.len() - offset,
        end => end
            .checked_sub(load_addr)
            .ok_or_else(|| malformed("its Multiboot header's load_end_addr precedes load_addr"))?,
    };
    let memory_len = match bss_end {
        0 => file_len,
        end => end
            .checked_sub(load_addr)
            .filter(|&len| len >= file_len)
            .ok_or_else(|| malformed("its Multiboot header's bss_end_addr precedes the data"))?,
    };
    let segments = vec![Segment {
        offset,
        address: load_addr,
        linked: load_addr,
        file_len,
        memory_len,
    }];
    Ok(MultibootKernel {
        entry: physical_entry(&segments, entry),
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
    let mut mmap = Vec::new();
    for region in regions {
        // The size field does not count itself.
        mmap.extend(20u32.to_le_bytes());
        mmap.extend(region.start.to_le_bytes());
        mmap.extend(region.len.to_le_bytes());
        mmap.extend(region.kind.e820_type().to_le_bytes());
    }
    let mut table = Vec::new();
    for module in modules {
        for word in [module.span.start, module.span.end, module.string, 0] {
            table.extend(word32(word));
        }
    }
    write(mem, MODULE_LIST_START, &table)?;
    write(mem, LOADER_NAME_START, LOADER_NAME)?;
    write(mem, MMAP_START, &mmap)?;

    let flags = INFO_MEMORY | INFO_CMDLINE | INFO_MODULES | INFO_MMAP | INFO_LOADER_NAME;
    let fields = [
        (0, u64::from(flags)),
        (4, regions.first().map_or(0, |region| region.len) / 1024),
        (8, (low_end(mem)? - HIGH_MEMORY_START) / 1024),
        (16, CMDLINE_START),
        (20, modules.len() as u64),
        (24, MODULE_LIST_START),
        (44, mmap.len() as u64),
        (48, MMAP_START),
        (64, LOADER_NAME_START),
    ];
    let mut info = [0; INFO_SIZE];
    for (offset, value) in fields {
        put(&mut info, offset, &word32(value));
    }
    Ok(write(mem, BOOT_INFO_START, &info)?)
}

/// Everything that is told to the kernel lies below the hole, so the upper half is 0.
fn word32(value: u64) -> [u8; 4] {
    let [a, b, c, d, ..] = value.to_le_bytes();
    [a, b, c, d]
}

#[cfg(test)]
mod tests;
