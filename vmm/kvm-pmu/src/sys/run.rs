//! The unions of `kvm_run`, and what lies behind it in a vCPU's mapping.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

use guest_exit::{DebugExit, InternalError, VmExit};
use kvm_bindings::{
    KVM_EXIT_DEBUG, KVM_EXIT_FAIL_ENTRY, KVM_EXIT_HLT, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_INTR,
    KVM_EXIT_IO, KVM_EXIT_IO_OUT, KVM_EXIT_MEMORY_FAULT, KVM_EXIT_MMIO, KVM_EXIT_SHUTDOWN,
    KVM_EXIT_SYSTEM_EVENT, KVM_EXIT_X86_RDMSR, KVM_EXIT_X86_WRMSR, KVM_INTERNAL_ERROR_EMULATION,
    KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES, kvm_run, kvm_sync_regs,
};

use crate::error::Errno;

/// A vCPU's mapping, beside whatever mapping the VMM has: `kvm_run`, the page with the bytes of
/// port accesses (`KVM_PIO_PAGE_OFFSET`), and the ring of coalesced stores. On x86 KVM has these
/// three pages (`kvm_vcpu_mmap`), whatever else `KVM_GET_VCPU_MMAP_SIZE` comes to.
#[derive(Debug)]
pub(crate) struct RunPages {
    at: NonNull<kvm_run>,
}

// SAFETY: the pages are this value's own mapping, which no thread has but by this value.
unsafe impl Send for RunPages {}

const MAPPING: usize = 3 * 0x1000;

impl RunPages {
    /// Maps those of `vcpu`.
    ///
    /// # Errors
    /// The error of `mmap`.
    pub(crate) fn of(vcpu: BorrowedFd<'_>) -> Result<Self, Errno> {
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces nothing.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                MAPPING,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(at.cast()) {
            Some(run) if at != libc::MAP_FAILED => Ok(Self { at: run }),
            _ => Err(Errno::last()),
        }
    }

    /// `kvm_run`, as KVM left it.
    #[inline]
    pub(crate) fn run(&self) -> &kvm_run {
        // SAFETY: the mapping begins with a `kvm_run`, of integers alone, and lives as long as
        // this value. KVM writes to it during `KVM_RUN` alone. That of this crate wants the `&mut`
        // of the vCPU that has this value; that by a descriptor of the VMM's own does not, and
        // that there is none meanwhile is what `KvmVcpu::new` asks of who has one. Whatever is
        // found here, no access that depends on it leaves the mapping.
        unsafe { self.at.as_ref() }
    }

    /// The same, to be changed.
    #[inline]
    pub(crate) fn run_mut(&mut self) -> &mut kvm_run {
        // SAFETY: as above, and nobody else has this value; nor has this crate another mapping
        // that it reads or writes so, as a vCPU has one `KvmVcpu` (`KvmVcpu::new`). That of
        // `KickFlag` is for `immediate_exit` alone, which the crate leaves alone through this one.
        unsafe { self.at.as_mut() }
    }

    /// The registers that KVM leaves and takes there.
    #[inline]
    pub(crate) fn synced(&self) -> &kvm_sync_regs {
        // SAFETY: both views of the union are bytes of the mapping, of which any are valid.
        unsafe { &self.run().s.regs }
    }

    /// The same, to be changed.
    #[inline]
    pub(crate) fn synced_mut(&mut self) -> &mut kvm_sync_regs {
        // SAFETY: as above.
        unsafe { &mut self.run_mut().s.regs }
    }

    /// The bytes of a pending port access; none of another exit.
    pub(crate) fn io_data(&mut self) -> &mut [u8] {
        let run = self.run();
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
        if !behind || offset.checked_add(len).is_none_or(|end| end > MAPPING) {
            return &mut [];
        }
        // SAFETY: offset + len was just found to end in the mapping, and to lie behind the
        // structure itself; the kernel touches it in `KVM_RUN` alone, of which there is none
        // meanwhile, as above.
        unsafe {
            let data = self.at.as_ptr().cast::<u8>().add(offset);
            std::slice::from_raw_parts_mut(data, len)
        }
    }
}

impl Drop for RunPages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's alone.
        unsafe { libc::munmap(self.at.as_ptr().cast(), MAPPING) };
    }
}

/// What the last `KVM_RUN` ended with, `failed` included: EINTR and EAGAIN are an
/// interruption, EFAULT is an access that KVM could not do and may have said no
/// more about.
///
/// # Errors
/// Any other one, after which KVM will not run the guest on.
pub(crate) fn exit_after(run: &mut kvm_run, failed: Option<Errno>) -> Result<VmExit, Errno> {
    match failed {
        None => Ok(exit_of(run)),
        Some(Errno(libc::EINTR | libc::EAGAIN)) => Ok(VmExit::Interrupted),
        Some(Errno(libc::EFAULT)) => {
            if run.exit_reason != KVM_EXIT_MEMORY_FAULT {
                run.exit_reason = KVM_EXIT_MEMORY_FAULT;
                run.__bindgen_anon_1.memory_fault = Default::default();
            }
            Ok(exit_of(run))
        }
        Some(error) => Err(error),
    }
}

