//! vm-memory's guest memory, and such memory that is mapped twice.

use std::io;
use std::sync::Arc;

use vm_memory::bitmap::Bitmap;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

use crate::memory::GuestBytes;
use crate::protect::ProtectPages;
use crate::sys::{protect_page, unnamed_file};
use crate::trap::PatchRefusal;

impl<B: Bitmap + 'static> GuestBytes for GuestMemoryMmap<B> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.read_slice(buffer, GuestAddress(address)).is_ok()
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        self.write_slice(bytes, GuestAddress(address)).is_ok()
    }
}

/// Guest memory that is mapped twice.
#[derive(Debug, Clone)]
pub struct TwiceMapped {
    guest: GuestMemoryMmap,
    ours: GuestMemoryMmap,
}

impl TwiceMapped {
    /// Of these ranges, which are sorted and apart and consist of whole pages.
    ///
    /// # Errors
    /// The host has no memory for it.
    pub fn new(ranges: &[(GuestAddress, usize)]) -> io::Result<Self> {
        let size = ranges.iter().map(|(_, len)| *len as u64).sum();
        let file = Arc::new(unnamed_file(size)?);
        let mut offset = 0;
        let pieces: Vec<_> = ranges
            .iter()
            .map(|&(start, len)| {
                let from = FileOffset::from_arc(file.clone(), offset);
                offset += len as u64;
                (start, len, Some(from))
            })
            .collect();
        let map = || {
            GuestMemoryMmap::from_ranges_with_files(&pieces)
                .map_err(|error| io::Error::other(error.to_string()))
        };
        Ok(Self {
            guest: map()?,
            ours: map()?,
        })
    }

    /// The mapping for KVM's slots; nobody else may write through it.
    #[must_use]
    pub fn for_kvm(&self) -> &GuestMemoryMmap {
        &self.guest
    }

    /// The mapping for all accesses of the VMM's own.
    #[must_use]
    pub fn for_vmm(&self) -> &GuestMemoryMmap {
        &self.ours
    }
}

impl ProtectPages for TwiceMapped {
    fn protect(&self, page: u64, writable: bool) -> Result<(), PatchRefusal> {
        protect_page(&self.guest, page, writable).map_err(|error| match error.raw_os_error() {
            Some(libc::EFAULT) => PatchRefusal::NotRam,
            errno => PatchRefusal::Protect(errno.unwrap_or(0)),
        })
    }

    fn bytes(&self) -> &dyn GuestBytes {
        &self.ours
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;

    const RANGES: [(GuestAddress, usize); 2] =
        [(GuestAddress(0), 0x3000), (GuestAddress(0x10_0000), 0x2000)];

    #[test]
    fn both_mappings_are_the_same_memory() {
        let memory = TwiceMapped::new(&RANGES).unwrap();
        for at in [0x2ffc, 0x10_1000] {
            memory
                .for_vmm()
                .write_obj(at, GuestAddress(at.into()))
                .unwrap();
            let seen: u32 = memory.for_kvm().read_obj(GuestAddress(at.into())).unwrap();
            assert_eq!(seen, at);
        }
    }

    #[test]
    fn a_protected_page_stays_writable_for_us() {
        let memory = TwiceMapped::new(&RANGES).unwrap();
        memory.protect(0x10_1000, false).unwrap();
        assert!(memory.bytes().write(0x10_1ffe, &[1, 2]));
        let seen: [u8; 2] = memory.for_kvm().read_obj(GuestAddress(0x10_1ffe)).unwrap();
        assert_eq!(seen, [1, 2]);
        memory.protect(0x10_1000, true).unwrap();
        let write = memory.for_kvm().write_obj(3u8, GuestAddress(0x10_1ffe));
        assert!(write.is_ok());
        assert_eq!(memory.protect(0x5000, false), Err(PatchRefusal::NotRam));
        let odd = Err(PatchRefusal::Protect(libc::EINVAL));
        assert_eq!(memory.protect(0x10_0800, false), odd);
    }
}
