//! From linear to guest-physical addresses, by the registers of a vCPU and
//! guest-exit's walk through the page tables.

use guest_exit::GuestMemory;
pub(super) use guest_exit::{Mapped, Paging};
use kvm_bindings::kvm_sregs;

use crate::memory::GuestBytes;

/// Bytes of the smallest page.
pub(super) const PAGE: u64 = 0x1000;

/// The page in which `address` is.
pub(crate) fn page_of(address: u64) -> u64 {
    address & !(PAGE - 1)
}

/// How a vCPU with these registers translates.
pub(super) fn paging_of(sregs: &kvm_sregs) -> Paging {
    Paging::of_registers(sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer)
}

struct Frames<'a>(&'a dyn GuestBytes);

impl GuestMemory for Frames<'_> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.0.read(address, buffer)
    }
}

/// Where `linear` leads to, or `None` where nothing is mapped. Access rights are not
/// checked: the processor has already fetched or pushed what is read here.
#[must_use]
pub(super) fn map(memory: &dyn GuestBytes, paging: &Paging, linear: u64) -> Option<Mapped> {
    paging.map(&Frames(memory), linear)
}
