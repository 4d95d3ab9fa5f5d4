//! What is not safe: a memory slot, and a process in which a VM is dead.

use std::io::ErrorKind;

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

/// Whether `holds`, asked in a child process: there each ioctl of a VM that this process has
/// made fails with EIO.
pub(crate) fn in_a_child(holds: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs on this thread alone, and leaves without running what the
    // parent has registered for its end.
    match unsafe { libc::fork() } {
        0 => {
            let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(holds));
            let status = i32::from(!held.unwrap_or(false));
            // SAFETY: ends the process, which is the child.
            unsafe { libc::_exit(status) }
        }
        child => {
            assert!(child > 0, "no child process");
            let mut status = 0;
            // The kick timer that the parent's vCPU has set interrupts the wait.
            let waited = loop {
                // SAFETY: the status is a variable of this frame.
                let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
                if waited != -1 || std::io::Error::last_os_error().kind() != ErrorKind::Interrupted
                {
                    break waited;
                }
            };
            waited == child && status == 0
        }
    }
}
