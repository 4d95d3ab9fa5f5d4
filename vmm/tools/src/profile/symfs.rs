//! Files of the guest's programs below folders of the host (`--symfs`), and their symbols.
//!
//! Names are the guest's and not trusted: they are resolved as if the folder was the root,
//! symbolic links included, so none of them leaves it (`root`).

mod root;

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use object::{Object, ObjectSegment, ReadRef};
use rustix::fs::{Mode, OFlags};
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
    /// It is a container's, and in no folder that was given.
    #[error("it is a container's: give --symfs {0}=DIR, that container's root or a copy")]
    Container(String),
    /// It is the root's, or what it is is not known, and in no folder that was given.
    #[error("no folder has {0}: give --symfs DIR, the guest's root or a copy")]
    Elsewhere(String),
    /// The guest ran several files of that name, and nothing tells which of them is there.
    #[error(
        "the guest ran two files of that name, this one with inode {1} on device {0}, and their \
         build ids are not known: give --symfs {0}=DIR, the root of the container with that device"
    )]
    Twins(String, u64),
}

/// What is wrong with the folders of `--symfs`.
#[derive(Debug, Error)]
pub enum NoSymfs {
    /// A folder cannot be opened.
    #[error("--symfs {}: {error}; give the folder that is the guest's root", path.display())]
    Open {
        /// Its name.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// Two are for the same.
    #[error("--symfs {} is for the same files as one before it: give one folder for {}", path.display(),
        if of.is_empty() { "the guest's root" } else { of })]
    Twice {
        /// As it was given.
        path: PathBuf,
        /// Which files it is for.
        of: String,
    },
}

impl From<elf::ElfError> for SymfsError {
    fn from(error: elf::ElfError) -> Self {
        match error {
            elf::ElfError::Stripped => Self::Stripped,
            error => Self::Elf(error),
        }
    }
}

/// Folders that have the guest's files: its root, and roots of containers or parts of either.
#[derive(Debug)]
pub struct Symfs {
    /// The longest name first.
    folders: Vec<Folder>,
}

/// A folder that has files of the guest.
#[derive(Debug)]
pub(super) struct Folder {
    /// What the names of its files begin with in the guest; empty: all of the guest's root.
    of: String,
    root: OwnedFd,
    path: PathBuf,
}

impl Folder {
    /// `argument` is a folder, or `PATH=FOLDER`. PATH begins at the guest's root, or with a
    /// device's number.
    fn open(argument: &Path) -> Result<Self, NoSymfs> {
        let bytes = argument.as_os_str().as_bytes();
        let equals = bytes.iter().position(|byte| *byte == b'=');
        let split = equals.and_then(|at| {
            let of = std::str::from_utf8(&bytes[..at]).ok()?;
            let is_place = of.starts_with(|first: char| first == '/' || first.is_ascii_digit());
            let folder = Path::new(OsStr::from_bytes(&bytes[at + 1..]));
            (is_place && !argument.is_dir()).then(|| (of.trim_end_matches('/'), folder))
        });
        let (of, path) = split.unwrap_or(("", argument));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty());
        let root = root.map_err(|error| NoSymfs::Open {
            path: path.to_owned(),
            error: error.into(),
        })?;
        Ok(Self {
            of: of.to_owned(),
            root,
            path: path.to_owned(),
        })
    }

    /// What `name` is called there, if it is one of its files.
    fn inside<'a>(&self, name: &'a str) -> Option<&'a str> {
        let rest = name.strip_prefix(&self.of)?;
        rest.starts_with('/').then_some(rest)
    }
}

impl Symfs {
    /// Of `arguments`, each a folder that is the guest's root, or `PATH=FOLDER`; none if there
    /// is no argument.
    ///
    /// # Errors
    /// One is no folder that can be opened, or two are for the same files.
    pub fn open(arguments: &[PathBuf]) -> Result<Option<Self>, NoSymfs> {
        let mut folders: Vec<Folder> = Vec::new();
        for argument in arguments {
            let folder = Folder::open(argument)?;
            if folders.iter().any(|other| other.of == folder.of) {
                return Err(NoSymfs::Twice {
                    path: argument.clone(),
                    of: folder.of,
                });
            }
            folders.push(folder);
        }
        folders.sort_by_key(|folder| std::cmp::Reverse(folder.of.len()));
        Ok((!folders.is_empty()).then_some(Self { folders }))
    }