/// Reads what the last `KVM_RUN` left. The reason, which the kernel wrote with it, says
/// which member of the union is meant.
fn exit_of(run: &kvm_run) -> VmExit {
    match run.exit_reason {
        KVM_EXIT_X86_RDMSR => {
            // SAFETY: the exit reason, which the kernel wrote with the union,
            // selects `msr`.
            let msr = unsafe { run.__bindgen_anon_1.msr };
            VmExit::Rdmsr { index: msr.index }
        }
        KVM_EXIT_X86_WRMSR => {
            // SAFETY: the exit reason selects `msr`.
            let msr = unsafe { run.__bindgen_anon_1.msr };
            VmExit::Wrmsr {
                index: msr.index,
                value: msr.data,
            }
        }
        KVM_EXIT_DEBUG => {
            // SAFETY: the exit reason selects `debug`.
            let debug = unsafe { run.__bindgen_anon_1.debug };
            VmExit::Debug(DebugExit {
                vector: debug.arch.exception,
                pc: debug.arch.pc,
                dr6: debug.arch.dr6,
                dr7: debug.arch.dr7,
            })
        }
        KVM_EXIT_IO => port_exit(run),
        KVM_EXIT_MMIO => mmio_exit(run),
        KVM_EXIT_MEMORY_FAULT => {
            // SAFETY: the exit reason selects `memory_fault`.
            let fault = unsafe { run.__bindgen_anon_1.memory_fault };
            VmExit::MemoryFault {
                address: (fault.size != 0).then_some(fault.gpa),
            }
        }
        KVM_EXIT_INTERNAL_ERROR => VmExit::InternalError(internal_error(run)),
        KVM_EXIT_INTR => VmExit::Interrupted,
        KVM_EXIT_HLT => VmExit::Halted,
        KVM_EXIT_SHUTDOWN => VmExit::Shutdown,
        KVM_EXIT_FAIL_ENTRY => {
            // SAFETY: the exit reason selects `fail_entry`.
            let fail_entry = unsafe { run.__bindgen_anon_1.fail_entry };
            VmExit::FailEntry {
                reason: fail_entry.hardware_entry_failure_reason,
            }
        }
        KVM_EXIT_SYSTEM_EVENT => {
            // SAFETY: the exit reason selects `system_event`.
            let event = unsafe { run.__bindgen_anon_1.system_event };
            VmExit::SystemEvent { kind: event.type_ }
        }
        reason => VmExit::Unexpected { reason },
    }
}

/// Prepares for a `KVM_RUN` that may fail: KVM then mostly leaves the exit reason as it
/// is, and it must not be that of the exit before.
pub(crate) fn expect_interruption(run: &mut kvm_run) {
    run.exit_reason = KVM_EXIT_INTR;
}

/// The port access that `run` ended with.
fn port_exit(run: &kvm_run) -> VmExit {
    // SAFETY: the exit reason selects `io`.
    let io = unsafe { run.__bindgen_anon_1.io };
    let (port, width) = (io.port, io.size);
    let len = usize::from(width) * usize::try_from(io.count).unwrap_or(0);
    if u32::from(io.direction) == KVM_EXIT_IO_OUT {
        VmExit::IoOut { port, width, len }
    } else {
        VmExit::IoIn { port, width, len }
    }
}

/// The access to memory that is not there, with which `run` ended.
fn mmio_exit(run: &kvm_run) -> VmExit {
    // SAFETY: the exit reason selects `mmio`.
    let mmio = unsafe { run.__bindgen_anon_1.mmio };
    let (address, data) = (mmio.phys_addr, mmio.data);
    let len = usize::try_from(mmio.len).unwrap_or(0).min(data.len());
    match mmio.is_write {
        0 => VmExit::MmioRead { address, len },
        _ => VmExit::MmioWrite { address, data, len },
    }
}

