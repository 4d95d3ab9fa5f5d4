//! The unions of `kvm_run`.

use kvm_bindings::{
    KVM_EXIT_DEBUG, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_INTR, KVM_EXIT_IO, KVM_EXIT_IO_OUT,
    KVM_EXIT_MEMORY_FAULT, KVM_EXIT_MMIO, KVM_EXIT_X86_RDMSR, KVM_EXIT_X86_WRMSR,
    kvm_debug_exit_arch, kvm_run,
};
use vmm_sys_util::errno;

/// What a `KVM_RUN` ended with, as far as it can concern a PMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PmuExit {
    /// A filtered RDMSR.
    Rdmsr {
        /// ECX.
        index: u32,
    },
    /// A filtered WRMSR.
    Wrmsr {
        /// ECX.
        index: u32,
        /// EDX:EAX.
        value: u64,
    },
    /// #DB or a step, under `KVM_SET_GUEST_DEBUG`.
    Debug(DebugExit),
    /// OUT of one byte.
    Out {
        /// The port.
        port: u16,
    },
    /// A store to memory that KVM cannot write to.
    Store {
        /// Guest-physical address.
        address: u64,
        /// What is stored, in the first `len` bytes.
        data: [u8; 8],
        /// Bytes, 1 to 8.
        len: usize,
    },
    /// An access to memory that KVM cannot do; it takes place when the guest runs on.
    MemoryFault {
        /// Guest-physical address of its page, where KVM tells it.
        address: Option<u64>,
    },
    /// KVM gave up on an instruction, which has not been executed.
    InternalError,
    /// A signal, or `immediate_exit`.
    Interrupted,
    /// Anything else.
    Other,
}

/// The parts of `kvm_debug_exit_arch` that are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DebugExit {
    /// Exception vector: 1 (#DB) or 3 (#BP).
    pub vector: u32,
    /// Linear address of the instruction that comes next.
    pub pc: u64,
    /// DR6 as the hardware set it.
    pub dr6: u64,
    /// DR7 in force.
    pub dr7: u64,
}

impl From<kvm_debug_exit_arch> for DebugExit {
    fn from(arch: kvm_debug_exit_arch) -> Self {
        Self {
            vector: arch.exception,
            pc: arch.pc,
            dr6: arch.dr6,
            dr7: arch.dr7,
        }
    }
}

impl PmuExit {
    /// What the last `KVM_RUN` ended with, `failed` included: EINTR and EAGAIN are an
    /// interruption, EFAULT is an access that KVM could not do and may have said no
    /// more about.
    ///
    /// # Errors
    /// Any other one, after which KVM will not run the guest on.
    pub(crate) fn after(
        run: &mut kvm_run,
        failed: Option<errno::Error>,
    ) -> Result<Self, errno::Error> {
        match failed.map(|error| (error.errno(), error)) {
            None => Ok(Self::of(run)),
            Some((libc::EINTR | libc::EAGAIN, _)) => Ok(Self::Interrupted),
            Some((libc::EFAULT, _)) => {
                if run.exit_reason != KVM_EXIT_MEMORY_FAULT {
                    run.exit_reason = KVM_EXIT_MEMORY_FAULT;
                    run.__bindgen_anon_1.memory_fault = Default::default();
                }
                Ok(Self::of(run))
            }
            Some((_, error)) => Err(error),
        }
    }

    /// Reads what the last `KVM_RUN` left.
    #[must_use]
    fn of(run: &kvm_run) -> Self {
        match run.exit_reason {
            KVM_EXIT_X86_RDMSR => {
                // SAFETY: the exit reason, which the kernel wrote with the union,
                // selects `msr`.
                let msr = unsafe { run.__bindgen_anon_1.msr };
                Self::Rdmsr { index: msr.index }
            }
            KVM_EXIT_X86_WRMSR => {
                // SAFETY: the exit reason selects `msr`.
                let msr = unsafe { run.__bindgen_anon_1.msr };
                Self::Wrmsr {
                    index: msr.index,
                    value: msr.data,
                }
            }
            KVM_EXIT_DEBUG => {
                // SAFETY: the exit reason selects `debug`.
                let debug = unsafe { run.__bindgen_anon_1.debug };
                Self::Debug(debug.arch.into())
            }
            KVM_EXIT_IO => {
                // SAFETY: the exit reason selects `io`.
                let io = unsafe { run.__bindgen_anon_1.io };
                let out = u32::from(io.direction) == KVM_EXIT_IO_OUT;
                match (out, io.size, io.count) {
                    (true, 1, 1) => Self::Out { port: io.port },
                    _ => Self::Other,
                }
            }
            KVM_EXIT_MMIO => {
                // SAFETY: the exit reason selects `mmio`.
                let mmio = unsafe { run.__bindgen_anon_1.mmio };
                let len = usize::try_from(mmio.len).unwrap_or(0).min(mmio.data.len());
                match mmio.is_write {
                    0 => Self::Other,
                    _ => Self::Store {
                        address: mmio.phys_addr,
                        data: mmio.data,
                        len,
                    },
                }
            }
            KVM_EXIT_MEMORY_FAULT => {
                // SAFETY: the exit reason selects `memory_fault`.
                let fault = unsafe { run.__bindgen_anon_1.memory_fault };
                Self::MemoryFault {
                    address: (fault.size != 0).then_some(fault.gpa),
                }
            }
            KVM_EXIT_INTERNAL_ERROR => Self::InternalError,
            KVM_EXIT_INTR => Self::Interrupted,
            _ => Self::Other,
        }
    }

    /// Prepares for a `KVM_RUN` that may fail: KVM then mostly leaves the exit reason as it
    /// is, and it must not be that of the exit before.
    pub(crate) fn expect_interruption(run: &mut kvm_run) {
        run.exit_reason = KVM_EXIT_INTR;
    }
}

/// Answers a pending RDMSR or WRMSR: `Some` is its value (unused by a WRMSR),
/// `None` is #GP(0). Another exit is left alone.
pub fn answer_msr(run: &mut kvm_run, value: Option<u64>) {
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
        assert_eq!(PmuExit::of(&run), PmuExit::Wrmsr { index, value });
        PmuExit::expect_interruption(&mut run);
        assert_eq!(PmuExit::of(&run), PmuExit::Interrupted);
    }

    /// Each errno, with a fault's address left by KVM or by nobody.
    #[test]
    fn only_a_signal_is_an_interruption() {
        let check = |reason: u32, errno: i32, expected: Result<PmuExit, i32>| {
            let mut run = kvm_run {
                exit_reason: reason,
                ..Default::default()
            };
            run.__bindgen_anon_1.memory_fault.gpa = 0x5000;
            run.__bindgen_anon_1.memory_fault.size = 0x1000;
            let failed = Some(errno::Error::new(errno));
            let exit = PmuExit::after(&mut run, failed).map_err(|error| error.errno());
            assert_eq!(exit, expected, "exit {reason}, errno {errno}");
        };
        let fault = |address| Ok(PmuExit::MemoryFault { address });
        for reason in [KVM_EXIT_INTR, KVM_EXIT_X86_WRMSR, KVM_EXIT_IO] {
            check(reason, libc::EINTR, Ok(PmuExit::Interrupted));
            check(reason, libc::EAGAIN, Ok(PmuExit::Interrupted));
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
