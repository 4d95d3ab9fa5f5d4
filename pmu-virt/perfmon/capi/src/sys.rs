//! What touches memory that callers point to, descriptors by number, and libc.

pub(crate) mod environment;
pub(crate) mod last;
pub(crate) mod memory;
pub(crate) mod owner;
pub(crate) mod real;

use std::os::fd::BorrowedFd;

/// A descriptor by its number; `None` if it is none.
pub(crate) fn borrow<'a>(number: i32) -> Option<BorrowedFd<'a>> {
    // SAFETY: the number is not -1. It is passed to system calls only, which
    // refuse one that is not open.
    (number >= 0).then(|| unsafe { BorrowedFd::borrow_raw(number) })
}

/// Sets the `errno` of this thread.
pub(crate) fn set_errno(number: i32) {
    // SAFETY: libc returns the address of this thread's errno, always valid.
    unsafe { *libc::__errno_location() = number };
}
