//! What a guest's program changed, from the archive that the guest sends into a folder here. The
//! archive is hostile input: no name leaves the folder, nothing in it is followed, and its size is
//! bounded.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{self, AtFlags, Mode, OFlags};
use rustix::io::Errno;
use tar::EntryType;
use thiserror::Error;

/// Bytes of a block of an archive.
const BLOCK: u64 = 512;
/// Names in one archive.
const MOST_ENTRIES: usize = 1 << 20;
/// Names of more bytes are none of Linux's.
const LONGEST_NAME: usize = 4096;

/// What was unpacked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unpacked {
    /// Files that are there now, and links.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The first ten that were left out, and why.
    pub left_out: Vec<(Vec<u8>, &'static str)>,
    /// How many more were.
    pub more: u64,
}

/// The archive could not be unpacked, or not all of it.
#[derive(Debug, Error)]
pub enum UnpackError {
    /// It cannot be read, or is none.
    #[error("what the guest sent of its files cannot be read: {0}")]
    Archive(io::Error),
    /// It ends too early.
    #[error("the guest has not sent all of its files")]
    Short,
    /// It holds more than was allowed.
    #[error("the guest sent files of more than {limit} bytes")]
    Large {
        /// Bytes that were allowed.
        limit: u64,
    },
    /// It has too many names.
    #[error("the guest sent more than {MOST_ENTRIES} files")]
    Many,
    /// The folder here.
    #[error("{name}: {error}", name = String::from_utf8_lossy(.name))]
    Here {
        /// What was being written, below the folder.
        name: Vec<u8>,
        /// Why it could not be.
        #[source]
        error: io::Error,
    },
}

/// Unpacks an archive into `folder`, which is there: regular files, folders, and symbolic links
/// that stay in it. What is there is replaced, but for folders. Of the rights only those of
/// `chmod 777` are kept. `limit` bounds the bytes of all files.
///
/// # Errors
/// [`UnpackError`]. What was unpacked before stays.
pub fn unpack(archive: impl Read, folder: &Path, limit: u64) -> Result<Unpacked, UnpackError> {
    let here = |error| UnpackError::Here {
        name: folder.as_os_str().as_bytes().to_vec(),
        error,
    };
    let how = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = fs::open(folder, how, Mode::empty()).map_err(|errno| here(errno.into()))?;
    let mut target = Target {
        root,
        made: BTreeSet::new(),
        left: limit,
        limit,
        done: Unpacked::default(),
    };
    let mut counted = Counted {
        from: archive,
        read: 0,
    };
    let mut archive = tar::Archive::new(&mut counted);
    let mut end = 0;
    let entries = archive.entries().map_err(UnpackError::Archive)?;
    for (number, entry) in entries.enumerate() {
        if number == MOST_ENTRIES {
            return Err(UnpackError::Many);
        }
        let entry = entry.map_err(UnpackError::Archive)?;
        let size = entry.size().checked_next_multiple_of(BLOCK);
        end = entry
            .raw_file_position()
            .saturating_add(size.unwrap_or(u64::MAX));
        target.entry(entry)?;
    }
    // A block of zeros is behind the last one. Without it others may have been.
    if counted.read < end.saturating_add(BLOCK) {
        return Err(UnpackError::Short);
    }
    Ok(target.done)
}

/// Counts the bytes that are read.
struct Counted<R> {
    from: R,
    read: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(into)?;
        self.read += read as u64;
        Ok(read)
    }
}

/// Where it is unpacked.
struct Target {
    root: OwnedFd,
    /// Files and links that this archive has made: a second one of the same name is a lie, and is
    /// left out.
    made: BTreeSet<Vec<u8>>,
    /// Bytes that may still come.
    left: u64,
    limit: u64,
    done: Unpacked,
}

impl Target {
    fn entry<R: Read>(&mut self, mut entry: tar::Entry<'_, R>) -> Result<(), UnpackError> {
        let path = entry.path_bytes().into_owned();
        let names = match names(&path) {
            Ok(names) => names,
            Err(why) => return self.leave_out(path, why),
        };
        let Some((name, folders)) = names.split_last() else {
            return self.leave_out(path, "it has no name");
        };
        let kind = entry.header().entry_type();
        let mode = entry.header().mode().unwrap_or(0) & 0o777;
        let is_folder = kind == EntryType::Directory;
        if !is_folder && !self.made.insert(names.join(&b'/')) {
            return self.leave_out(path, "it came twice");
        }
        let here = |errno: Errno| UnpackError::Here {
            name: path.clone(),
            error: errno.into(),
        };
        let folder = match self.folder(folders) {
            Err(Errno::NOTDIR | Errno::LOOP) => {
                return self.leave_out(path, "something that is no folder is in its way");
            }
            folder => folder.map_err(here)?,
        };
        let name = OsStr::from_bytes(name);
        let outcome = match kind {
            EntryType::Directory => match make_folder(&folder, name) {
                Err(Errno::EXIST) => return self.leave_out(path, "something else is there"),
                outcome => outcome,
            },
            EntryType::Regular => return self.file(&mut entry, &folder, name, mode),
            EntryType::Symlink => {
                let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                if !stays(&target, folders.len()) {
                    return self.leave_out(path, "the link leads out of the folder");
                }
                make_link(&folder, name, &target)
            }
            _ => return self.leave_out(path, "it is neither a file nor a folder nor a link"),
        };
        match outcome {
            Err(Errno::ISDIR) => self.leave_out(path, "a folder is there"),
            outcome => {
                self.done.files += u64::from(!is_folder);
                outcome.map_err(here)
            }
        }
    }

