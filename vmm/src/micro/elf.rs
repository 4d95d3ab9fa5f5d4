//! Kernel files: ELF with one loadable segment.

use object::Endianness;
use object::elf::{ELFOSABI_SYSV, EM_386, EM_X86_64, ET_EXEC, PF_R, PF_W, PF_X, PT_LOAD, PT_NOTE};
use object::write::Result;
use object::write::elf::{FileHeader, ProgramHeader, Writer};

/// File offset of the segment: inside the 8 KiB in which a Multiboot header is
/// searched.
const SEGMENT_OFFSET: usize = 0x1000;
const NOTE_OFFSET: usize = 0x200;

/// What the file of a small kernel holds.
#[derive(Debug)]
pub struct ElfImage<'a> {
    /// ELF64, else ELF32.
    pub is_64: bool,
    /// Where it is loaded.
    pub address: u32,
    /// Its first instruction.
    pub entry: u32,
    /// What is there.
    pub bytes: &'a [u8],
    /// Bytes in memory; what the file lacks is zero.
    pub size: u32,
    /// Contents of a note segment.
    pub note: &'a [u8],
}

impl ElfImage<'_> {
    /// The file.
    ///
    /// # Errors
    /// A part of it is too large for its format.
    pub fn file(&self) -> Result<Vec<u8>> {
        let image = self;
        let mut file = Vec::new();
        let mut writer = Writer::new(Endianness::Little, image.is_64, &mut file);
        writer.reserve_file_header();
        writer.reserve_program_headers(if image.note.is_empty() { 1 } else { 2 });
        writer.reserve_until(SEGMENT_OFFSET + image.bytes.len());
        writer.write_file_header(&FileHeader {
            os_abi: ELFOSABI_SYSV,
            abi_version: 0,
            e_type: ET_EXEC,
            e_machine: if image.is_64 { EM_X86_64 } else { EM_386 },
            e_entry: image.entry.into(),
            e_flags: 0,
        })?;
        writer.write_align_program_headers();
        let segment = |p_type, offset: usize, address: u32, file_len: usize, size: u32| {
            let (p_offset, p_filesz) = (offset as u64, file_len as u64);
            ProgramHeader {
                p_type,
                p_flags: PF_R | PF_W | PF_X,
                p_offset,
                p_vaddr: address.into(),
                p_paddr: address.into(),
                p_filesz,
                p_memsz: p_filesz.max(size.into()),
                p_align: 4,
            }
        };
        let load = segment(
            PT_LOAD,
            SEGMENT_OFFSET,
            image.address,
            image.bytes.len(),
            image.size,
        );
        writer.write_program_header(&load);
        if !image.note.is_empty() {
            let note = segment(PT_NOTE, NOTE_OFFSET, 0, image.note.len(), 0);
            writer.write_program_header(&note);
            writer.pad_until(NOTE_OFFSET);
            writer.write(image.note);
        }
        writer.pad_until(SEGMENT_OFFSET);
        writer.write(image.bytes);
        Ok(file)
    }
}
