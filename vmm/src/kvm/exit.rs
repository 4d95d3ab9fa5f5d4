//! What left the guest, as an owned value.
//!
//! Nothing outside this crate's `kvm` module sees `kvm_run`; a test can make
//! up any exit.

use kvm_pmu::DebugExit;

/// One exit from the guest.
#[derive(Debug, Clone, PartialEq)]
pub enum VmExit {
    /// OUT or OUTS: `data` holds `data.len() / width` elements.
    IoOut {
        /// Port.
        port: u16,
        /// Bytes of one element: 1, 2 or 4.
        width: u8,
        /// What was written.
        data: Vec<u8>,
    },
    /// IN or INS of `len` bytes; wants [`Answer::Io`].
    IoIn {
        /// Port.
        port: u16,
        /// Bytes of one element: 1, 2 or 4.
        width: u8,
        /// Bytes wanted, a multiple of `width`.
        len: usize,
    },
    /// A load from memory that is not there; wants [`Answer::Mmio`].
    MmioRead {
        /// Guest-physical address.
        address: u64,
        /// Bytes, 1 to 8.
        len: usize,
    },
    /// A store to memory that is not there.
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
    /// A filtered RDMSR; wants [`Answer::Msr`] or [`Answer::MsrFault`].
    Rdmsr {
        /// ECX.
        index: u32,
    },
    /// A filtered WRMSR; wants [`Answer::Done`] or [`Answer::MsrFault`].
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
    /// KVM gave up: an instruction that its emulator lacks, or worse.
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
    /// An exit that this VMM did not ask for.
    Unexpected {
        /// `kvm_run.exit_reason`, or its name.
        what: String,
    },
}

/// `KVM_EXIT_INTERNAL_ERROR`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InternalError {
    /// 1: emulation failed, 2: simultaneous exceptions, 3: delivery failed,
    /// 4: unexpected exit reason.
    pub suberror: u32,
    /// The bytes at RIP where KVM reports them, else empty.
    pub bytes: Vec<u8>,
}

/// What the guest gets for an exit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Nothing to hand over.
    Done,
    /// The bytes of an IN.
    Io(Vec<u8>),
    /// The bytes of a load.
    Mmio([u8; 8]),
    /// The value of an RDMSR.
    Msr(u64),
    /// #GP(0) for the RDMSR or WRMSR.
    MsrFault,
}