    fn leave_out(&mut self, name: Vec<u8>, why: &'static str) -> Result<(), UnpackError> {
        if self.done.left_out.len() < 10 {
            self.done.left_out.push((name, why));
        } else {
            self.done.more += 1;
        }
        Ok(())
    }

    /// A folder below, made where it is not there. Each step opens what it has just looked at, and
    /// no link.
    fn folder(&self, names: &[&[u8]]) -> Result<OwnedFd, Errno> {
        let mut folder = self.root.try_clone().map_err(|_| Errno::MFILE)?;
        for name in names {
            let name = OsStr::from_bytes(name);
            match make_folder(&folder, name) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
            let how = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            folder = fs::openat(&folder, name, how, Mode::empty())?;
        }
        Ok(folder)
    }

    fn file<R: Read>(
        &mut self,
        entry: &mut tar::Entry<'_, R>,
        folder: &OwnedFd,
        name: &OsStr,
        mode: u32,
    ) -> Result<(), UnpackError> {
        let path = entry.path_bytes().into_owned();
        let size = entry.size();
        if size > self.left {
            return Err(UnpackError::Large { limit: self.limit });
        }
        self.left -= size;
        match remove(folder, name) {
            Err(Errno::ISDIR) => return self.leave_out(path, "a folder is there"),
            outcome => outcome.map_err(|errno| UnpackError::Here {
                name: path.clone(),
                error: errno.into(),
            })?,
        }
        // A new file: no link, no pipe, nothing that somebody else holds.
        let how = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let here = |error| UnpackError::Here {
            name: path.clone(),
            error,
        };
        let file = fs::openat(folder, name, how, Mode::from_raw_mode(0o600));
        let mut file = std::fs::File::from(file.map_err(|errno| here(errno.into()))?);
        let copied = copy(entry, &mut file, here)?;
        if copied != size {
            return Err(UnpackError::Short);
        }
        fs::fchmod(file.as_fd(), Mode::from_raw_mode(mode)).map_err(|errno| here(errno.into()))?;
        self.done.files += 1;
        self.done.bytes += size;
        Ok(())
    }
}

/// What cannot be read is the archive's fault, what cannot be written that of the folder.
fn copy(
    from: &mut impl Read,
    to: &mut impl Write,
    here: impl Fn(io::Error) -> UnpackError,
) -> Result<u64, UnpackError> {
    let mut piece = vec![0; 1 << 16];
    let mut copied = 0;
    loop {
        match from.read(&mut piece).map_err(UnpackError::Archive)? {
            0 => return Ok(copied),
            read => {
                to.write_all(&piece[..read]).map_err(&here)?;
                copied += read as u64;
            }
        }
    }
}

/// The names of a path below the folder, or what is wrong with it.
fn names(path: &[u8]) -> Result<Vec<&[u8]>, &'static str> {
    if path.len() > LONGEST_NAME {
        return Err("its name is too long");
    }
    let mut names = Vec::new();
    for part in Path::new(OsStr::from_bytes(path)).components() {
        match part {
            Component::Normal(name) if name.len() > 255 => return Err("its name is too long"),
            Component::Normal(name) => names.push(name.as_bytes()),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return Err("its name leads out of the folder");
            }
        }
    }
    if path.contains(&0) {
        return Err("its name has a 0");
    }
    Ok(names)
}

/// Whether a link in a folder so deep stays in the whole. `..` may come first alone: behind a name
/// it would go up from wherever that name leads.
fn stays(target: &[u8], depth: usize) -> bool {
    let mut up = 0;
    let mut down = false;
    for part in Path::new(OsStr::from_bytes(target)).components() {
        match part {
            Component::ParentDir if !down => up += 1,
            Component::Normal(_) => down = true,
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return false,
        }
    }
    up <= depth && !target.is_empty() && target.len() < LONGEST_NAME && !target.contains(&0)
}

fn make_folder(folder: &OwnedFd, name: &OsStr) -> Result<(), Errno> {
    match fs::mkdirat(folder, name, Mode::from_raw_mode(0o755)) {
        Err(Errno::EXIST) => {
            let status = fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
            match fs::FileType::from_raw_mode(status.st_mode) {
                fs::FileType::Directory => Ok(()),
                _ => Err(Errno::EXIST),
            }
        }
        outcome => outcome,
    }
}

/// What is there goes, unless it is a folder.
fn remove(folder: &OwnedFd, name: &OsStr) -> Result<(), Errno> {
    match fs::unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        // Some kernels say that a folder may not be removed so.
        Err(Errno::PERM) => Err(Errno::ISDIR),
        Err(errno) => Err(errno),
    }
}

fn make_link(folder: &OwnedFd, name: &OsStr, target: &[u8]) -> Result<(), Errno> {
    remove(folder, name)?;
    fs::symlinkat(OsStr::from_bytes(target), folder, name)
}
