//! Guest memory with nothing before, between and behind: who leaves it dies.

use std::ptr::null_mut;

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};

/// Bytes of nothing at each end of a region: more than an offset of 32 bits could leave, were
/// these free.
const NOTHING: usize = 1 << 20;

/// The mapping behind it.
pub(crate) struct Guarded {
    at: *mut libc::c_void,
    len: usize,
}

impl Guarded {
    /// Memory of zeroes at these guest-physical addresses, with so many bytes each. It is to be
    /// used no longer than the first of the two is there.
    pub(crate) fn new(regions: &[(u64, u64)]) -> (Self, GuestMemoryMmap) {
        let bytes = |len: u64| usize::try_from(len).expect("a length");
        let sum: usize = regions.iter().map(|(_, len)| bytes(*len) + NOTHING).sum();
        let len = sum + NOTHING;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe { libc::mmap(null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED, "no memory");
        let guarded = Guarded { at, len };
        let mut next = NOTHING;
        let regions = regions.iter().map(|(start, len)| {
            let size = bytes(*len);
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: `next + size` is at most `sum`: it is a part of the mapping.
            let region = unsafe {
                let host = guarded.at.add(next);
                assert_eq!(libc::mprotect(host, size, protection), 0, "no memory");
                MmapRegionBuilder::new(size)
                    .with_raw_mmap_pointer(host.cast())
                    .with_mmap_prot(protection)
                    .with_mmap_flags(flags)
                    .build()
                    .expect("a region")
            };
            next += size + NOTHING;
            GuestRegionMmap::new(region, GuestAddress(*start)).expect("a region")
        });
        let memory = GuestMemoryMmap::from_regions(regions.collect()).expect("memory");
        (guarded, memory)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made; who has a pointer into it is gone.
        unsafe { libc::munmap(self.at, self.len) };
    }
}
