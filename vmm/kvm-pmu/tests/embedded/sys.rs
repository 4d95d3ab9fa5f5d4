//! The one call of kvm-ioctls that is not safe.

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use kvm_pmu::TwiceMapped;
use vm_memory::{GuestAddress, GuestMemoryBackend as _};

/// Gives `vm` the first `size` bytes of `memory`, which has to outlive it.
pub(crate) fn set_memory(vm: &VmFd, memory: &TwiceMapped, size: usize) {
    let at = memory.for_kvm().get_host_address(GuestAddress(0)).unwrap();
    let slot = kvm_userspace_memory_region {
        memory_size: size as u64,
        userspace_addr: at as u64,
        ..Default::default()
    };
    // SAFETY: the mapping has `size` bytes, and the caller drops it after the VM.
    unsafe { vm.set_user_memory_region(slot) }.unwrap();
}
