//! Why a processor stopped, and what it is told then. Names are those of KVM's exits.

/// Why [`Cpu::run`](crate::Cpu::run) returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The budget is used up.
    Budget,
    /// Interrupts can be taken now ([`Cpu::want_window`](crate::Cpu::want_window)).
    Window,
    /// HLT, which has retired.
    Halted,
    /// Triple fault.
    Shutdown,
    /// IN or an element of INS, to be answered.
    IoIn {
        /// Port.
        port: u16,
        /// Bytes: 1, 2 or 4.
        width: u8,
    },
    /// OUT or an element of OUTS, to be answered by [`Answer::Done`].
    IoOut {
        /// Port.
        port: u16,
        /// Bytes: 1, 2 or 4.
        width: u8,
        /// What is written.
        value: u32,
    },
    /// A load from where no RAM is, to be answered.
    MmioRead {
        /// Guest-physical address.
        address: u64,
        /// Bytes, 1 to 8.
        len: u8,
    },
    /// A store to where no RAM is, to be answered by [`Answer::Done`].
    MmioWrite {
        /// Guest-physical address.
        address: u64,
        /// What is stored, in the first `len` bytes.
        data: [u8; 8],
        /// Bytes, 1 to 8.
        len: u8,
    },
    /// RDMSR of an MSR that is not the processor's own, to be answered.
    Rdmsr {
        /// ECX.
        index: u32,
    },
    /// WRMSR likewise.
    Wrmsr {
        /// ECX.
        index: u32,
        /// EDX:EAX.
        value: u64,
    },
    /// RDPMC that CR4.PCE or CPL 0 allows, to be answered.
    Rdpmc {
        /// ECX.
        index: u32,
    },
    /// What CPUID announces, or every processor can do, and this one cannot: a bug. The
    /// instruction has changed nothing.
    Unimplemented {
        /// Linear address of the instruction.
        rip: u64,
        /// What it is.
        what: Missing,
    },
}

/// What [`Stop::Unimplemented`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// An instruction, by the decoder's name.
    Instruction(iced_x86::Code),
    /// Paging other than long mode's.
    LegacyPaging,
    /// An interrupt or a far transfer through a gate outside of long mode.
    LegacyGate,
    /// A call gate, a task gate or a task switch.
    CallGate,
    /// Virtual 8086 mode.
    Virtual8086,
}

/// The answer to a stop that waits for one; the instruction goes on when the processor runs
/// again, and retires then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// What is read.
    Value(u64),
    /// What was to be written is.
    Done,
    /// There is no such register: #GP(0).
    Gp,
}
