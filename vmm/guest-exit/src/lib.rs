//! What leaves a guest, as an owned value that is decoded once and allocates nothing; a test
//! can make up any. It is the same whatever engine runs the guest. Variants that only one engine
//! has say so: KVM, or the emulator, which is a processor in software.
//!
//! Beside it, where the linear addresses of the guest's registers lead: [`Paging`].
#![forbid(unsafe_code)]

mod memory;
mod paging;

pub use memory::GuestMemory;
pub use paging::{Mapped, Paging};

/// One exit from the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmExit {
    /// OUT or OUTS of `len` bytes, which the engine keeps until the next entry.
    IoOut {
        port: u16,
        /// Bytes of one element: 1, 2 or 4.
        width: u8,
        /// All bytes, a multiple of `width`.
        len: usize,
    },
    /// IN or INS of `len` bytes, for which the engine has room until the next entry.
    IoIn {
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
    /// A store to memory that is not there, or that the engine cannot write to.
    MmioWrite {
        /// Guest-physical address.
        address: u64,
        /// What was written, in the first `len` bytes.
        data: [u8; 8],
        /// Bytes, 1 to 8.
        len: usize,
    },
    /// KVM: an access to memory that it cannot do; it takes place when the guest runs on.
    MemoryFault {
        /// Guest-physical address of the page, where KVM tells it.
        address: Option<u64>,
    },
    /// RDMSR of a register that is not the engine's own, to be answered.
    Rdmsr {
        /// ECX.
        index: u32,
    },
    /// WRMSR to a register that is not the engine's own, to be answered.
    Wrmsr {
        /// ECX.
        index: u32,
        /// EDX:EAX.
        value: u64,
    },
    /// KVM: #DB or a step, under `KVM_SET_GUEST_DEBUG`.
    Debug(DebugExit),
    /// Emulator: RDPMC that CR4.PCE or CPL 0 allows, to be answered.
    Rdpmc {
        /// ECX.
        index: u32,
    },
    /// Emulator: the ticks that it was to run for have passed.
    Budget,
    /// Emulator: an interrupt or NMI can be taken now, as was asked for, or CR8 or the TSC has
    /// another value.
    Window,
    /// Emulator: PAUSE, which has retired, where it is to give others their turn.
    Paused,
    /// Emulator: what CPUID announces, or every processor can do, and this one cannot: a bug.
    /// The instruction has changed nothing and counted for nothing.
    Unimplemented {
        /// RIP of the instruction.
        rip: u64,
    },
    /// Nothing of the guest's: it was called out.
    Interrupted,
    /// HLT, where the engine does not wait for the interrupt itself.
    Halted,
    /// Triple fault.
    Shutdown,
    /// KVM: it gave up on an instruction, which has not been executed, or worse.
    InternalError(InternalError),
    /// KVM: the guest's state was refused by the processor.
    FailEntry {
        /// Reason of the hardware.
        reason: u64,
    },
    /// KVM: the guest asked for a system event (KVM API, `KVM_EXIT_SYSTEM_EVENT`).
    SystemEvent {
        /// Event type.
        kind: u32,
    },
    /// KVM: an exit that nobody asked for.
    Unexpected {
        /// `kvm_run.exit_reason`.
        reason: u32,
    },
}

/// Where a guest stopped with a #DB or #BP that is not yet its own.
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

/// KVM's `KVM_EXIT_INTERNAL_ERROR`.
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

/// What the guest gets for an exit. The bytes of an IN go where the engine has room for
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// A WRMSR is done.
    Done,
    /// The bytes of a load.
    Mmio([u8; 8]),
    /// The value of an RDMSR or RDPMC.
    Msr(u64),
    /// #GP(0) for the RDMSR, WRMSR or RDPMC.
    MsrFault,
}
