//! Memory that the VMM writes to.

use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A memory file, mapped shared and read-only.
#[derive(Debug)]
pub(crate) struct Pages {
    start: NonNull<AtomicU64>,
    /// Bytes. Not 0.
    size: usize,
}

// SAFETY: the mapping belongs to no thread, and its words are read atomically.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps `size` bytes from the beginning of a file that does not shrink while this is
    /// there. A size that is no multiple of 8 is mapped up to the next one, which lies in
    /// the same page.
    pub(crate) fn map(file: BorrowedFd<'_>, size: usize) -> Result<Self, Errno> {
        // A file that is too short would end the program at the first access.
        let length = rustix::fs::fstat(file)?.st_size;
        if usize::try_from(length).map_or(true, |length| length < size) {
            return Err(Errno::INVAL);
        }
        let (prot, flags) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: the kernel chooses a range that nothing else uses.
        let start = unsafe { mmap(null_mut(), size, prot, flags, file, 0)? };
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        Ok(Pages { start, size })
    }

    /// Its size in bytes.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// The word at this many bytes from the beginning.
    pub(crate) fn word(&self, at: usize) -> Option<u64> {
        if !at.is_multiple_of(8) || at >= self.size {
            return None;
        }
        // SAFETY: `at` lies inside the mapping, which lasts as long as `self` and
        // consists of whole pages, so that the word's 8 bytes do too; it is
        // aligned, because a mapping begins at a page.
        let word = unsafe { self.start.byte_add(at).as_ref() };
        Some(word.load(Ordering::Relaxed))
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: this is the range that was mapped, and nothing refers to it
        // any more: words are copied out.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.size) };
    }
}
