//! What is not safe: a memory slot, and descriptors that kvm-ioctls has as bare numbers.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use crate::kvm_bindings::kvm_userspace_memory_region;
use crate::kvm_ioctls::{Error, VcpuFd, VmFd};

/// Gives `vm` the memory that `SharedMemory` has mapped for its slot.
pub(crate) fn set_memory(vm: &VmFd, address: u64, size: u64) -> Result<(), Error> {
    let slot = kvm_userspace_memory_region {
        memory_size: size,
        userspace_addr: address,
        ..Default::default()
    };
    // SAFETY: the memory stays mapped until the program ends.
    unsafe { vm.set_user_memory_region(slot) }
}

pub(crate) fn vm_fd(vm: &VmFd) -> BorrowedFd<'_> {
    // SAFETY: a `VmFd` has its descriptor open as long as it lives.
    unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) }
}

pub(crate) fn vcpu_fd(vcpu: &VcpuFd) -> BorrowedFd<'_> {
    // SAFETY: as above.
    unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) }
}
