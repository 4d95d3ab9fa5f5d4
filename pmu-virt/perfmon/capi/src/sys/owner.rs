//! Who is signalled for a descriptor, and how: `fcntl(2)`, "Managing signals".

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::memory::saving_errno;

const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;
const F_SETOWN_EX: c_int = 15;
const F_GETOWN_EX: c_int = 16;

/// Commands of `fcntl` that change it.
pub(crate) fn is_changed_by(command: c_int) -> bool {
    matches!(
        command,
        libc::F_SETFL | libc::F_SETOWN | F_SETSIG | F_SETOWN_EX
    )
}

/// `struct f_owner_ex`.
#[repr(C)]
#[derive(Default)]
struct Owner {
    kind: c_int,
    pid: libc::pid_t,
}

/// A command that takes a number; what it returns, if it succeeds.
fn control(fd: BorrowedFd<'_>, command: c_int, argument: c_int) -> Option<c_int> {
    // SAFETY: none of the commands here touches memory for a number; the raw call leaves
    // errno.
    let result = unsafe {
        saving_errno(|| libc::syscall(libc::SYS_fcntl, fd.as_raw_fd(), command, argument))
    };
    c_int::try_from(result.ok()?).ok()
}

/// F_GETOWN_EX or F_SETOWN_EX.
fn owner(fd: BorrowedFd<'_>, command: c_int, owner: &mut Owner) {
    let place: *mut Owner = owner;
    // SAFETY: both commands take the address of such a structure, which is borrowed for
    // the call; it leaves errno.
    let _ =
        unsafe { saving_errno(|| libc::syscall(libc::SYS_fcntl, fd.as_raw_fd(), command, place)) };
}

/// Whoever owns the descriptor's file is signalled; so far nobody does.
pub(crate) fn turn_on(fd: BorrowedFd<'_>) {
    if let Some(flags) = control(fd, libc::F_GETFL, 0) {
        control(fd, libc::F_SETFL, flags | libc::O_ASYNC);
    }
}

/// For `to` those are signalled who are for `from`, if anybody is.
pub(crate) fn copy(from: BorrowedFd<'_>, to: BorrowedFd<'_>) {
    let is_on = |fd| control(fd, libc::F_GETFL, 0).is_some_and(|it| it & libc::O_ASYNC != 0);
    let mut whom = Owner::default();
    if is_on(from) {
        owner(from, F_GETOWN_EX, &mut whom);
    }
    if whom.pid == 0 {
        control(to, libc::F_SETOWN, 0);
        return;
    }
    if let Some(signal) = control(from, F_GETSIG, 0) {
        control(to, F_SETSIG, signal);
    }
    owner(to, F_SETOWN_EX, &mut whom);
    if !is_on(to) {
        turn_on(to);
    }
}
