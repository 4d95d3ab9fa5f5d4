//! Memory whose every page faults when it is touched first.

use std::io;
use std::ptr::{self, NonNull};

/// Size of a page of x86.
const PAGE: usize = 4096;

/// An anonymous mapping that nothing has touched yet.
#[derive(Debug)]
pub(crate) struct FreshPages {
    base: NonNull<u8>,
    pages: usize,
}

impl FreshPages {
    /// Maps `pages` pages, each to be brought in by a fault of its own.
    pub(crate) fn map(pages: usize) -> io::Result<Self> {
        let length = pages * PAGE;
        // SAFETY: a new private anonymous mapping at an address of the
        // kernel's choice touches no memory that anything else uses.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the range is the mapping just made. A kernel without huge
        // pages refuses the advice and needs none.
        unsafe { libc::madvise(base, length, libc::MADV_NOHUGEPAGE) };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(FreshPages { base, pages })
    }

    /// Writes to every page: one fault each, the first time.
    pub(crate) fn touch(&self) {
        for page in 0..self.pages {
            // SAFETY: `page` is below `self.pages`, so the byte lies within
            // the mapping, which `self` owns and nothing else refers to.
            unsafe { self.base.as_ptr().add(page * PAGE).write_volatile(1) };
        }
    }
}

impl Drop for FreshPages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own and ends with it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.pages * PAGE) };
    }
}
