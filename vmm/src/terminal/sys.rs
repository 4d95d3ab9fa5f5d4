//! The terminal calls of the C library.

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

/// A terminal's mode (termios).
#[derive(Clone, Copy)]
pub(super) struct Mode(libc::termios);

impl fmt::Debug for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mode(lflag {:#x})", self.0.c_lflag)
    }
}

pub(super) fn mode(fd: BorrowedFd<'_>) -> io::Result<Mode> {
    let mut mode = MaybeUninit::uninit();
    // SAFETY: `fd` is open for the borrow's lifetime, and `mode` is writable and
    // of the type that tcgetattr fills.
    if unsafe { libc::tcgetattr(fd.as_raw_fd(), mode.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: tcgetattr returned 0, which means that it filled the structure.
    Ok(Mode(unsafe { mode.assume_init() }))
}

/// Sets the mode at once, without waiting for output to drain: a terminal whose
/// output is stopped must not keep the process from ending.
pub(super) fn set_mode(fd: BorrowedFd<'_>, mode: &Mode) -> io::Result<()> {
    // SAFETY: `fd` is open for the borrow's lifetime, and `mode` came from
    // tcgetattr, so it is an initialised termios.
    match unsafe { libc::tcsetattr(fd.as_raw_fd(), libc::TCSANOW, &raw const mode.0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The raw form of a mode: no line editing, echo, translation or flow control of
/// input; of the signal keys only the interrupt key stays.
pub(super) fn raw(mode: Mode) -> Mode {
    let mut t = mode.0;
    t.c_iflag &= !(libc::IGNBRK
        | libc::BRKINT
        | libc::PARMRK
        | libc::ISTRIP
        | libc::INLCR
        | libc::IGNCR
        | libc::ICRNL
        | libc::IXON);
    t.c_lflag &= !(libc::ECHO | libc::ECHONL | libc::ICANON | libc::IEXTEN);
    t.c_lflag |= libc::ISIG;
    t.c_cflag &= !(libc::CSIZE | libc::PARENB);
    t.c_cflag |= libc::CS8;
    t.c_cc[libc::VQUIT] = libc::_POSIX_VDISABLE;
    t.c_cc[libc::VSUSP] = libc::_POSIX_VDISABLE;
    t.c_cc[libc::VMIN] = 1;
    t.c_cc[libc::VTIME] = 0;
    Mode(t)
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::fd::{FromRawFd, OwnedFd};

    use super::*;

    /// The two ends of a new pseudo terminal: the user's, the program's.
    pub(in super::super) fn open_pty() -> (OwnedFd, OwnedFd) {
        let (mut master, mut slave) = (-1, -1);
        // SAFETY: the first two pointers are to writable integers, and null is
        // allowed for the name, the mode and the size.
        let result = unsafe {
            libc::openpty(
                &raw mut master,
                &raw mut slave,
                std::ptr::null_mut(),
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        // SAFETY: openpty returned 0, so both are open and nobody else has them.
        unsafe { (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) }
    }

    impl Mode {
        /// Everything that raw mode changes.
        pub(in super::super) fn parts(&self) -> (u32, u32, u32, u32, [u8; 32]) {
            let t = &self.0;
            (t.c_iflag, t.c_oflag, t.c_cflag, t.c_lflag, t.c_cc)
        }
    }
}
