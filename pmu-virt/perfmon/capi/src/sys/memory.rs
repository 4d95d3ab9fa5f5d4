//! Memory that a caller points to. A bad address gives EFAULT, as it does with a
//! system call: the kernel copies.

use std::ffi::c_void;
use std::ptr;

use errno::{errno, set_errno};
use rustix::io::Errno;

/// An address that a caller gave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct User(*mut u8);

impl User {
    /// The address in a C pointer.
    pub(crate) fn new(pointer: *mut c_void) -> Self {
        User(pointer.cast())
    }

    /// Whether it is NULL.
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Copies from `offset` bytes behind the address.
    pub(crate) fn read(self, offset: usize, to: &mut [u8]) -> Result<(), Errno> {
        let from = self.0.wrapping_byte_add(offset);
        copy(from, to.as_mut_ptr(), to.len(), Direction::In)
    }

    /// Copies to `offset` bytes behind the address.
    pub(crate) fn write(self, offset: usize, from: &[u8]) -> Result<(), Errno> {
        let to = self.0.wrapping_byte_add(offset);
        copy(to, from.as_ptr().cast_mut(), from.len(), Direction::Out)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    In,
    Out,
}

fn copy(user: *mut u8, own: *mut u8, length: usize, direction: Direction) -> Result<(), Errno> {
    if length == 0 {
        return Ok(());
    }
    let area = |start: *mut u8| libc::iovec {
        iov_base: start.cast(),
        iov_len: length,
    };
    let (own_area, user_area) = (area(own), area(user));
    let call = match direction {
        Direction::In => libc::SYS_process_vm_readv,
        Direction::Out => libc::SYS_process_vm_writev,
    };
    // SAFETY: getpid has no arguments and does not fail.
    let pid = unsafe { libc::getpid() };
    // SAFETY: both vectors have one element and are valid during the call; `own`
    // is memory of `length` bytes that the caller of `copy` borrowed for this
    // direction; the kernel checks the other address. The raw call leaves errno.
    let copied = unsafe {
        let (own, user) = (&raw const own_area, &raw const user_area);
        saving_errno(|| libc::syscall(call, pid, own, 1_usize, user, 1_usize, 0_usize))
    };
    match copied {
        Ok(copied) if usize::try_from(copied) == Ok(length) => Ok(()),
        Ok(_) | Err(libc::EFAULT) => Err(Errno::FAULT),
        Err(_) if user.is_null() => Err(Errno::FAULT),
        Err(_) => {
            let (from, to) = match direction {
                Direction::In => (user, own),
                Direction::Out => (own, user),
            };
            // A sandbox forbids the call.
            // SAFETY: then the interface's rule holds, that the caller points to
            // so much memory; `own` is as above, and none of the caller's.
            unsafe { ptr::copy(from, to, length) };
            Ok(())
        }
    }
}

/// Makes a call of libc that returns -1 with `errno`, and puts `errno` back.
pub(super) fn saving_errno(call: impl FnOnce() -> libc::c_long) -> Result<libc::c_long, i32> {
    let before = errno();
    let result = call();
    let after = errno();
    set_errno(before);
    if result < 0 { Err(after.0) } else { Ok(result) }
}
