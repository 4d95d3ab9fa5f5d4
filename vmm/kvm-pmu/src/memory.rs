//! Guest memory as the traps need it: bytes at guest-physical addresses.

use std::fmt;

/// Guest-physical memory. With the feature `vm-memory`, every `GuestMemoryMmap` is one.
pub trait GuestBytes {
    /// Fills `buffer` from `address`; false where some of it is no memory.
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool;
    /// Writes `bytes` at `address`; false where some of it is no memory.
    fn write(&self, address: u64, bytes: &[u8]) -> bool;
}

/// The memory of a vCPU in SMM, whose addresses lead to SMRAM: nothing that a trap could
/// read there, and nothing of the kernel's that it could take for it.
#[derive(Debug)]
pub(crate) struct OutOfReach;

impl GuestBytes for OutOfReach {
    fn read(&self, _: u64, _: &mut [u8]) -> bool {
        false
    }

    fn write(&self, _: u64, _: &[u8]) -> bool {
        false
    }
}

impl dyn GuestBytes + '_ {
    /// The `N` bytes at `address`, if all of them are memory.
    #[must_use]
    pub fn array<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.read(address, &mut bytes).then_some(bytes)
    }
}

impl fmt::Debug for dyn GuestBytes + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GuestBytes")
    }
}
