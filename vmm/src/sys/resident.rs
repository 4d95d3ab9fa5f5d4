//! Which pages of the guest's memory there are.

use std::io;

/// Bytes of a page.
const PAGE: usize = 4096;
/// Pages asked about at once.
const CHUNK: usize = 1 << 16;

/// Bytes of the pages that are in memory, of the `bytes` bytes from `address` on.
///
/// # Errors
/// The error of `mincore`.
pub fn resident_bytes(address: *mut u8, bytes: usize) -> io::Result<u64> {
    let pages = bytes / PAGE;
    let mut seen = vec![0; CHUNK.min(pages)];
    let mut resident = 0;
    for first in (0..pages).step_by(CHUNK) {
        let count = CHUNK.min(pages - first);
        let at = address.wrapping_add(first * PAGE);
        // SAFETY: mincore only looks at the page tables of the range, mapped or not,
        // and writes one byte a page, for which `seen` has room.
        let ret = unsafe { libc::mincore(at.cast(), count * PAGE, seen.as_mut_ptr()) };
        if ret != 0 {
            return Err(io::Error::last_os_error());
        }
        let there = seen[..count].iter().map(|page| u64::from(page & 1));
        resident += there.sum::<u64>() * PAGE as u64;
    }
    Ok(resident)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pages_that_were_touched_are_there() {
        let bytes = 2 * PAGE;
        // SAFETY: a new private mapping at an address of the kernel's choice.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        let at: *mut u8 = at.cast();
        // SAFETY: the second page of the mapping.
        unsafe { at.add(PAGE).write(7) };
        assert_eq!(resident_bytes(at, bytes).unwrap(), PAGE as u64);
        // SAFETY: the mapping above, of which no reference is left.
        unsafe { libc::munmap(at.cast(), bytes) };
    }
}
