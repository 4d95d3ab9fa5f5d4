//! A terminal for a program under test.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;

use super::sys;

/// A pseudo-terminal: the program's side and ours.
#[derive(Debug)]
pub struct Pty {
    master: File,
    slave: OwnedFd,
}

/// A terminal's mode, to compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mode {
    flags: [u32; 4],
    characters: Vec<u8>,
}

impl Mode {
    /// True if lines are edited by the terminal, as a shell's are.
    #[must_use]
    pub fn is_cooked(&self) -> bool {
        self.flags[3] & libc::ICANON != 0
    }
}

impl Pty {
    /// A new one, in the system's default mode.
    ///
    /// # Errors
    /// The system has none left.
    pub fn open() -> io::Result<Self> {
        let (master, slave) = sys::open_pty()?;
        Ok(Self {
            master: master.into(),
            slave,
        })
    }

    /// The program's side.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn stdin(&self) -> io::Result<Stdio> {
        Ok(self.slave.try_clone()?.into())
    }

    /// Our side: what is written here the program reads.
    #[must_use]
    pub fn keyboard(&self) -> &File {
        &self.master
    }

    /// The terminal's mode now.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn mode(&self) -> io::Result<Mode> {
        let (flags, characters) = sys::mode(self.slave.as_fd())?;
        Ok(Mode { flags, characters })
    }
}
