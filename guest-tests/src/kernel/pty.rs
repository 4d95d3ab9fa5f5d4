//! A terminal for a program under test, and the signals that end it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};

/// A pseudo-terminal: the program's side and ours.
#[derive(Debug)]
pub struct Pty {
    master: File,
    slave: OwnedFd,
}

/// A terminal's mode, to compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mode {
    is_cooked: bool,
    /// All of it in words, because a termios cannot be compared.
    text: String,
}

impl Mode {
    /// True if lines are edited by the terminal, as a shell's are.
    #[must_use]
    pub fn is_cooked(&self) -> bool {
        self.is_cooked
    }
}

impl Pty {
    /// A new one, in the system's default mode.
    ///
    /// # Errors
    /// The system has none left.
    pub fn open() -> io::Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
        let master = openpt(flags)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let slave = ioctl_tiocgptpeer(&master, flags)?;
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

    /// Our side: the program reads what is written here.
    #[must_use]
    pub fn keyboard(&self) -> &File {
        &self.master
    }

    /// The terminal's mode now.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn mode(&self) -> io::Result<Mode> {
        let mode = tcgetattr(&self.slave)?;
        Ok(Mode {
            is_cooked: mode.local_modes.contains(LocalModes::ICANON),
            text: format!("{mode:?}"),
        })
    }
}

/// Sends `signal` to a process.
///
/// # Errors
/// There is no such process or signal, or the process is not ours.
pub fn send_signal(process: u32, signal: i32) -> io::Result<()> {
    let process = i32::try_from(process).ok().and_then(Pid::from_raw);
    let signal = Signal::from_named_raw(signal);
    let (Some(process), Some(signal)) = (process, signal) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    Ok(kill_process(process, signal)?)
}
