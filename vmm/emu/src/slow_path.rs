//! How often the processor left its fast path, and why: for who measures its speed.

/// Why an instruction took longer than its like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SlowPath {
    /// An integer instruction without a row of its own in the table: by the decoder's operands.
    Integer,
    /// A step of a string instruction.
    String,
    /// An instruction of the system, or about it.
    System,
    /// XMM registers in code of 16 or 32 bits, and MASKMOVDQU.
    Sse,
    /// MMX.
    Mmx,
    /// FXSAVE, FXRSTOR, LDMXCSR, STMXCSR.
    Image,
    /// x87.
    X87,
    /// An instruction that 64-bit code does not have.
    Legacy,
    /// An access that the TLB did not answer: a walk, a device, two pages, a page with code, or
    /// one that is watched.
    Memory,
    /// An instruction executed alone: it is stepped, has a breakpoint or a shadow, was half done,
    /// or writes to code.
    Alone,
    /// A walk of page tables.
    Walk,
    /// A block that no jump had found before.
    Lookup,
    /// A block that was decoded.
    Decode,
}

impl SlowPath {
    /// The families of instructions that are executed from their decoded form.
    pub const HANDLERS: [SlowPath; 8] = [
        SlowPath::Integer,
        SlowPath::String,
        SlowPath::System,
        SlowPath::Sse,
        SlowPath::Mmx,
        SlowPath::Image,
        SlowPath::X87,
        SlowPath::Legacy,
    ];

    /// Each of them, in the order of its number.
    pub const ALL: [SlowPath; 13] = [
        SlowPath::Integer,
        SlowPath::String,
        SlowPath::System,
        SlowPath::Sse,
        SlowPath::Mmx,
        SlowPath::Image,
        SlowPath::X87,
        SlowPath::Legacy,
        SlowPath::Memory,
        SlowPath::Alone,
        SlowPath::Walk,
        SlowPath::Lookup,
        SlowPath::Decode,
    ];
}

/// How often each was taken. They are no part of the guest's state: budgets change
/// [`SlowPath::Alone`], and what the TLB holds [`SlowPath::Memory`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlowPaths([u64; SlowPath::ALL.len()]);

impl SlowPaths {
    /// How often one was.
    #[must_use]
    pub fn of(&self, path: SlowPath) -> u64 {
        self.0[path as usize]
    }

    #[inline(always)]
    pub(crate) fn took(&mut self, path: SlowPath) {
        self.0[path as usize] += 1;
    }
}
