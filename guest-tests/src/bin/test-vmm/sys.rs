//! What needs unsafe code: the slot of KVM's that is the guest's memory, protection of its pages,
//! the signal to a thread, and KVM's structures as bytes.

use std::io;
use std::mem::size_of;
use std::os::unix::thread::JoinHandleExt;
use std::thread::JoinHandle;

use kvm_bindings::{
    KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, kvm_clock_data, kvm_debugregs, kvm_device_attr,
    kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs, kvm_userspace_memory_region,
    kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{VcpuFd, VmFd};
use kvm_pmu::{on_kick, own_kick_handler};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};
use vmm_sys_util::{errno, ioctl_iow_nr};

const PAGE_SIZE: usize = 0x1000;

ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);

/// Gives the guest all of `memory`, which the caller keeps mapped for as long as it has the VM.
pub(crate) fn give(vm: &VmFd, memory: &GuestMemoryMmap) -> Result<(), errno::Error> {
    for (number, region) in (0..).zip(memory.iter()) {
        let start = region.start_addr();
        let host = memory.get_host_address(start);
        let slot = kvm_userspace_memory_region {
            slot: number,
            flags: 0,
            guest_phys_addr: start.0,
            memory_size: region.len(),
            userspace_addr: host.map_err(|_| errno::Error::new(libc::EFAULT))? as u64,
        };
        // SAFETY: the range is a mapping of `memory`, whose length it has.
        unsafe { vm.set_user_memory_region(slot)? };
    }
    Ok(())
}

/// Makes the page at guest-physical address `page` read-only in this mapping, or writable. None
/// of it is there: `None`.
pub(crate) fn protect(
    memory: &GuestMemoryMmap,
    page: u64,
    writable: bool,
) -> Option<io::Result<()>> {
    let start = GuestAddress(page);
    if !memory.check_range(start, PAGE_SIZE) {
        return None;
    }
    let host = memory.get_host_address(start).ok()?;
    let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
    // SAFETY: the whole page lies in a mapping of `memory`; nothing has a reference into it, and
    // this program writes through another mapping.
    match unsafe { libc::mprotect(host.cast(), PAGE_SIZE, protection) } {
        0 => Some(Ok(())),
        _ => Some(Err(io::Error::last_os_error())),
    }
}

/// The signal by which this VMM calls its vCPU's thread out of the guest; `kvm-pmu` uses the same.
fn signal() -> i32 {
    SIGRTMIN()
}

extern "C" fn kicked(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the handler is installed with SA_SIGINFO, so the kernel hands it a siginfo_t that is
    // valid until it returns.
    on_kick(unsafe { &*info });
}

/// Installs this VMM's own handler, also of SIGIO, which the kernel sends when the queue of the
/// other one is full.
pub(crate) fn handle_kicks() -> Result<(), errno::Error> {
    register_signal_handler(signal(), kicked)?;
    register_signal_handler(libc::SIGIO, kicked)?;
    Ok(own_kick_handler(signal())?)
}

/// Kicks a thread that nobody has joined.
pub(crate) fn kick<T>(thread: &JoinHandle<T>) -> io::Result<()> {
    // SAFETY: a thread that has a handle was not joined, so its number is still its own.
    match unsafe { libc::pthread_kill(thread.as_pthread_t(), signal()) } {
        // It has ended by itself.
        0 | libc::ESRCH => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Sets SSE, AVX and what else XSAVE keeps.
pub(crate) fn set_xsave(vcpu: &VcpuFd, xsave: &kvm_xsave) -> Result<(), errno::Error> {
    // SAFETY: no component was enabled for which KVM wants more than 4 KiB: that takes an
    // arch_prctl of the process, which this one does not make.
    unsafe { vcpu.set_xsave(xsave) }
}

/// What the vCPU's TSC is ahead of the host's, modulo 2^64.
pub(crate) fn tsc_offset(vcpu: &VcpuFd) -> Result<u64, errno::Error> {
    let mut offset = 0_u64;
    let attribute = kvm_device_attr {
        flags: 0,
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        addr: &raw mut offset as u64,
    };
    // SAFETY: KVM stores the 8 bytes of this attribute at `addr`, where `offset` is, which nothing
    // else uses meanwhile.
    match unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &attribute) } {
        0 => Ok(offset),
        _ => Err(errno::Error::last()),
    }
}

/// Structures of KVM's that are plain bytes.
///
/// # Safety
/// Any bytes are a value, and no byte of a value is padding.
pub(crate) unsafe trait Plain: Copy + Default {}

macro_rules! plain {
    ($($name:ty),*) => {
        $(
            // SAFETY: whole numbers and arrays of them; the kernel's headers name what fills
            // the gaps.
            unsafe impl Plain for $name {}
        )*
    };
}

plain!(
    kvm_regs,
    kvm_sregs,
    kvm_debugregs,
    kvm_lapic_state,
    kvm_mp_state,
    kvm_vcpu_events,
    kvm_xcrs,
    kvm_clock_data
);

/// A structure as bytes.
pub(crate) fn to_bytes<T: Plain>(value: &T) -> Vec<u8> {
    // SAFETY: `T` has no padding, so each byte is there to be read.
    unsafe { std::slice::from_raw_parts((&raw const *value).cast(), size_of::<T>()) }.to_vec()
}

/// A structure of these bytes, if there are as many as it has.
pub(crate) fn from_bytes<T: Plain>(bytes: &[u8]) -> Option<T> {
    let mut value = T::default();
    if bytes.len() != size_of::<T>() {
        return None;
    }
    // SAFETY: the lengths are equal, and any bytes are a `T`.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), (&raw mut value).cast(), bytes.len());
    }
    Some(value)
}