    /// The folder that has `info`, or would have it, for messages.
    #[must_use]
    pub fn path(&self, info: &FileInfo) -> &Path {
        let found = self.folder(info).map(|(folder, _)| folder);
        let root = self.folders.last().filter(|folder| folder.of.is_empty());
        let any = found.or(root).or(self.folders.first());
        any.map_or(Path::new(""), |folder| &folder.path)
    }

    /// Where `info` is looked for: the folder and the name there.
    fn folder(&self, info: &FileInfo) -> Option<(&Folder, String)> {
        let names = [info.whole_name(), format!("{}{}", info.device(), info.name)];
        self.folders.iter().find_map(|folder| {
            let name = names.iter().find_map(|name| folder.inside(name))?;
            Some((folder, name.to_owned()))
        })
    }

    /// The regular file that the guest calls `name`, as if that was below its root.
    ///
    /// # Errors
    /// There is none below the folder, or it cannot be read.
    pub fn file(&self, name: &str) -> Result<File, SymfsError> {
        let root = self.folders.last().filter(|folder| folder.of.is_empty());
        let none = || SymfsError::Elsewhere(name.to_owned());
        root.ok_or_else(none)?.file(name)
    }

    fn of_name(&self, info: &FileInfo) -> Result<File, SymfsError> {
        let found = self.folder(info);
        let none = || match info.root.as_str() {
            "" => SymfsError::Elsewhere(info.name.clone()),
            root => SymfsError::Container(root.to_owned()),
        };
        let (folder, name) = found.ok_or_else(none)?;
        // The guest's root may have a container's, too.
        let is_guess = folder.of.is_empty() && !info.root.is_empty();
        folder.file(&name).map_err(|error| match error {
            SymfsError::Open(_) if is_guess => SymfsError::Container(info.root.clone()),
            error => error,
        })
    }
}

impl Folder {
    /// The names of what is in the folder that the guest calls `name`, at most `most`.
    pub(super) fn list(&self, name: &str, most: usize) -> io::Result<Vec<String>> {
        let fd = root::open(self.root.as_fd(), name.as_bytes())?;
        let entries = rustix::fs::Dir::read_from(fd)?.take(most);
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect()
    }

    /// Its name on this host.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The regular file that is called `name` there.
    pub(super) fn file(&self, name: &str) -> Result<File, SymfsError> {
        let fd = root::open(self.root.as_fd(), name.as_bytes()).map_err(io::Error::from)?;
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
}

impl Symfs {
    /// The program or library `info` of at most `most` symbols, with the symbols of its debug
    /// file where it was stripped and that one is there. `others` are further files of its name.
    ///
    /// # Errors
    /// [`SymfsError`] says why it has no symbols.
    pub fn program(
        &self,
        (info, others): (&FileInfo, &[&FileInfo]),
        most: usize,
    ) -> Result<ProgramFile, SymfsError> {
        let data = ElfData::new(self.of_build((info, others))?);
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
        let mut stripped = false;
        let raw = match elf::of_program(&file, elf::Table::Full, most) {
            Err(elf::ElfError::Stripped) => match self.debug_symbols(info, &build_id, most) {
                Some(raw) => raw,
                None => {
                    stripped = true;
                    elf::of_program(&file, elf::Table::Dynamic, most)?
                }
            },
            full => full?,
        };
        if data.is_used_up() {
            return Err(SymfsError::Elf(elf::ElfError::TooLong));
        }
        Ok(ProgramFile {
            build_id,
            segments,
            symbols: SymbolTable::new(raw, 0),
            stripped,
        })
    }

