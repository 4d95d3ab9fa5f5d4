//! ELF executables of 32 and 64 bits, as kernels use them.
//!
//! Written here rather than taken from linux-loader, whose loader knows only 64 bits and adds
//! file offsets unchecked.

use linux_loader::elf as abi;

use super::error::BootError;
use super::image::Image;
use super::segments::{Segment, physical_entry};
use super::wire::{align_up, u16_at, u32_at, u64_at};

/// Xen's note with the address of a 32-bit entry point (`XEN_ELFNOTE_PHYS32_ENTRY`).
const PHYS32_ENTRY: u32 = 18;
/// Kernels have notes of some hundred bytes; more is not searched.
const MAX_NOTES: usize = 1 << 16;

/// What of an ELF file matters for booting it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Elf {
    /// 64-bit class.
    pub(crate) is_64: bool,
    /// Guest-physical address of the entry point, if it lies in a segment.
    pub(crate) entry: Option<u64>,
    /// Loadable segments that are not empty.
    pub(crate) segments: Vec<Segment>,
    /// Entry point for PVH, from its note.
    pub(crate) pvh_entry: Option<u64>,
}

/// Whether the bytes begin like an ELF file.
pub(crate) fn is_elf(head: &[u8]) -> bool {
    head.starts_with(b"\x7fELF")
}

/// Where the fields of a class lie, in bytes from the start of their structure.
struct Layout {
    is_64: bool,
    header_len: usize,
    program_header_len: usize,
    e_phoff: usize,
    e_phentsize: usize,
    p_offset: usize,
    p_vaddr: usize,
    p_paddr: usize,
    p_filesz: usize,
    p_memsz: usize,
    p_align: usize,
}

/// System V ABI, chapters "Object Files" and "Program Loading".
const LAYOUT_32: Layout = Layout {
    is_64: false,
    header_len: 52,
    program_header_len: 32,
    e_phoff: 28,
    e_phentsize: 42,
    p_offset: 4,
    p_vaddr: 8,
    p_paddr: 12,
    p_filesz: 16,
    p_memsz: 20,
    p_align: 28,
};
const LAYOUT_64: Layout = Layout {
    is_64: true,
    header_len: 64,
    program_header_len: 56,
    e_phoff: 32,
    e_phentsize: 54,
    p_offset: 8,
    p_vaddr: 16,
    p_paddr: 24,
    p_filesz: 32,
    p_memsz: 40,
    p_align: 48,
};
const EI_CLASS: usize = 4;
const EI_DATA: usize = 5;
const E_TYPE: usize = 16;
const E_MACHINE: usize = 18;
const E_ENTRY: usize = 24;

impl Layout {
    /// A field of address size.
    fn word(&self, data: &[u8], offset: usize) -> Option<u64> {
        if self.is_64 {
            u64_at(data, offset)
        } else {
            u32_at(data, offset).map(u64::from)
        }
    }
}

/// Reads the headers of an x86 executable.
pub(crate) fn parse(image: &Image) -> Result<Elf, BootError> {
    let foreign = |seen: String| BootError::NotAKernel {
        path: image.path().to_owned(),
        seen,
    };
    let malformed = |what: &str| BootError::Malformed {
        path: image.path().to_owned(),
        what: what.into(),
    };
    let ident = image.read(0, 20, "the ELF header")?;
    let layout = match (ident[EI_CLASS], ident[EI_DATA]) {
        (1, 1) => LAYOUT_32,
        (2, 1) => LAYOUT_64,
        (_, 2) => return Err(foreign("a big-endian ELF file".into())),
        _ => return Err(malformed("its ELF class or data encoding is unknown")),
    };
    let header = image.read(0, layout.header_len, "the ELF header")?;
    let half = |offset| u16_at(&header, offset).unwrap_or_default();
    match (half(E_MACHINE), layout.is_64) {
        (abi::EM_X86_64, true) | (abi::EM_386, false) => {}
        (machine, _) => {
            return Err(foreign(format!(
                "an ELF file for another machine (e_machine {machine})"
            )));
        }
    }
    match half(E_TYPE) {
        abi::ET_EXEC | abi::ET_DYN => {}
        abi::ET_REL => return Err(foreign("an ELF object file, not linked yet".into())),
        abi::ET_CORE => return Err(foreign("an ELF core dump".into())),
        _ => return Err(malformed("its ELF type is unknown")),
    }
    if usize::from(half(layout.e_phentsize)) != layout.program_header_len {
        return Err(malformed("its program headers have an unknown size"));
    }
    let word = |offset| layout.word(&header, offset).unwrap_or_default();
    let count = usize::from(half(layout.e_phentsize + 2));
    let table = image.read(
        word(layout.e_phoff),
        count * layout.program_header_len,
        "the program headers",
    )?;

    let mut segments = Vec::new();
    let mut pvh_entry = None;
    for entry in table.chunks_exact(layout.program_header_len) {
        let word = |offset| layout.word(entry, offset).unwrap_or_default();
        match u32_at(entry, 0).unwrap_or_default() {
            abi::PT_LOAD if word(layout.p_memsz) > 0 || word(layout.p_filesz) > 0 => {
                segments.push(Segment {
                    offset: word(layout.p_offset),
                    address: word(layout.p_paddr),
                    linked: word(layout.p_vaddr),
                    file_len: word(layout.p_filesz),
                    memory_len: word(layout.p_memsz),
                });
            }
            abi::PT_NOTE => {
                let len = usize::try_from(word(layout.p_filesz)).unwrap_or(MAX_NOTES);
                let notes = image.read(word(layout.p_offset), len.min(MAX_NOTES), "the notes")?;
                let alignment = if word(layout.p_align) == 8 { 8 } else { 4 };
                pvh_entry = pvh_entry.or(find_pvh_entry(&notes, alignment));
            }
            abi::PT_INTERP => return Err(foreign("a program for Linux, not Linux itself".into())),
            _ => {}
        }
    }
    let entry = physical_entry(&segments, word(E_ENTRY));
    Ok(Elf {
        is_64: layout.is_64,
        entry,
        segments,
        pvh_entry,
    })
}

