//! What the kernel does about the calling thread's signals.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::failure::{Failure, Subcode, fail};

/// `SIGEMT` of `libcpc.h`; Linux has none.
pub(crate) const SIGEMT: c_int = 63;
/// Tells of an overflow; its handler makes a `SIGEMT` of it.
pub(crate) const OVERFLOW: c_int = 62;
/// `struct f_owner_ex` of `fcntl(2)`, which the C library's bindings lack.
#[repr(C)]
struct OwnerEx {
    kind: c_int,
    pid: libc::pid_t,
}

const F_SETSIG: c_int = 10;
const F_SETOWN_EX: c_int = 15;
const F_OWNER_TID: c_int = 0;

/// Lets `signal` through to this thread, if it was blocked.
pub(crate) fn unblock(signal: c_int) {
    let mut mask = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the set is valid for writes, and zeros are an empty one; no old one is asked for.
    unsafe {
        libc::sigaddset(mask.as_mut_ptr(), signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, mask.as_ptr(), std::ptr::null_mut());
    }
}

/// The calling thread hears of `descriptor` by the library's own signal.
///
/// # Errors
/// The kernel's.
pub(crate) fn signal_on(descriptor: BorrowedFd<'_>) -> Result<(), Failure> {
    let descriptor = descriptor.as_raw_fd();
    let owner = OwnerEx {
        kind: F_OWNER_TID,
        // SAFETY: gettid has no arguments and cannot fail.
        pid: unsafe { libc::gettid() },
    };
    // SAFETY: the kernel reads a `struct f_owner_ex` at the pointer, of which `OwnerEx` has the
    // layout; the other two take integers. O_ASYNC is the one flag wanted besides O_NONBLOCK,
    // which a descriptor of ours may have.
    let done = unsafe {
        libc::fcntl(descriptor, F_SETOWN_EX, &raw const owner) == 0
            && libc::fcntl(descriptor, F_SETSIG, OVERFLOW) == 0
            && libc::fcntl(descriptor, libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK) == 0
    };
    if done {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    let number = error.raw_os_error().unwrap_or(libc::EIO);
    let reason = format_args!("the kernel does not signal overflows (error {number})");
    Err(fail(number, Subcode::BindFailed, reason))
}
