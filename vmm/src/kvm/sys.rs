//! The unions of `kvm_run` and the vCPU's mapping.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};

use kvm_bindings::{KVM_EXIT_IO, KVM_EXIT_MMIO, kvm_run, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
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

/// The bytes of a pending port access; none of another exit. `run` must be the vCPU's whole
/// mapping of `mapping` bytes, as `VcpuFd::get_kvm_run` gives it.
pub(super) fn io_data(run: &mut kvm_run, mapping: usize) -> &mut [u8] {
    if run.exit_reason != KVM_EXIT_IO {
        return &mut [];
    }
    // SAFETY: the exit reason, which the kernel wrote with the union, selects `io`.
    let io = unsafe { run.__bindgen_anon_1.io };
    let len = usize::from(io.size) * usize::try_from(io.count).unwrap_or(0);
    let Ok(offset) = usize::try_from(io.data_offset) else {
        return &mut [];
    };
    let behind = offset >= size_of::<kvm_run>();
    if !behind || offset.checked_add(len).is_none_or(|end| end > mapping) {
        return &mut [];
    }
    // SAFETY: `run` is the start of the vCPU's mapping of `mapping` bytes, in which
    // offset + len was just found to end, and behind the structure itself; the kernel
    // touches it in `KVM_RUN` alone, which wants the descriptor that `run` is borrowed of.
    unsafe {
        let data = std::ptr::from_mut(run).cast::<u8>().add(offset);
        std::slice::from_raw_parts_mut(data, len)
    }
}

/// Hands the bytes of a load over.
pub(super) fn answer_mmio(run: &mut kvm_run, bytes: [u8; 8]) {
    if run.exit_reason == KVM_EXIT_MMIO {
        run.__bindgen_anon_1.mmio.data = bytes;
    }
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

/// Signals blocked inside `KVM_RUN`; `None`: those of the thread.
pub(super) fn set_signal_mask(fd: &VcpuFd, mask: Option<SignalMask>) -> Result<(), errno::Error> {
    let mask = mask.map(|SignalMask(set)| KvmSignalMask {
        len: u32::try_from(size_of::<u64>()).unwrap_or(0),
        set,
    });
    let argument = mask
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref::<KvmSignalMask>);
    // SAFETY: the argument is null, or a structure whose `len` is the size of
    // the set behind it; it is only read, during the call.
    match unsafe { libc::ioctl(fd.as_raw_fd(), KVM_SET_SIGNAL_MASK, argument) } {
        0 => Ok(()),
        _ => errno::errno_result(),
    }
}

/// KVM behind an open `/dev/kvm`.
pub(super) fn kvm_from(file: File) -> Kvm {
    // SAFETY: the descriptor is open and, by `into_raw_fd`, owned by nobody
    // else. The first ioctl finds out whether KVM is behind it.
    unsafe { Kvm::from_raw_fd(file.into_raw_fd()) }
}
