//! Descriptors of kvm-ioctls, which has them as bare numbers.

use std::os::fd::{AsRawFd, BorrowedFd};

use kvm_ioctls::{VcpuFd, VmFd};
use vmm_sys_util::errno;

use crate::error::Errno;

/// The descriptor of a VM of kvm-ioctls.
#[must_use]
pub fn vm_fd(vm: &VmFd) -> BorrowedFd<'_> {
    // SAFETY: a `VmFd` owns its descriptor and closes it when it is dropped, which it is not as
    // long as it is borrowed.
    unsafe { BorrowedFd::borrow_raw(vm.as_raw_fd()) }
}

/// The descriptor of a vCPU of kvm-ioctls.
#[must_use]
pub fn vcpu_fd(vcpu: &VcpuFd) -> BorrowedFd<'_> {
    // SAFETY: as above, of a `VcpuFd`.
    unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) }
}

impl From<Errno> for errno::Error {
    fn from(Errno(number): Errno) -> Self {
        Self::new(number)
    }
}

impl From<errno::Error> for Errno {
    fn from(error: errno::Error) -> Self {
        Self(error.errno())
    }
}
