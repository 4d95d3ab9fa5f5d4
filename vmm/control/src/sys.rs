//! System calls for which rustix has no safe function: the fill of a socket's
//! queue, and a mapping that is shared with a tool.

mod guard;

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
    guarded: guard::Guarded,
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
        let guarded =
            guard::Guarded::new(at.as_ptr().expose_provenance(), len).inspect_err(|_| {
                // SAFETY: the mapping was just made, and nobody has a reference to it.
                let _ = unsafe { munmap(at.as_ptr(), len) };
            })?;
        Ok(Self { at, len, guarded })
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has `len` bytes until this value is dropped. Nobody
        // else writes them: the file is sealed against writers before any other
        // process gets it, and readers elsewhere do not matter to this process.
        // Where somebody who has the right cuts the file, `guard` has other memory
        // there before the access that finds it out goes on.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr().cast(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First: the address may be another mapping's at once.
        self.guarded.give_up();
        // SAFETY: the mapping was made with this address and length, and no
        // reference to it outlives this value.
        let _ = unsafe { munmap(self.at.as_ptr(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_file::MemoryFile;
    use rustix::io::Errno;
    use rustix::mm::{MprotectFlags, mprotect};

    #[test]
    fn a_mapping_is_the_file() {
        let file = MemoryFile::new("test", 2 * PAGE as u64).unwrap();
        let mut one = Mapping::new(file.file(), 2 * PAGE).unwrap();
        let mut other = Mapping::new(file.file(), 2 * PAGE).unwrap();
        one.bytes()[PAGE] = 7;
        assert_eq!((other.bytes()[PAGE], other.bytes().len()), (7, 2 * PAGE));
    }

    /// What a tool has mapped stays as it is, whatever it asks for.
    #[test]
    fn a_reader_never_gets_a_mapping_to_write() {
        let file = MemoryFile::of("test", &[1; PAGE]).unwrap();
        let reader = file.reader().unwrap();
        let (none, flags) = (null_mut(), MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapped = unsafe { mmap(none, PAGE, ProtFlags::READ, flags, &reader, 0) }.unwrap();
        let both = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the mapping is the test's own, and nobody has a reference to it.
        let protected = unsafe { mprotect(mapped, PAGE, both) };
        assert_eq!(protected, Err(Errno::ACCESS));
        // SAFETY: as above.
        unsafe { munmap(mapped, PAGE) }.unwrap();
    }
}
