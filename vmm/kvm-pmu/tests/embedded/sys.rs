//! What is not safe: a memory slot, a process in which a VM is dead, and signals.

use std::io::ErrorKind;
use std::os::fd::{AsRawFd as _, OwnedFd};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use kvm_pmu::{Errno, SharedMemory, TwiceMapped};
use vm_memory::{GuestAddress, GuestMemoryBackend as _};

/// Gives `vm` the first `size` bytes of `memory`, which has to outlive it.
pub(crate) fn set_memory(vm: &VmFd, memory: &TwiceMapped, size: usize) {
    let at = memory.for_kvm().get_host_address(GuestAddress(0)).unwrap();
    set_slot(vm, at as u64, size);
}

/// The same of memory that the VMM has mapped once, and `shared` again.
pub(crate) fn share_memory(vm: &VmFd, memory: &TwiceMapped, shared: &SharedMemory, size: usize) {
    let at = memory.for_vmm().get_host_address(GuestAddress(0)).unwrap();
    // SAFETY: guest memory of that size, which is only accessed volatilely.
    let at = unsafe { shared.add_mapped((0, size), at) }.unwrap();
    // A slot is deleted before it has other memory.
    set_slot(vm, at, 0);
    set_slot(vm, at, size);
}

fn set_slot(vm: &VmFd, at: u64, size: usize) {
    let slot = kvm_userspace_memory_region {
        memory_size: size as u64,
        userspace_addr: at,
        ..Default::default()
    };
    // SAFETY: the mapping has `size` bytes, and the caller drops it after the VM.
    unsafe { vm.set_user_memory_region(slot) }.unwrap();
}

/// `KVM_RUN` of a vCPU, by whatever a VMM has for it.
pub(crate) fn kvm_run(vcpu: &OwnedFd) -> Result<(), Errno> {
    const KVM_RUN: libc::c_ulong = 0xae80;
    // SAFETY: it has no argument, and touches guest memory and the vCPU's mapping alone.
    match unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_RUN, 0) } {
        0 => Ok(()),
        _ => Err(Errno::last()),
    }
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

/// A handler of signals.
pub(crate) type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// One that does nothing, as VMMs have it that only want `KVM_RUN` to end.
pub(crate) extern "C" fn deaf(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// One that tells kvm-pmu.
pub(crate) extern "C" fn passes_on(
    _: libc::c_int,
    info: *mut libc::siginfo_t,
    _: *mut libc::c_void,
) {
    // SAFETY: it is installed with SA_SIGINFO, so the kernel hands it one.
    kvm_pmu::on_kick(unsafe { &*info });
}

/// Has `handler` handle `signal`.
pub(crate) fn handle(signal: i32, handler: Handler) {
    // SAFETY: all zeros are a valid sigaction; the kernel calls the handler as SA_SIGINFO says,
    // with the three arguments that a `Handler` has.
    let installed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut())
    };
    assert_eq!(installed, 0);
}

/// Has the kernel do `what` ([`libc::SIG_DFL`], [`libc::SIG_IGN`]) with `signal`.
pub(crate) fn ignore(signal: i32, what: libc::sighandler_t) {
    // SAFETY: neither runs code of this process.
    let before = unsafe { libc::signal(signal, what) };
    assert_ne!(before, libc::SIG_ERR);
}

/// Whether `handler` handles `signal`.
pub(crate) fn is_handled_by(signal: i32, handler: Handler) -> bool {
    // SAFETY: all zeros are a valid sigaction, which the call overwrites; it sets none.
    let action = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action);
        action
    };
    action.sa_sigaction == handler as libc::sighandler_t
}

/// Has this thread take `signal` no more.
pub(crate) fn block(signal: i32) {
    // SAFETY: the set is initialised before it is used, and changes what this thread blocks alone.
    let blocked = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut())
    };
    assert_eq!(blocked, 0);
}