/// Walks ELF notes: three words (name length, content length, type), the name, the content.
fn find_pvh_entry(notes: &[u8], alignment: u64) -> Option<u64> {
    let mut at = 0;
    loop {
        let name_len = u32_at(notes, at)?;
        let content_len = u32_at(notes, at + 4)?;
        let kind = u32_at(notes, at + 8)?;
        let name = at + 12;
        let content =
            usize::try_from(align_up((name as u64) + u64::from(name_len), alignment)?).ok()?;
        if kind == PHYS32_ENTRY && notes.get(name..)?.starts_with(b"Xen\0") && name_len == 4 {
            return match content_len {
                4 => u32_at(notes, content).map(u64::from),
                8 => u64_at(notes, content).filter(|&entry| entry <= u32::MAX.into()),
                _ => None,
            };
        }
        at = usize::try_from(align_up(
            (content as u64) + u64::from(content_len),
            alignment,
        )?)
        .ok()?;
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::boot::testing::{ElfBuilder, note};

    fn check(bytes: Vec<u8>, expected: Result<(Option<u64>, usize, Option<u64>), &str>) {
        let image = Image::from_bytes("kernel", Path::new("k"), bytes);
        let result = parse(&image).map(|elf| (elf.entry, elf.segments.len(), elf.pvh_entry));
        match (result, expected) {
            (Ok(result), Ok(expected)) => assert_eq!(result, expected),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (result, expected) => panic!("{result:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn both_classes_are_read() {
        for builder in [ElfBuilder::elf32(), ElfBuilder::elf64()] {
            let builder = builder.entry(0x10_0004).segment(0x10_0000, b"code....", 64);
            check(builder.build(), Ok((Some(0x10_0004), 1, None)));
            let with_note = builder.notes(&note(b"Xen\0", 18, &0x10_0000u32.to_le_bytes()));
            check(with_note.build(), Ok((Some(0x10_0004), 1, Some(0x10_0000))));
        }
    }

    #[test]
    fn foreign_files_are_named() {
        let elf = || {
            ElfBuilder::elf64()
                .entry(0x10_0000)
                .segment(0x10_0000, b"code", 4)
        };
        let patched = |offset: usize, value: u8| {
            let mut bytes = elf().build();
            bytes[offset] = value;
            bytes
        };
        check(patched(EI_DATA, 2), Err("big-endian"));
        check(patched(EI_CLASS, 9), Err("class"));
        check(
            patched(E_MACHINE, 183),
            Err("another machine (e_machine 183)"),
        );
        check(patched(E_TYPE, 1), Err("object file"));
        check(patched(E_TYPE, 4), Err("core dump"));
        check(patched(54, 55), Err("unknown size"));
        check(elf().interpreter().build(), Err("a program for Linux"));
        check(elf().build()[..30].to_vec(), Err("the ELF header ends"));
        check(
            elf().build()[..100].to_vec(),
            Err("the program headers ends"),
        );
    }

    #[test]
    fn an_entry_outside_every_segment_is_none() {
        let elf = ElfBuilder::elf64()
            .entry(0x20_0000)
            .segment(0x10_0000, b"code", 4);
        check(elf.build(), Ok((None, 1, None)));
    }

    #[test]
    fn notes_of_others_are_skipped() {
        let entry = 0x1234_5678u64.to_le_bytes();
        let mut notes = note(b"GNU\0", 18, b"12345");
        notes.extend(note(b"Linux\0", 0x101, &[]));
        notes.extend(note(b"Xen\0", 6, b"linux\0"));
        assert_eq!(find_pvh_entry(&notes, 4), None);
        notes.extend(note(b"Xen\0", 18, &entry));
        assert_eq!(find_pvh_entry(&notes, 4), Some(0x1234_5678));
        assert_eq!(find_pvh_entry(&notes[..notes.len() - 1], 4), None);
        assert_eq!(
            find_pvh_entry(&note(b"Xen\0", 18, &u64::MAX.to_le_bytes()), 4),
            None
        );
        assert_eq!(find_pvh_entry(&[0xff; 64], 4), None);
    }
}