/// What KVM reports of an internal error, which is what `run` ended with.
fn internal_error(run: &kvm_run) -> InternalError {
    // SAFETY: the exit reason selects `internal`, of which `emulation_failure` is the view
    // for one suberror; both begin with suberror and ndata.
    let (internal, failure) = unsafe {
        (
            run.__bindgen_anon_1.internal,
            run.__bindgen_anon_1.emulation_failure,
        )
    };
    let mut error = InternalError {
        suberror: internal.suberror,
        bytes: [0; 15],
        len: 0,
    };
    if internal.suberror == KVM_INTERNAL_ERROR_EMULATION && internal.ndata >= 3 {
        // SAFETY: the union inside has one member, plain integers.
        let insn = unsafe { failure.__bindgen_anon_1.__bindgen_anon_1 };
        let valid = failure.flags & u64::from(KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES);
        if valid != 0 {
            error.bytes = insn.insn_bytes;
            error.len = usize::from(insn.insn_size).min(error.bytes.len());
        }
    }
    error
}

/// Answers a pending RDMSR or WRMSR: `Some` is its value (unused by a WRMSR),
/// `None` is #GP(0). Another exit is left alone.
pub(crate) fn answer_msr(run: &mut kvm_run, value: Option<u64>) {
    if !matches!(run.exit_reason, KVM_EXIT_X86_RDMSR | KVM_EXIT_X86_WRMSR) {
        return;
    }
    // SAFETY: the exit reason selects `msr`.
    let msr = unsafe { &mut run.__bindgen_anon_1.msr };
    msr.error = u8::from(value.is_none());
    if run.exit_reason == KVM_EXIT_X86_RDMSR {
        msr.data = value.unwrap_or(0);
    }
}

/// Hands the bytes of a load over. Another exit is left alone.
pub(crate) fn answer_mmio(run: &mut kvm_run, bytes: [u8; 8]) {
    if run.exit_reason == KVM_EXIT_MMIO {
        run.__bindgen_anon_1.mmio.data = bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(reason: u32) -> kvm_run {
        let mut run = kvm_run {
            exit_reason: reason,
            ..Default::default()
        };
        // SAFETY: the union was zeroed, and any bytes are valid for `msr`.
        let msr = unsafe { &mut run.__bindgen_anon_1.msr };
        (msr.index, msr.data, msr.error) = (0x186, 0x53_003c, 7);
        run
    }

    #[test]
    fn an_interruption_is_not_the_exit_before() {
        let (index, value) = (0x186, 0x53_003c);
        let mut run = run(KVM_EXIT_X86_WRMSR);
        assert_eq!(exit_of(&run), VmExit::Wrmsr { index, value });
        expect_interruption(&mut run);
        assert_eq!(exit_of(&run), VmExit::Interrupted);
    }

    /// Each errno, with a fault's address left by KVM or by nobody.
    #[test]
    fn only_a_signal_is_an_interruption() {
        let check = |reason: u32, errno: i32, expected: Result<VmExit, i32>| {
            let mut run = kvm_run {
                exit_reason: reason,
                ..Default::default()
            };
            run.__bindgen_anon_1.memory_fault.gpa = 0x5000;
            run.__bindgen_anon_1.memory_fault.size = 0x1000;
            let exit = exit_after(&mut run, Some(Errno(errno))).map_err(|Errno(number)| number);
            assert_eq!(exit, expected, "exit {reason}, errno {errno}");
        };
        let fault = |address| Ok(VmExit::MemoryFault { address });
        for reason in [KVM_EXIT_INTR, KVM_EXIT_X86_WRMSR, KVM_EXIT_IO] {
            check(reason, libc::EINTR, Ok(VmExit::Interrupted));
            check(reason, libc::EAGAIN, Ok(VmExit::Interrupted));
            check(reason, libc::EFAULT, fault(None));
            for errno in [
                libc::EIO,
                libc::EINVAL,
                libc::ENOMEM,
                libc::EBADF,
                libc::EHWPOISON,
                libc::ENOEXEC,
            ] {
                check(reason, errno, Err(errno));
            }
        }
        check(KVM_EXIT_MEMORY_FAULT, libc::EFAULT, fault(Some(0x5000)));
        check(KVM_EXIT_MEMORY_FAULT, libc::EIO, Err(libc::EIO));
    }

    #[test]
    fn answers_are_for_accesses_of_msrs() {
        let check = |reason: u32, answer: Option<u64>, expected: (u8, u64)| {
            let mut run = run(reason);
            answer_msr(&mut run, answer);
            // SAFETY: `msr` was written above, and any bytes are valid for it.
            let msr = unsafe { run.__bindgen_anon_1.msr };
            assert_eq!((msr.error, msr.data), expected, "exit {reason}");
        };
        check(KVM_EXIT_X86_RDMSR, Some(5), (0, 5));
        check(KVM_EXIT_X86_RDMSR, None, (1, 0));
        check(KVM_EXIT_X86_WRMSR, Some(0), (0, 0x53_003c));
        check(KVM_EXIT_X86_WRMSR, None, (1, 0x53_003c));
        check(KVM_EXIT_INTR, Some(5), (7, 0x53_003c));
    }
}
