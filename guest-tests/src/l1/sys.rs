//! The one place with `unsafe`: starting a child that cannot outlive its parent.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Starts `command` so that it inherits `fds` under their numbers, and is killed when the calling thread ends.
///
/// The caller must wait for the child on the same thread, or the child dies early.
pub(crate) fn spawn_bound(command: &mut Command, fds: Vec<RawFd>) -> io::Result<Child> {
    let parent = Pid::from_raw(std::process::id().cast_signed());
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid() != parent {
            // The parent ended before the signal was armed.
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        for fd in &fds {
            // SAFETY: the caller keeps the descriptor open, and it is borrowed for one call, which
            // reports one that is closed all the same (EBADF).
            fcntl_setfd(unsafe { BorrowedFd::borrow_raw(*fd) }, FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes only the system calls prctl, getppid and
    // fcntl, which are async-signal-safe, and builds errors from integers, which does not allocate.
    unsafe { command.pre_exec(prepare) }.spawn()
}
