//! Pseudo-terminals and signals, for which the standard library has no call.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

/// A new pseudo-terminal: master, slave.
pub(super) fn open_pty() -> io::Result<(OwnedFd, OwnedFd)> {
    let (mut master, mut slave) = (-1, -1);
    // SAFETY: both results are valid for writes; name, mode and size are optional.
    let result = unsafe {
        libc::openpty(
            &raw mut master,
            &raw mut slave,
            ptr::null_mut(),
            ptr::null(),
            ptr::null(),
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: openpty succeeded, so both descriptors are open, and nobody else has them.
    unsafe { Ok((OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave))) }
}

/// The mode of a terminal: input, output, control and local flags, and the
/// control characters.
pub(super) fn mode(terminal: BorrowedFd<'_>) -> io::Result<([u32; 4], Vec<u8>)> {
    let mut mode = MaybeUninit::<libc::termios>::uninit();
    // SAFETY: `mode` is valid for writes of a termios.
    if unsafe { libc::tcgetattr(terminal.as_raw_fd(), mode.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: tcgetattr returned 0, so it filled all of it.
    let mode = unsafe { mode.assume_init() };
    let flags = [mode.c_iflag, mode.c_oflag, mode.c_cflag, mode.c_lflag];
    Ok((flags, mode.c_cc.to_vec()))
}

/// Sends `signal` to a process.
///
/// # Errors
/// There is no such process, or it is not ours.
pub fn send_signal(process: u32, signal: i32) -> io::Result<()> {
    let process = i32::try_from(process).map_err(io::Error::other)?;
    // SAFETY: kill takes two integers; a positive id names one process.
    match unsafe { libc::kill(process, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
