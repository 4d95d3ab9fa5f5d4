//! Guest memory of which a page can be made read-only for the guest alone.

use std::fmt;

use crate::memory::GuestBytes;
use crate::sys::SharedMemory;
use crate::trap::PatchRefusal;

/// What a VMM offers so that the guest's #GP handler can be patched: memory that is
/// mapped twice, once for KVM's slots and once for all accesses of its own.
pub trait ProtectPages: fmt::Debug + Send + Sync {
    /// Makes the page at `page` read-only in the mapping that KVM's slots have, or
    /// writable again. A store of the guest's then ends its `KVM_RUN`.
    ///
    /// # Errors
    /// The page is not plain memory that the guest reaches at this address alone, or
    /// the host refuses.
    fn protect(&self, page: u64, writable: bool) -> Result<(), PatchRefusal>;

    /// The mapping that stays writable.
    fn bytes(&self) -> &dyn GuestBytes;
}

impl ProtectPages for SharedMemory {
    fn protect(&self, page: u64, writable: bool) -> Result<(), PatchRefusal> {
        self.set_writable(page, writable)
    }

    fn bytes(&self) -> &dyn GuestBytes {
        self
    }
}
