//! Places in a chain of callers, and why it ends.

/// A place in a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// The instruction that was interrupted, or the one behind a call.
    pub address: u64,
    /// It was interrupted there.
    pub interrupted: bool,
    /// It, or one before it, was found by a frame pointer: a register that a function may
    /// also use for something else, so that this need not be a caller.
    pub guessed: bool,
}

impl Frame {
    /// An address in the instruction that this frame is about: a call's own, since behind
    /// one that does not return another function may begin.
    #[must_use]
    pub fn instruction(&self) -> u64 {
        let behind = u64::from(!self.interrupted);
        self.address.wrapping_sub(behind)
    }
}

/// Why a chain has no further frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// This is the first function of its thread. Kernels up to 6.3 say so also of the first
    /// and last instructions of an entry, and of thunks for indirect jumps. A program's last
    /// frame pointer is 0, or is not in use.
    Outermost,
    /// A program was here, and entered the kernel.
    Entry,
    /// There are more frames than were asked for.
    Depth,
    /// The kernel's tables say that they do not know; or a tracer of the kernel keeps the
    /// return address elsewhere (`return_to_handler`, kretprobes).
    NoTable,
    /// The tables ask for a register that nobody has saved.
    NoRegister,
    /// The stack is not mapped, or is no stack.
    Unreadable,
    /// The caller's frame would not be above this one.
    Direction,
    /// What should be a return address leads to no code.
    NotCode,
    /// The program's registers, or its memory, are not known.
    NoProgram,
}
