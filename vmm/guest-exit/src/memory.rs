//! Guest memory to be read: bytes at guest-physical addresses.

use std::fmt;

/// Guest-physical memory that can be read. The guest may change it at any time.
pub trait GuestMemory {
    /// Fills `buffer` from `address`; false where some of it is no memory. What `buffer`
    /// then holds is of no use.
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool;
}

impl<M: GuestMemory + ?Sized> GuestMemory for &M {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        (**self).read(address, buffer)
    }
}

impl dyn GuestMemory + '_ {
    /// The `N` bytes at `address`, if all of them are memory.
    #[must_use]
    pub fn array<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.read(address, &mut bytes).then_some(bytes)
    }
}

impl fmt::Debug for dyn GuestMemory + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GuestMemory")
    }
}
