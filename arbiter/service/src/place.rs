//! Where a socket's name is: in a folder that is held open, so that nothing here follows a path
//! that others may have changed meanwhile.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, chmod, chownat, openat, statat, unlinkat,
};

use crate::{Access, sys};

/// Device and inode of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name(u64, u64);

/// A name in a folder.
#[derive(Debug)]
pub(crate) struct Place {
    folder: OwnedFd,
    name: OsString,
}

impl Place {
    /// # Errors
    /// The folder cannot be opened.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let folder = path.parent().filter(|folder| *folder != Path::new(""));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = folder.unwrap_or(Path::new("."));
        Ok(Self {
            folder: openat(CWD, folder, flags, Mode::empty())?,
            name: path.file_name().unwrap_or(".".as_ref()).to_owned(),
        })
    }

    /// What has the name, and whether it is a socket.
    pub(crate) fn look(&self) -> io::Result<(Name, bool)> {
        let there = statat(&self.folder, &self.name, AtFlags::SYMLINK_NOFOLLOW)?;
        let is_socket = FileType::from_raw_mode(there.st_mode) == FileType::Socket;
        Ok((Name(there.st_dev, there.st_ino), is_socket))
    }

    pub(crate) fn has(&self, name: Name) -> bool {
        self.look().is_ok_and(|(found, _)| found == name)
    }

    pub(crate) fn remove(&self) -> io::Result<()> {
        Ok(unlinkat(&self.folder, &self.name, AtFlags::empty())?)
    }

    /// The name that `socket` has just been bound to.
    pub(crate) fn bound(&self, socket: BorrowedFd<'_>) -> io::Result<Bound> {
        // Without CAP_NET_ADMIN the kernel does not say which it is. Then it is one that only
        // this user can have made, and that is nowhere else.
        let of_user = |file: OwnedFd| {
            let there = statat(&file, "", AtFlags::EMPTY_PATH)?;
            let own = there.st_uid == rustix::process::geteuid().as_raw();
            let kind = FileType::from_raw_mode(there.st_mode);
            if kind == FileType::Socket && own && there.st_nlink == 1 {
                Ok(file)
            } else {
                Err(io::Error::other("somebody else has taken the name"))
            }
        };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || openat(&self.folder, &self.name, flags, Mode::empty());
        let file = sys::bound_name(socket).or_else(|_| of_user(open()?))?;
        let there = statat(&file, "", AtFlags::EMPTY_PATH)?;
        let name = Name(there.st_dev, there.st_ino);
        Ok(Bound { file, name })
    }
}

/// The name of a socket itself, wherever it is by now.
#[derive(Debug)]
pub(crate) struct Bound {
    file: OwnedFd,
    pub(crate) name: Name,
}

impl Bound {
    pub(crate) fn set_group(&self, access: &Access) -> io::Result<()> {
        let group = access.group.map(Gid::from_raw);
        if group.is_some() {
            chownat(&self.file, "", None, group, AtFlags::EMPTY_PATH)?;
        }
        Ok(())
    }

    pub(crate) fn set_mode(&self, access: &Access) -> io::Result<()> {
        // The kernel follows this to the file itself, not to a name.
        let file = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(chmod(file, Mode::from_raw_mode(access.mode))?)
    }
}
