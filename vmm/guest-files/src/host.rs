//! A folder of this machine, and what is in it. Nothing here follows a symbolic link: the way to a
//! file is gone name by name, and each name has to be a folder's.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags};
use rustix::io::{Errno, pread, retry_on_intr};
use rustix::process::geteuid;

use crate::tree::{Attributes, Kind, Listed, Owner, Refusal, Stamp};

/// Names in one folder that are given at most: a guest may ask for any.
const MOST_NAMES: usize = 1 << 20;

/// Only to name a place.
const PLACE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A folder, or a file, that stays the same one whatever becomes of its path.
#[derive(Debug)]
pub(crate) struct Place(OwnedFd);

impl Place {
    /// What is at this path; the last name may not be a link.
    pub(crate) fn of_path(path: &Path) -> Result<Self, Errno> {
        Ok(Self(fs::open(path, PLACE, Mode::empty())?))
    }

    /// What is at a path below; itself if that is empty.
    pub(crate) fn below(&self, path: &[u8]) -> Result<Place, Errno> {
        let mut place: Option<OwnedFd> = None;
        for name in path
            .split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty())
        {
            let name = text(name)?;
            let from = place.as_ref().map_or(self.0.as_fd(), AsFd::as_fd);
            // A link is opened as itself, and has nothing below.
            place = Some(fs::openat(from, &*name, PLACE, Mode::empty())?);
        }
        match place {
            Some(place) => Ok(Self(place)),
            None => Ok(Self(self.0.try_clone().map_err(|_| Errno::MFILE)?)),
        }
    }

    /// What it is, for a guest to which it is `owner`'s.
    pub(crate) fn attributes(&self, owner: Owner) -> Result<Attributes, Refusal> {
        let status = fs::fstat(&self.0)?;
        Self::described(&status, owner, || self.open(OFlags::empty()).is_ok())
    }

    /// The same of a name in this folder, by one system call.
    pub(crate) fn attributes_of(&self, name: &[u8], owner: Owner) -> Result<Attributes, Refusal> {
        let status = fs::statat(&self.0, &*text(name)?, AtFlags::SYMLINK_NOFOLLOW)?;
        let can_be_read = || {
            let place = self.below(name);
            place.and_then(|place| place.open(OFlags::empty())).is_ok()
        };
        Self::described(&status, owner, can_be_read)
    }

    fn described(
        status: &fs::Stat,
        owner: Owner,
        can_be_read: impl FnOnce() -> bool,
    ) -> Result<Attributes, Refusal> {
        let kind = kind(FileType::from_raw_mode(status.st_mode)).ok_or(Refusal::Missing)?;
        let mut mode = u16::try_from(status.st_mode & 0o777).unwrap_or(0);
        // Opening is not asked for, so whoever may not read here must see it by the mode.
        let others_may = mode & 0o004 != 0 || status.st_uid == geteuid().as_raw();
        if kind == Kind::File && !others_may && !can_be_read() {
            mode &= !0o444;
        }
        let size = match kind {
            Kind::Folder => 0,
            Kind::File | Kind::Link => u64::try_from(status.st_size).unwrap_or(0),
        };
        // A file of the system has the time that its package gave it, on every machine, and Python
        // takes it for a part of the content: bytecode is used if it names the source's time. What
        // is the user's has the time at which it was copied here.
        let says_something = kind == Kind::File && owner == Owner::System;
        let modified = u64::try_from(status.st_mtime).ok();
        Ok(Attributes {
            kind,
            size,
            mode,
            owner,
            modified: modified.filter(|_| says_something),
        })
    }

    /// The text of a link.
    pub(crate) fn link(&self) -> Result<Vec<u8>, Refusal> {
        match fs::readlinkat(&self.0, c"", Vec::new()) {
            Ok(target) => Ok(target.into_bytes()),
            Err(Errno::NOENT | Errno::INVAL) => Err(Refusal::Kind),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Its names, sorted, without those of devices and the like.
    pub(crate) fn list(&self) -> Result<Vec<Listed>, Refusal> {
        let folder = self.open(OFlags::DIRECTORY)?;
        let mut listed = Vec::new();
        for entry in fs::Dir::new(folder)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let Some(kind) = kind(self.type_of(name, entry.file_type())) else {
                continue;
            };
            if listed.len() == MOST_NAMES {
                return Err(Refusal::Host(Errno::OVERFLOW));
            }
            let name = name.to_bytes().to_vec();
            listed.push(Listed { name, kind });
        }
        listed.sort();
        Ok(listed)
    }

    /// Some file systems do not say it in their lists.
    fn type_of(&self, name: &CStr, said: FileType) -> FileType {
        if said != FileType::Unknown {
            return said;
        }
        let status = fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW);
        status.map_or(FileType::Unknown, |status| {
            FileType::from_raw_mode(status.st_mode)
        })
    }

    /// Opens the regular file that it is.
    pub(crate) fn file(&self) -> Result<OwnedFd, Refusal> {
        let status = fs::fstat(&self.0)?;
        match FileType::from_raw_mode(status.st_mode) {
            FileType::RegularFile => Ok(self.open(OFlags::empty())?),
            FileType::Directory => Err(Refusal::Host(Errno::ISDIR)),
            _ => Err(Refusal::Kind),
        }
    }

    /// Opens what it is, and nothing that has come into its place: by its number in `/proc`.
    fn open(&self, how: OFlags) -> Result<OwnedFd, Errno> {
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        let how = how | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        fs::open(path, how, Mode::empty())
    }
}

fn text(name: &[u8]) -> Result<CString, Errno> {
    CString::new(name).map_err(|_| Errno::INVAL)
}

fn kind(of: FileType) -> Option<Kind> {
    match of {
        FileType::RegularFile => Some(Kind::File),
        FileType::Directory => Some(Kind::Folder),
        FileType::Symlink => Some(Kind::Link),
        _ => None,
    }
}

/// Appends at most `len` bytes from `at` on.
pub(crate) fn read(
    file: BorrowedFd<'_>,
    mut at: u64,
    len: usize,
    into: &mut Vec<u8>,
) -> Result<(), Refusal> {
    let end = into.len() + len;
    while into.len() < end {
        // No file is longer.
        if i64::try_from(at).is_err() {
            break;
        }
        let from = into.len();
        into.resize(end, 0);
        let read = retry_on_intr(|| pread(file, &mut into[from..], at));
        into.truncate(from + *read.as_ref().unwrap_or(&0));
        match read? {
            0 => break,
            read => at += read as u64,
        }
    }
    Ok(())
}

pub(crate) fn stamp(file: BorrowedFd<'_>) -> Result<Stamp, Refusal> {
    let status = fs::fstat(file)?;
    let time = |seconds, part| i128::from(seconds) * 1_000_000_000 + i128::from(part);
    Ok(Stamp {
        identity: [status.st_dev, status.st_ino],
        size: u64::try_from(status.st_size).unwrap_or(0),
        changed: [
            time(status.st_mtime, status.st_mtime_nsec),
            time(status.st_ctime, status.st_ctime_nsec),
        ],
    })
}
