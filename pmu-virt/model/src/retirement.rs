//! What one instruction did.

/// What one retired instruction counts for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retirement {
    /// It is a branch, near or far.
    pub branch: bool,
    /// It is a branch that was taken.
    pub taken: bool,
    /// It is a conditional branch: Jcc, LOOP or JCXZ.
    pub conditional: bool,
    /// It is a far branch.
    pub far: bool,
    /// Memory operands it read.
    pub loads: u8,
    /// Memory operands it wrote.
    pub stores: u8,
    /// It is a near call.
    pub call: bool,
    /// It is a near return.
    pub near_return: bool,
    /// It is a string instruction.
    pub string: bool,
    /// The unit that it used, beyond the integer ones.
    pub unit: Option<MathUnit>,
}

/// What AMD's event 0CBh tells instructions apart by (Family 10h BKDG and
/// later, "Retired MMX/FP Instructions").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MathUnit {
    /// The x87 stack.
    X87,
    /// MMX and 3DNow!.
    Mmx,
    /// SSE and AVX, with what came after them for the same registers.
    Sse,
}
