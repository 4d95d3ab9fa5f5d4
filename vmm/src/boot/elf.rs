//! ELF executables of 32 and 64 bits, as kernels use them.
//!
//! The structures are those of `object`; linux-loader's loader knows only 64 bits and adds
//! file offsets unchecked.

use std::mem::offset_of;

use object::LittleEndian;
use object::elf::{
    ELFCLASS32, ELFCLASS64, ELFDATA2LSB, ELFDATA2MSB, ELFMAG, EM_386, EM_X86_64, ET_CORE, ET_DYN,
    ET_EXEC, ET_REL, FileHeader32, FileHeader64, Ident, PT_INTERP, PT_LOAD, PT_NOTE,
};
use object::pod::{self, Pod};
use object::read::elf::{FileHeader, NoteIterator, ProgramHeader};

use super::error::BootError;
use super::image::Image;
use super::segments::{LoadSegment, physical_entry};

/// Xen's note with the address of a 32-bit entry point (`XEN_ELFNOTE_PHYS32_ENTRY`).
const PHYS32_ENTRY: u32 = 18;
const EI_CLASS: usize = offset_of!(Ident, class);
const EI_DATA: usize = offset_of!(Ident, data);
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
    pub(crate) segments: Vec<LoadSegment>,
    /// Entry point for PVH, from its note.
    pub(crate) pvh_entry: Option<u64>,
}

/// Whether the bytes begin like an ELF file.
pub(crate) fn is_elf(head: &[u8]) -> bool {
    head.starts_with(&ELFMAG)
}

/// Reads the headers of an x86 executable.
pub(crate) fn parse(image: &Image) -> Result<Elf, BootError> {
    // Identification, type and machine lie alike in both classes.
    const COMMON: usize = offset_of!(FileHeader32<LittleEndian>, e_version);
    let bytes = image.read(0, COMMON, "the ELF header")?;
    match (bytes[EI_CLASS], bytes[EI_DATA]) {
        (ELFCLASS32, ELFDATA2LSB) => parse_class::<FileHeader32<LittleEndian>>(image, EM_386),
        (ELFCLASS64, ELFDATA2LSB) => parse_class::<FileHeader64<LittleEndian>>(image, EM_X86_64),
        (_, ELFDATA2MSB) => Err(foreign(image, "a big-endian ELF file")),
        _ => Err(malformed(
            image,
            "its ELF class or data encoding is unknown",
        )),
    }
}

fn foreign(image: &Image, seen: impl Into<String>) -> BootError {
    BootError::NotAKernel {
        path: image.path().to_owned(),
        seen: seen.into(),
    }
}

fn malformed(image: &Image, what: &str) -> BootError {
    BootError::Malformed {
        path: image.path().to_owned(),
        what: what.into(),
    }
}

/// The structure at the start of bytes that were read for it.
fn structure<T: Pod>(bytes: &[u8]) -> &T {
    let (structure, _) = pod::from_bytes(bytes).expect("as many bytes were read");
    structure
}

fn parse_class<H>(image: &Image, machine: u16) -> Result<Elf, BootError>
where
    H: FileHeader<Endian = LittleEndian>,
{
    const LE: LittleEndian = LittleEndian;
    let bytes = image.read(0, size_of::<H>(), "the ELF header")?;
    let header: &H = structure(&bytes);
    if header.e_machine(LE) != machine {
        return Err(foreign(
            image,
            format!(
                "an ELF file for another machine (e_machine {})",
                header.e_machine(LE)
            ),
        ));
    }
    match header.e_type(LE) {
        ET_EXEC | ET_DYN => {}
        ET_REL => return Err(foreign(image, "an ELF object file, not linked yet")),
        ET_CORE => return Err(foreign(image, "an ELF core dump")),
        _ => return Err(malformed(image, "its ELF type is unknown")),
    }
    if usize::from(header.e_phentsize(LE)) != size_of::<H::ProgramHeader>() {
        return Err(malformed(image, "its program headers have an unknown size"));
    }
    let table = image.read(
        header.e_phoff(LE).into(),
        usize::from(header.e_phnum(LE)) * size_of::<H::ProgramHeader>(),
        "the program headers",
    )?;

    let mut segments = Vec::new();
    let mut pvh_entry = None;
    for entry in table.chunks_exact(size_of::<H::ProgramHeader>()) {
        let entry: &H::ProgramHeader = structure(entry);
        let (file_len, memory_len) = (entry.p_filesz(LE).into(), entry.p_memsz(LE).into());
        match entry.p_type(LE) {
            PT_LOAD if memory_len > 0 || file_len > 0 => {
                segments.push(LoadSegment {
                    offset: entry.p_offset(LE).into(),
                    address: entry.p_paddr(LE).into(),
                    linked: entry.p_vaddr(LE).into(),
                    file_len,
                    memory_len,
                });
            }
            PT_NOTE => {
                let len = usize::try_from(file_len).unwrap_or(MAX_NOTES);
                let offset = entry.p_offset(LE).into();
                let notes = image.read(offset, len.min(MAX_NOTES), "the notes")?;
                let alignment = if entry.p_align(LE).into() == 8 { 8 } else { 4 };
                pvh_entry = pvh_entry.or_else(|| find_pvh_entry(&notes, alignment));
            }
            PT_INTERP => return Err(foreign(image, "a program for Linux, not Linux itself")),
            _ => {}
        }
    }
    let entry = physical_entry(&segments, header.e_entry(LE).into());
    Ok(Elf {
        is_64: H::is_type_64_sized(),
        entry,
        segments,
        pvh_entry,
    })
}

/// Looks for the PVH entry point among ELF notes, which lie alike in both classes.
fn find_pvh_entry(notes: &[u8], alignment: u64) -> Option<u64> {
    const LE: LittleEndian = LittleEndian;
    let notes = NoteIterator::<FileHeader64<LittleEndian>>::new(LE, alignment, notes).ok()?;
    let note = notes
        .map_while(Result::ok)
        .find(|note| note.n_type(LE) == PHYS32_ENTRY && note.name_bytes() == b"Xen\0")?;
    match *note.desc() {
        [a, b, c, d] | [a, b, c, d, 0, 0, 0, 0] => Some(u32::from_le_bytes([a, b, c, d]).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::boot::testing::{ElfBuilder, note};

    const E_TYPE: usize = offset_of!(FileHeader64<LittleEndian>, e_type);
    const E_MACHINE: usize = offset_of!(FileHeader64<LittleEndian>, e_machine);

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
