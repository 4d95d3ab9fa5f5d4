//! The guest's RAM, as the processor's loads and stores see it.
#![allow(
    clippy::cast_possible_truncation,
    reason = "the host has 64 bits, and offsets are checked"
)]

use thiserror::Error;
use vm_memory::{
    Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    MemoryRegionAddress,
};

/// Bytes of a page, and of what RAM's regions are made of.
pub const PAGE: u64 = 4096;

/// Why memory cannot be a guest's RAM.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RamError {
    /// A region that does not consist of whole pages.
    #[error("RAM at {start:#x} of {len:#x} bytes is not made of whole pages")]
    NotPages {
        /// Guest-physical address.
        start: u64,
        /// Bytes.
        len: u64,
    },
    /// A region without a byte.
    #[error("RAM at {0:#x} has no bytes")]
    NoBytes(u64),
    /// No region at all.
    #[error("there is no RAM")]
    Empty,
    /// The host's memory has no such room.
    #[error("the host has no {0:#x} bytes of memory")]
    Host(u64),
}

#[derive(Debug)]
struct Region {
    start: u64,
    len: u64,
    /// Offset of its first byte among all RAM.
    offset: u64,
    host: *mut u8,
}

/// RAM. An *offset* counts the bytes of all regions in their order, holes left out.
#[derive(Debug)]
pub struct Ram {
    /// Keeps the mapping behind the pointers.
    memory: GuestMemoryMmap,
    /// The first region's memory: most accesses go there.
    first: *mut u8,
    first_len: u64,
    regions: Vec<Region>,
}

// SAFETY: the pointers lead into the mapping that `memory` owns, which may be used by any
// thread, and are used by whoever holds the one `Ram`.
unsafe impl Send for Ram {}

/// Integers that memory holds, of any bits.
pub trait Scalar: Copy + Default + private::Sealed {
    /// All bits set: what a read of absent memory gives.
    const ONES: Self;
}

mod private {
    /// Nobody else makes a [`Scalar`](super::Scalar).
    pub trait Sealed {}
}

macro_rules! scalar {
    ($($one:ty)*) => {$(
        impl private::Sealed for $one {}
        impl Scalar for $one {
            const ONES: Self = <$one>::MAX;
        }
    )*};
}

scalar!(u8 u16 u32 u64 u128);

impl Ram {
    /// The RAM that `memory` is.
    ///
    /// # Errors
    /// There is none, or a region is empty or not made of whole pages.
    pub fn new(memory: GuestMemoryMmap) -> Result<Self, RamError> {
        let mut regions = Vec::new();
        let mut offset = 0;
        for region in memory.iter() {
            let (start, len) = (region.start_addr().raw_value(), region.len());
            if len == 0 {
                return Err(RamError::NoBytes(start));
            }
            if start % PAGE != 0 || len % PAGE != 0 {
                return Err(RamError::NotPages { start, len });
            }
            let host = region
                .get_host_address(MemoryRegionAddress(0))
                .map_err(|_| RamError::Host(len))?;
            regions.push(Region {
                start,
                len,
                offset,
                host,
            });
            offset += len;
        }
        let first = regions.first().ok_or(RamError::Empty)?;
        Ok(Self {
            first: first.host,
            first_len: first.len,
            regions,
            memory,
        })
    }

    /// `len` bytes of zeroes from guest-physical address 0.
    ///
    /// # Errors
    /// The host has no such room, or `len` is 0 or not made of whole pages.
    pub fn zeroed(len: u64) -> Result<Self, RamError> {
        if len == 0 {
            return Err(RamError::NoBytes(0));
        }
        let bytes = usize::try_from(len).map_err(|_| RamError::Host(len))?;
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes)])
            .map_err(|_| RamError::Host(len))?;
        Self::new(memory)
    }

    /// The memory as others see it. Who writes to it while a processor is not running has to
    /// say so to [`Cpu::written`](crate::Cpu::written).
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Bytes of all regions.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.len).sum()
    }

    /// The offset of a guest-physical address, if there is RAM.
    #[must_use]
    pub fn offset_of(&self, physical: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let inside = physical.wrapping_sub(region.start);
            (inside < region.len).then(|| region.offset + inside)
        })
    }

    /// Where `len` bytes at an offset are; they lie in one region.
    #[inline(always)]
    fn host(&self, offset: u64, len: u64) -> Option<*mut u8> {
        // A region has at least a page, and `len` is at most one.
        if offset <= self.first_len.wrapping_sub(len) {
            // SAFETY: offset + len <= first_len, the bytes that `first` points to.
            return Some(unsafe { self.first.add(offset as usize) });
        }
        self.far(offset, len)
    }

    #[cold]
    fn far(&self, offset: u64, len: u64) -> Option<*mut u8> {
        self.regions.iter().find_map(|region| {
            let inside = offset.checked_sub(region.offset)?;
            (inside < region.len && region.len - inside >= len)
                // SAFETY: inside + len <= region.len, the bytes that `host` points to.
                .then(|| unsafe { region.host.add(inside as usize) })
        })
    }

    /// What is at an offset; all ones where no RAM is.
    #[inline(always)]
    pub fn load<S: Scalar>(&self, offset: u64) -> S {
        match self.host(offset, size_of::<S>() as u64) {
            // SAFETY: `host` gives as many bytes of the mapping as S has, and any bits are an S.
            Some(at) => unsafe { at.cast::<S>().read_unaligned() },
            None => S::ONES,
        }
    }

    /// Stores at an offset; nothing where no RAM is.
    #[inline(always)]
    pub fn store<S: Scalar>(&mut self, offset: u64, value: S) {
        if let Some(at) = self.host(offset, size_of::<S>() as u64) {
            // SAFETY: `host` gives as many bytes of the mapping as S has; `&mut self` says that
            // no other processor stores.
            unsafe { at.cast::<S>().write_unaligned(value) };
        }
    }

    /// Moves `len` bytes, at most a page, as if through a buffer.
    pub fn copy(&mut self, from: u64, to: u64, len: u64) {
        let len = len.min(PAGE);
        if let (Some(from), Some(to)) = (self.host(from, len), self.host(to, len)) {
            // SAFETY: both have `len` bytes of the mapping; `copy` lets them overlap.
            unsafe { std::ptr::copy(from, to, len as usize) };
        }
    }

    /// Fills `count` elements with `value`, a page of them at most.
    pub fn fill<S: Scalar>(&mut self, offset: u64, value: S, count: u64) {
        let size = size_of::<S>() as u64;
        let count = count.min(PAGE / size);
        if let Some(at) = self.host(offset, count * size) {
            let at = at.cast::<S>();
            for index in 0..count as usize {
                // SAFETY: `host` gives as many bytes of the mapping as `count` elements have.
                unsafe { at.add(index).write_unaligned(value) };
            }
        }
    }

    /// Copies bytes out, of one page at most.
    pub fn bytes_at(&self, offset: u64, to: &mut [u8]) {
        if let Some(at) = self.host(offset, to.len() as u64) {
            // SAFETY: `host` gives `to.len()` bytes of the mapping, which `to` does not overlap,
            // being the host's own memory.
            unsafe { std::ptr::copy_nonoverlapping(at, to.as_mut_ptr(), to.len()) };
        }
    }
}
