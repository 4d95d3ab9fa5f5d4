//! Files of the guest's programs below a folder of the host (`--symfs`), and their symbols.
//!
//! Names are the guest's and not trusted: they are resolved by the kernel as if the folder
//! was the root, symbolic links included, so none of them leaves it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use object::{Object, ObjectSegment, ReadRef};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use thiserror::Error;

use super::programs::FileInfo;
use super::symbols::elf::ElfData;
use super::symbols::{Found, SymbolIndex, SymbolTable, elf};

/// The longest file that is read.
const LONGEST: u64 = 8 << 30;

/// Why the symbols of a file are not known.
#[derive(Debug, Error)]
pub enum SymfsError {
    /// It cannot be opened.
    #[error("it cannot be read there: {0}")]
    Open(#[from] io::Error),
    /// It is no file.
    #[error("it is no regular file")]
    NoFile,
    /// It is longer than programs are.
    #[error("it is longer than 8 GiB")]
    TooLong,
    /// It cannot be read as ELF.
    #[error("{0}")]
    Elf(elf::ElfError),
    /// It has no symbols.
    #[error("it was stripped; put its debug file there, too: usr/lib/debug/.build-id/...")]
    Stripped,
    /// It is another build than the guest ran.
    #[error(
        "its build id is {0}, and the guest ran {1}: give the root of the guest as it was then"
    )]
    OtherBuild(String, String),
    /// The guest ran a file that was replaced, and its build id is not known.
    #[error("the guest had removed or replaced it, and the build id of what it ran is not known")]
    Deleted,
}

impl From<elf::ElfError> for SymfsError {
    fn from(error: elf::ElfError) -> Self {
        match error {
            elf::ElfError::Stripped => Self::Stripped,
            error => Self::Elf(error),
        }
    }
}

/// A folder that has the guest's files.
#[derive(Debug)]
pub struct Symfs {
    root: OwnedFd,
    path: PathBuf,
}

impl Symfs {
    /// The guest's root at `path`.
    ///
    /// # Errors
    /// It is no folder that can be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Self {
            root,
            path: path.to_owned(),
        })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The regular file that the guest calls `name`.
    ///
    /// # Errors
    /// There is none below the folder, or it cannot be read.
    pub fn file(&self, name: &str) -> Result<File, SymfsError> {
        // Nothing there makes the tool wait or act.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let mut tries = 0..8;
        let fd = loop {
            match openat2(&self.root, name, flags, Mode::empty(), resolve) {
                // Somebody renames while it is resolved.
                Err(Errno::AGAIN) if tries.next().is_some() => {}
                other => break other.map_err(io::Error::from)?,
            }
        };
        let file = File::from(fd);
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(SymfsError::NoFile);
        }
        if found.len() > LONGEST {
            return Err(SymfsError::TooLong);
        }
        Ok(file)
    }

    /// The program or library `info` of at most `most` symbols, with the symbols of its debug
    /// file where it was stripped and that one is there.
    ///
    /// # Errors
    /// [`SymfsError`] says why it has no symbols.
    pub fn program(&self, info: &FileInfo, most: usize) -> Result<ProgramFile, SymfsError> {
        let data = ElfData::new(self.of_build(info)?);
        let file = object::File::parse(&data).map_err(damaged)?;
        let build_id = build_id(&file)?;
        let segments = file.segments().map(|segment| {
            let (offset, size) = segment.file_range();
            Segment {
                offset,
                size,
                address: segment.address(),
            }
        });
        let segments = segments.collect();
        let raw = match elf::of_program(&file, elf::Table::Full, most) {
            Err(elf::ElfError::Stripped) => match self.debug_symbols(&build_id, most) {
                Some(raw) => raw,
                None => elf::of_program(&file, elf::Table::Dynamic, most)?,
            },
            full => full?,
        };
        if data.is_used_up() {
            return Err(SymfsError::Elf(elf::ElfError::TooLong));
        }
        Ok(ProgramFile {
            segments,
            symbols: SymbolTable::new(raw, 0),
        })
    }

    /// The file of the program or library `info`, of the build that the guest ran.
    ///
    /// # Errors
    /// There is none, or it is of another build.
    pub(super) fn of_build(&self, info: &FileInfo) -> Result<File, SymfsError> {
        if info.deleted && info.build_id.is_empty() {
            return Err(SymfsError::Deleted);
        }
        let data = ElfData::new(self.file(&info.name)?);
        if !info.build_id.is_empty() {
            let own = build_id(&object::File::parse(&data).map_err(damaged)?)?;
            if own != info.build_id {
                let own = if own.is_empty() { "none" } else { &own };
                return Err(SymfsError::OtherBuild(
                    own.to_owned(),
                    info.build_id.clone(),
                ));
            }
        }
        Ok(data.into_inner())
    }

    /// The symbols of the debug file of a program that was stripped.
    fn debug_symbols(&self, build_id: &str, most: usize) -> Option<Vec<super::symbols::RawSymbol>> {
        let (first, rest) = build_id
            .split_at_checked(2)
            .filter(|(_, rest)| !rest.is_empty())?;
        let name = format!("/usr/lib/debug/.build-id/{first}/{rest}.debug");
        let data = ElfData::new(self.file(&name).ok()?);
        let file = object::File::parse(&data).ok()?;
        let symbols = elf::of_program(&file, elf::Table::Full, most).ok()?;
        (!data.is_used_up()).then_some(symbols)
    }
}

fn damaged(error: object::Error) -> SymfsError {
    SymfsError::Elf(elf::ElfError::Damaged(error.to_string()))
}

/// Its build id in hexadecimal digits; empty if it has none.
fn build_id<'data, R: ReadRef<'data>>(file: &object::File<'data, R>) -> Result<String, SymfsError> {
    let id = file.build_id().map_err(damaged)?.unwrap_or_default();
    Ok(id.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Part of a file that a program has in memory.
#[derive(Clone, Copy, Debug)]
struct Segment {
    offset: u64,
    size: u64,
    address: u64,
}

/// A program or library with symbols.
#[derive(Debug, Default)]
pub struct ProgramFile {
    segments: Vec<Segment>,
    symbols: SymbolTable,
}

impl ProgramFile {
    /// The address that the file itself gives to what is at `offset` in it.
    #[must_use]
    pub fn address(&self, offset: u64) -> Option<u64> {
        let inside = |one: &&Segment| {
            offset
                .checked_sub(one.offset)
                .is_some_and(|at| at < one.size)
        };
        let segment = self.segments.iter().find(inside)?;
        Some(segment.address.wrapping_add(offset - segment.offset))
    }

    /// The symbol of what is at `offset` in the file.
    #[must_use]
    pub fn find(&self, offset: u64) -> Option<Found> {
        self.symbols.find(self.address(offset)?)
    }

    /// The name of one of its symbols.
    #[must_use]
    pub fn name(&self, symbol: SymbolIndex) -> &str {
        self.symbols.name(symbol)
    }

    /// Its symbols.
    #[must_use]
    pub fn symbols(&self) -> &SymbolTable {
        &self.symbols
    }
}
