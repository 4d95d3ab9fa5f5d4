//! What C sees: the functions of libc that mean something else for a context.
//!
//! For any other descriptor each of them is a look into the table, two loads,
//! and the next function of its name.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};

use errno::{errno, set_errno};
use libc::{off_t, size_t, ssize_t};
use rustix::io::Errno;

use crate::buffer::{self, Wanted};
use crate::calls;
use crate::reading;
use crate::state::can_be_context;
use crate::sys::memory::User;
use crate::sys::{borrow, owner, real};
use crate::table::{self, Slot};

/// The context that a descriptor is.
fn context<'a>(fd: c_int) -> Option<(BorrowedFd<'a>, &'static Slot)> {
    table::seen(fd)?;
    let open = borrow(fd)?;
    Some((open, table::find(open)?))
}

fn refused(error: Errno) -> ssize_t {
    set_errno(errno::Errno(error.raw_os_error()));
    -1
}

/// 3.3.3 for a context.
///
/// # Safety
/// As libc's `read`; for a context any address will do.
#[unsafe(no_mangle)]
unsafe extern "C" fn read(fd: c_int, to: *mut c_void, size: size_t) -> ssize_t {
    let Some((open, slot)) = context(fd) else {
        // SAFETY: the caller's.
        return unsafe { real::read(fd, to, size) };
    };
    match reading::read(open, slot, User::new(to), size) {
        Ok(bytes) => ssize_t::try_from(bytes).unwrap_or(ssize_t::MAX),
        Err(error) => refused(error),
    }
}

/// `read` of programs that were compiled with `_FORTIFY_SOURCE`.
///
/// # Safety
/// As libc's `read`.
#[unsafe(no_mangle)]
unsafe extern "C" fn __read_chk(fd: c_int, to: *mut c_void, size: size_t, room: size_t) -> ssize_t {
    if size <= room && context(fd).is_some() {
        // SAFETY: the caller's.
        return unsafe { read(fd, to, size) };
    }
    // SAFETY: the caller's; it ends the program if `size` exceeds `room`.
    unsafe { real::read_chk(fd, to, size, room) }
}

/// EINVAL for a context.
///
/// # Safety
/// As libc's `write`.
#[unsafe(no_mangle)]
unsafe extern "C" fn write(fd: c_int, from: *const c_void, size: size_t) -> ssize_t {
    if context(fd).is_some() {
        return refused(Errno::INVAL);
    }
    // SAFETY: the caller's.
    unsafe { real::write(fd, from, size) }
}

/// EINVAL for a context: its queue cannot be skipped through (3.3.3).
///
/// # Safety
/// As libc's `lseek`.
#[unsafe(no_mangle)]
unsafe extern "C" fn lseek(fd: c_int, offset: off_t, whence: c_int) -> off_t {
    if context(fd).is_some() {
        set_errno(errno::Errno(libc::EINVAL));
        return -1;
    }
    // SAFETY: the caller's.
    unsafe { real::lseek(fd, offset, whence) }
}

/// The same with another name: `off_t` has 64 bits.
///
/// # Safety
/// As libc's `lseek`.
#[unsafe(no_mangle)]
unsafe extern "C" fn lseek64(fd: c_int, offset: off_t, whence: c_int) -> off_t {
    // SAFETY: the caller's.
    unsafe { lseek(fd, offset, whence) }
}

/// 3.5.4 for a context.
///
/// # Safety
/// As libc's `mmap`.
#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    address: *mut c_void,
    size: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let known = context(fd).is_some();
    if !known {
        // SAFETY: the caller's.
        let mapped = unsafe { real::mmap(address, size, protection, flags, fd, offset) };
        // A socket cannot be mapped: it may be a context that this process has
        // got by exec or from another process, and has not used yet.
        if mapped != libc::MAP_FAILED || flags & libc::MAP_ANONYMOUS != 0 || !is_unknown(fd) {
            return mapped;
        }
    }
    let wanted = Wanted {
        size,
        protection,
        flags,
        offset,
    };
    let file = match borrow(fd).map(|open| buffer::file(open, wanted)) {
        Some(Ok(file)) => file,
        Some(Err(failure)) if known || failure.number != libc::EBADF => {
            set_errno(errno::Errno(failure.number));
            return libc::MAP_FAILED;
        }
        _ => {
            set_errno(errno::Errno(libc::ENODEV));
            return libc::MAP_FAILED;
        }
    };
    // SAFETY: the caller's, who may map something at this address.
    unsafe { real::mmap(address, size, protection, flags, file.as_raw_fd(), 0) }
}

/// Whether a descriptor, which could not be mapped, may be a context.
fn is_unknown(fd: c_int) -> bool {
    errno().0 == libc::ENODEV && borrow(fd).is_some_and(can_be_context)
}

/// The same with another name: `off_t` has 64 bits.
///
/// # Safety
/// As libc's `mmap`.
#[unsafe(no_mangle)]
unsafe extern "C" fn mmap64(
    address: *mut c_void,
    size: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's.
    unsafe { mmap(address, size, protection, flags, fd, offset) }
}

/// Takes the mapping of the sampling buffer along (3.5.4).
#[unsafe(no_mangle)]
extern "C" fn close(fd: c_int) -> c_int {
    if table::seen(fd).is_some() {
        buffer::closed(fd);
    }
    // SAFETY: closing a number that somebody else relies on is the caller's
    // mistake, as it is with libc's close.
    unsafe { real::close(fd) }
}

/// Notes in the table that `new`, if it is not -1, is a duplicate of `old`.
fn duplicated(old: c_int, new: c_int) -> c_int {
    if new >= 0 && new != old {
        if table::seen(new).is_some() {
            buffer::closed(new);
        }
        table::duplicate(old, new);
    }
    new
}

/// Keeps the duplicate a context.
#[unsafe(no_mangle)]
extern "C" fn dup(old: c_int) -> c_int {
    // SAFETY: dup has no conditions.
    duplicated(old, unsafe { real::dup(old) })
}

/// Keeps the duplicate a context.
#[unsafe(no_mangle)]
extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    // SAFETY: closing `new` is the caller's wish.
    duplicated(old, unsafe { real::dup2(old, new) })
}

/// Keeps the duplicate a context.
#[unsafe(no_mangle)]
extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    // SAFETY: closing `new` is the caller's wish.
    duplicated(old, unsafe { real::dup3(old, new, flags) })
}

fn control(large: bool, fd: c_int, command: c_int, argument: usize) -> c_int {
    // SAFETY: the caller's of fcntl: the argument is what the command takes.
    let result = unsafe { real::fcntl(large, fd, command, argument) };
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => duplicated(fd, result),
        changed if result != -1 && owner::is_changed_by(changed) => {
            if let Some((open, slot)) = context(fd) {
                calls::signals_changed(open, slot);
            }
            result
        }
        _ => result,
    }
}

/// Keeps duplicates contexts, and has a context's bell signal as the context would
/// (3.3.7). Variadic in C: on x86-64 a third argument, of
/// whatever kind that fcntl knows, lies in the third register all the same.
///
/// # Safety
/// As libc's `fcntl`.
#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    control(false, fd, command, argument)
}

/// `fcntl` of programs that were compiled for large files.
///
/// # Safety
/// As libc's `fcntl`.
#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int {
    control(true, fd, command, argument)
}
