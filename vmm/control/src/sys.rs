//! System calls for which rustix has no safe function: the fill of a socket's
//! queue, and a mapping that is shared with a tool.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};

use rustix::ioctl::{Getter, Opcode, ioctl};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

/// `SIOCOUTQ` (sockios.h).
const SIOCOUTQ: Opcode = 0x5411;

/// Bytes that were sent and not read yet, with what the kernel adds to them.
pub(crate) fn unread(socket: BorrowedFd<'_>) -> io::Result<usize> {
    // SAFETY: SIOCOUTQ writes one int.
    let bytes = unsafe { ioctl(socket, Getter::<SIOCOUTQ, c_int>::new()) }?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// A shared mapping of a whole file, readable and writable.
#[derive(Debug)]
pub(crate) struct Mapping {
    at: NonNull<c_void>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone, and memory has no thread.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `file`; not 0.
    pub(crate) fn new(file: &OwnedFd, len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap(null_mut(), len, protection, MapFlags::SHARED, file, 0) }?;
        let at = NonNull::new(at).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { at, len })
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has `len` bytes until this value is dropped. Nobody
        // else writes them: the file is sealed against writers before any other
        // process gets it, and readers elsewhere do not matter to this process.
        // The file cannot shrink, as it is sealed against that too.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr().cast(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this address and length, and no
        // reference to it outlives this value.
        let _ = unsafe { munmap(self.at.as_ptr(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    #[test]
    fn a_mapping_is_the_file() {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 2 * PAGE as u64).unwrap();
        let mut one = Mapping::new(&file, 2 * PAGE).unwrap();
        let mut other = Mapping::new(&file, 2 * PAGE).unwrap();
        one.bytes()[PAGE] = 7;
        assert_eq!((other.bytes()[PAGE], other.bytes().len()), (7, 2 * PAGE));
    }
}
