//! Machine code out of ELF files, which are not trusted.

use std::fs::File;
use std::path::Path;

use object::{Architecture, Object, ObjectSection, ObjectSegment, ReadRef, SectionFlags, elf};
use thiserror::Error;

use super::programs::FileInfo;
use super::symbols::elf::ElfData;
use super::symfs::{Symfs, SymfsError};

/// The most that is read for one symbol, in bytes; functions are far shorter.
pub(super) const MOST: u64 = 1 << 20;

/// Why the code of a symbol is not known. Prints as one line.
#[derive(Debug, Error)]
pub enum CodeError {
    /// Nobody said where programs are.
    #[error("give --symfs DIR: the guest's root, or a copy of what it has of this file")]
    NoSymfs,
    /// Nobody gave the kernel's code.
    #[error("give --vmlinux FILE: the guest's kernel as an ELF file with its code")]
    NoVmlinux,
    /// It is in a module of the kernel.
    #[error("the code of modules is not read; --vmlinux FILE has that of the kernel alone")]
    Module,
    /// It is in no file: the vDSO, or code that a program made.
    #[error("it is in no file")]
    NoFile,
    /// The file cannot be used.
    #[error("below --symfs: {0}")]
    Symfs(#[from] SymfsError),
    /// It is no ELF file.
    #[error("damaged ELF file: {0}")]
    Damaged(String),
    /// It is for another kind of processor.
    #[error("its code is not for x86: give the file that the guest has")]
    OtherProcessor,
    /// Only its names are there.
    #[error(
        "the file has no code at {0:#x}: it is a debug file, or of another build; give the file \
         that the guest ran"
    )]
    NotThere(u64),
    /// Addresses in the kernel's file and in the guest cannot be brought together.
    #[error(
        "the file of --vmlinux does not have the kernel's symbols at one distance, a multiple of \
         2 MiB, from where the guest has them: give the vmlinux of the guest's kernel, or \
         --kaslr-offset for one without symbols"
    )]
    OtherKernel,
}

/// Code of a symbol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Code {
    /// The address of the first byte in its file.
    pub(super) address: u64,
    /// As far as the file has it.
    pub(super) bytes: Vec<u8>,
    /// 32 or 64.
    pub(super) bitness: u32,
}

/// The code of a program from `address` to `end`, as its file counts.
pub(super) fn of_program(
    symfs: Option<&Symfs>,
    (info, others): (&FileInfo, &[&FileInfo]),
    (address, end): (u64, u64),
) -> Result<Code, CodeError> {
    if !info.is_file() {
        return Err(CodeError::NoFile);
    }
    let symfs = symfs.ok_or(CodeError::NoSymfs)?;
    let data = ElfData::new(symfs.of_build((info, others))?);
    between(&data, address, end)
}

/// The same of the file at `path`.
pub(super) fn of_file(path: &Path, (address, end): (u64, u64)) -> Result<Code, CodeError> {
    let file = File::open(path).map_err(|error| CodeError::Damaged(error.to_string()))?;
    between(&ElfData::new(file), address, end)
}

fn between<'data, R: ReadRef<'data>>(data: R, address: u64, end: u64) -> Result<Code, CodeError> {
    let damaged = |error: object::Error| CodeError::Damaged(error.to_string());
    let file = object::File::parse(data).map_err(damaged)?;
    let bitness = match file.architecture() {
        Architecture::X86_64 => 64,
        Architecture::I386 => 32,
        _ => return Err(CodeError::OtherProcessor),
    };
    // A debug file may have segments of code, but none of its sections is there.
    let mut sections = file.sections().filter(is_in_memory).peekable();
    let is_there = |section: &object::Section<'data, '_, R>| {
        let at = address.checked_sub(section.address());
        section.file_range().is_some() && at.is_some_and(|at| at < section.size())
    };
    if sections.peek().is_some() && !sections.any(|section| is_there(&section)) {
        return Err(CodeError::NotThere(address));
    }
    for segment in file.segments() {
        let (offset, size) = segment.file_range();
        let Some(at) = address.checked_sub(segment.address()) else {
            continue;
        };
        let there = size.saturating_sub(at);
        if there == 0 {
            continue;
        }
        let wanted = end.saturating_sub(address).min(there).min(MOST);
        let cut_off = || CodeError::Damaged("it ends before its code does".to_owned());
        let offset = offset.checked_add(at).ok_or_else(cut_off)?;
        // Not the segment's data: that would be all of it.
        let bytes = data.read_bytes_at(offset, wanted).map_err(|()| cut_off())?;
        return Ok(Code {
            address,
            bytes: bytes.to_vec(),
            bitness,
        });
    }
    Err(CodeError::NotThere(address))
}

/// Whether a section has a place in memory.
fn is_in_memory<'data, R: ReadRef<'data>>(section: &object::Section<'data, '_, R>) -> bool {
    match section.flags() {
        SectionFlags::Elf { sh_flags } => sh_flags & u64::from(elf::SHF_ALLOC) != 0,
        _ => false,
    }
}
