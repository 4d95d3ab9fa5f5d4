//! What a processor lacks, and which answers fit which stop.

use guest_exit::{Answer, VmExit};

/// What [`VmExit::Unimplemented`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// An instruction, by the decoder's name.
    Instruction(iced_x86::Code),
    /// A task gate or a task switch.
    TaskGate,
    /// SYSCALL outside of long mode, as AMD's processors have it.
    LegacySyscall,
    /// Virtual 8086 mode.
    Virtual8086,
}

/// Whether `exit` waits for such an answer.
pub(crate) fn fits(exit: VmExit, answer: Answer) -> bool {
    matches!(
        (exit, answer),
        (VmExit::MmioRead { .. }, Answer::Mmio(_))
            | (
                VmExit::Rdmsr { .. } | VmExit::Rdpmc { .. },
                Answer::Msr(_) | Answer::MsrFault
            )
            | (VmExit::Wrmsr { .. }, Answer::Done | Answer::MsrFault)
    )
}
