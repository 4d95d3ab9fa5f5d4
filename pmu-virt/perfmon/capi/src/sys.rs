//! What touches memory that callers point to, descriptors by number, and libc.

pub(crate) mod environment;
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