    /// The file `info` of names of code that was made, and the folder that has it; none if there
    /// is no such file.
    pub(super) fn code_map(&self, info: &FileInfo) -> Option<(Result<File, SymfsError>, &Path)> {
        match self.of_name(info) {
            Err(SymfsError::Open(error)) if error.kind() == io::ErrorKind::NotFound => None,
            Err(SymfsError::Elsewhere(_) | SymfsError::Container(_)) => None,
            found => Some((found, self.path(info))),
        }
    }

    /// Where the debug file of the program or library `info` belongs, below the folder that has
    /// it; none without a build id. `others` are further files of its name.
    pub(super) fn debug_place(&self, (info, others): (&FileInfo, &[&FileInfo])) -> Option<String> {
        let data = ElfData::new(self.of_build((info, others)).ok()?);
        let build_id = build_id(&object::File::parse(&data).ok()?).ok()?;
        debug_name(&build_id)
    }

    /// The folder that has `info`, and its name there.
    pub(super) fn place(&self, info: &FileInfo) -> Option<(&Folder, String)> {
        self.folder(info)
    }

    /// The file of the program or library `info`, of the build that the guest ran. `others` are
    /// further files of its name.
    ///
    /// # Errors
    /// There is none, or it is of another build.
    pub(super) fn of_build(
        &self,
        (info, others): (&FileInfo, &[&FileInfo]),
    ) -> Result<File, SymfsError> {
        if !info.build_id.is_empty() {
            let found = self.of_name(info).and_then(|file| of_id(file, info));
            // A container's program may be the very same build as the root's.
            let by_name = || of_id(self.file(&info.name).ok()?, info).ok();
            return found.or_else(|error| by_name().ok_or(error));
        }
        if info.deleted {
            return Err(SymfsError::Deleted);
        }
        let file = self.of_name(info)?;
        let place = |info| {
            let (folder, name) = self.folder(info)?;
            Some((&folder.of, name))
        };
        let here = place(info);
        if others.iter().any(|other| place(other) == here) && file.metadata()?.ino() != info.inode.1
        {
            return Err(SymfsError::Twins(info.device(), info.inode.1));
        }
        Ok(file)
    }

    /// The symbols of the debug file of a program that was stripped: in its own folder, or in
    /// another one.
    fn debug_symbols(
        &self,
        info: &FileInfo,
        build_id: &str,
        most: usize,
    ) -> Option<Vec<super::symbols::RawSymbol>> {
        let name = debug_name(build_id)?;
        let own = self.folder(info).map(|(folder, _)| folder);
        let mut folders = own.into_iter().chain(&self.folders);
        let data = ElfData::new(folders.find_map(|folder| folder.file(&name).ok())?);
        let file = object::File::parse(&data).ok()?;
        let symbols = elf::of_program(&file, elf::Table::Full, most).ok()?;
        (!data.is_used_up()).then_some(symbols)
    }
}

/// Where a debug file belongs, from the root on.
fn debug_name(build_id: &str) -> Option<String> {
    let (first, rest) = build_id
        .split_at_checked(2)
        .filter(|(_, rest)| !rest.is_empty())?;
    Some(format!("/usr/lib/debug/.build-id/{first}/{rest}.debug"))
}

/// `file`, if it has the build id of `info`.
fn of_id(file: File, info: &FileInfo) -> Result<File, SymfsError> {
    let data = ElfData::new(file);
    let own = build_id(&object::File::parse(&data).map_err(damaged)?)?;
    if own == info.build_id {
        return Ok(data.into_inner());
    }
    let own = if own.is_empty() { "none" } else { &own };
    Err(SymfsError::OtherBuild(
        own.to_owned(),
        info.build_id.clone(),
    ))
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
    build_id: String,
    segments: Vec<Segment>,
    symbols: SymbolTable,
    stripped: bool,
}

impl ProgramFile {
    /// It has only the names that it exports.
    #[must_use]
    pub fn is_stripped(&self) -> bool {
        self.stripped
    }

    /// The build id that it has itself, in hexadecimal digits; empty if it has none.
    #[must_use]
    pub fn build_id(&self) -> &str {
        &self.build_id
    }

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
