//! What kvm-ioctls has no safe call for.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VmFd};
use kvm_pmu::{Errno, KvmVcpu, VcpuError};
use vmm_sys_util::errno;

use crate::sys::SignalMask;

/// `KVM_SET_SIGNAL_MASK`: `_IOW(KVMIO, 0x8b, struct kvm_signal_mask)`, whose size
/// is that of its header (Linux `uapi/linux/kvm.h`).
const KVM_SET_SIGNAL_MASK: libc::c_ulong = 0x4004_ae8b;

/// `struct kvm_signal_mask` with the kernel's signal set.
#[repr(C, packed)]
struct KvmSignalMask {
    len: u32,
    set: u64,
}

/// `KVM_SET_USER_MEMORY_REGION`.
pub(super) fn set_memory_region(
    fd: &VmFd,
    entry: kvm_userspace_memory_region,
) -> Result<(), errno::Error> {
    // SAFETY: `entry` describes memory of a `GuestMemoryMmap` that the `KvmVm`
    // owns next to this descriptor and drops after it; guest memory is only
    // accessed through vm-memory's volatile accessors.
    unsafe { fd.set_user_memory_region(entry) }
}

/// Signals that stay blocked inside the `KVM_RUN` of `vcpu`, instead of the thread's own;
/// `None` makes it the thread's own again.
pub(crate) fn set_signal_mask(vcpu: &KvmVcpu, mask: Option<SignalMask>) -> Result<(), VcpuError> {
    let mask = mask.map(|SignalMask(set)| KvmSignalMask {
        len: u32::try_from(size_of::<u64>()).unwrap_or(0),
        set,
    });
    let argument = mask
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref::<KvmSignalMask>);
    // SAFETY: the argument is null, or a structure whose `len` is the size of
    // the set behind it; it is only read, during the call.
    match unsafe { libc::ioctl(vcpu.as_fd().as_raw_fd(), KVM_SET_SIGNAL_MASK, argument) } {
        0 => Ok(()),
        _ => Err(VcpuError::new(
            vcpu.id(),
            "KVM_SET_SIGNAL_MASK",
            Errno::last(),
        )),
    }
}

/// KVM behind an open `/dev/kvm`.
pub(super) fn kvm_from(file: File) -> Kvm {
    // SAFETY: the descriptor is open and, by `into_raw_fd`, owned by nobody
    // else. The first ioctl finds out whether KVM is behind it.
    unsafe { Kvm::from_raw_fd(file.into_raw_fd()) }
}
