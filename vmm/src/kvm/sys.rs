//! The unions of `kvm_run` and the vCPU's mapping.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};

use kvm_bindings::{
    KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_IO, KVM_EXIT_MMIO, KVM_INTERNAL_ERROR_EMULATION,
    KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES, kvm_run, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vmm_sys_util::errno;

use super::exit::InternalError;
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

/// Bytes of one element of a port access (1, 2 or 4); 1 for another exit.
pub(super) fn io_width(run: &kvm_run) -> u8 {
    if run.exit_reason != KVM_EXIT_IO {
        return 1;
    }
    // SAFETY: the exit reason, which the kernel wrote with the union, selects `io`.
    unsafe { run.__bindgen_anon_1.io.size }
}

/// Hands `bytes` to a pending IN; surplus bytes are ignored. `run` must be the
/// vCPU's whole mapping, as `VcpuFd::get_kvm_run` gives it.
pub(super) fn answer_io(run: &mut kvm_run, mapping: usize, bytes: &[u8]) {
    if run.exit_reason != KVM_EXIT_IO {
        return;
    }
    // SAFETY: the exit reason selects `io`.
    let io = unsafe { run.__bindgen_anon_1.io };
    let len = usize::from(io.size) * io.count as usize;
    let len = len.min(bytes.len());
    let Ok(offset) = usize::try_from(io.data_offset) else {
        return;
    };
    if offset.checked_add(len).is_none_or(|end| end > mapping) {
        return;
    }
    // SAFETY: `run` is the start of the vCPU's mapping of `mapping` bytes, and
    // offset + len was just checked against it; `bytes` is another allocation.
    unsafe {
        let data = std::ptr::from_mut(run).cast::<u8>().add(offset);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), data, len);
    }
}

/// Hands the bytes of a load over.
pub(super) fn answer_mmio(run: &mut kvm_run, bytes: [u8; 8]) {
    if run.exit_reason == KVM_EXIT_MMIO {
        run.__bindgen_anon_1.mmio.data = bytes;
    }
}

/// What KVM reports of an internal error.
pub(super) fn internal_error(run: &kvm_run) -> InternalError {
    if run.exit_reason != KVM_EXIT_INTERNAL_ERROR {
        return InternalError {
            suberror: 0,
            bytes: Vec::new(),
        };
    }
    // SAFETY: the exit reason selects `internal`, of which `emulation_failure`
    // is the view for one suberror; both begin with suberror and ndata.
    let (internal, failure) = unsafe {
        (
            run.__bindgen_anon_1.internal,
            run.__bindgen_anon_1.emulation_failure,
        )
    };
    let mut bytes = Vec::new();
    if internal.suberror == KVM_INTERNAL_ERROR_EMULATION && internal.ndata >= 3 {
        // SAFETY: the union inside has one member, plain integers.
        let insn = unsafe { failure.__bindgen_anon_1.__bindgen_anon_1 };
        let valid = failure.flags & u64::from(KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES);
        if valid != 0 {
            let len = usize::from(insn.insn_size).min(insn.insn_bytes.len());
            bytes.extend_from_slice(&insn.insn_bytes[..len]);
        }
    }
    InternalError {
        suberror: internal.suberror,
        bytes,
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
