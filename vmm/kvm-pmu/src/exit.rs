//! What left the guest, as an owned value that is decoded once; a test can make up any.

use kvm_bindings::kvm_debug_exit_arch;

/// One exit from the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmExit {
    /// OUT or OUTS of `len` bytes, which lie in the vCPU's mapping.
    IoOut {
        /// Port.
        port: u16,
        /// Bytes of one element: 1, 2 or 4.
        width: u8,
        /// All bytes, a multiple of `width`.
        len: usize,
    },
    /// IN or INS of `len` bytes, which are to be left in the vCPU's mapping.
    IoIn {
        /// Port.
        port: u16,
        /// Bytes of one element: 1, 2 or 4.
        width: u8,
        /// Bytes wanted, a multiple of `width`.
        len: usize,
    },
    /// A load from memory that is not there.
    MmioRead {
        /// Guest-physical address.
        address: u64,
        /// Bytes, 1 to 8.
        len: usize,
    },
    /// A store to memory that is not there, or that KVM cannot write to.
    MmioWrite {
        /// Guest-physical address.
        address: u64,
        /// What was written, in the first `len` bytes.
        data: [u8; 8],
        /// Bytes, 1 to 8.
        len: usize,
    },
    /// An access to memory that KVM cannot do; it takes place when the guest runs on.
    MemoryFault {
        /// Guest-physical address of the page, where KVM tells it.
        address: Option<u64>,
    },
    /// A filtered RDMSR, to be answered.
    Rdmsr {
        /// ECX.
        index: u32,
    },
    /// A filtered WRMSR, to be answered.
    Wrmsr {
        /// ECX.
        index: u32,
        /// EDX:EAX.
        value: u64,
    },
    /// #DB or a step, under `KVM_SET_GUEST_DEBUG`.
    Debug(DebugExit),
    /// A signal, or `immediate_exit`.
    Interrupted,
    /// HLT without an in-kernel irqchip.
    Halted,
    /// Triple fault.
    Shutdown,
    /// KVM gave up on an instruction, which has not been executed, or worse.
    InternalError(InternalError),
    /// The guest state was refused by the processor.
    FailEntry {
        /// Reason of the hardware.
        reason: u64,
    },
    /// The guest asked KVM for a system event (KVM API, `KVM_EXIT_SYSTEM_EVENT`).
    SystemEvent {
        /// Event type.
        kind: u32,
    },
    /// An exit that nobody asked for.
    Unexpected {
        /// `kvm_run.exit_reason`.
        reason: u32,
    },
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

/// `KVM_EXIT_INTERNAL_ERROR`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InternalError {
    /// 1: emulation failed, 2: simultaneous exceptions, 3: delivery failed,
    /// 4: unexpected exit reason.
    pub suberror: u32,
    /// The bytes at RIP, in the first `len` bytes.
    pub bytes: [u8; 15],
    /// How many KVM reports; none unless emulation failed.
    pub len: usize,
}

/// What the guest gets for an exit. The bytes of an IN go into
/// [`KvmVcpu::io_data`](crate::KvmVcpu::io_data).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// A WRMSR is done.
    Done,
    /// The bytes of a load.
    Mmio([u8; 8]),
    /// The value of an RDMSR.
    Msr(u64),
    /// #GP(0) for the RDMSR or WRMSR.
    MsrFault,
}
