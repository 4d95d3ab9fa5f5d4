//! Decoded operations.

use super::table::K;

/// In place of a scale: it is two instructions, without an index.
pub(crate) const PAIR: u8 = 4;

/// An instruction, decoded: what to do, with what.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Op {
    /// What to do.
    pub(crate) k: K,
    /// The number of its event vector.
    pub(crate) events: u16,
    /// Registers by number. What is done to a register without any memory is done to `base`, and
    /// `dst` gets it.
    pub(crate) dst: u8,
    pub(crate) src: u8,
    pub(crate) base: u8,
    pub(crate) index: u8,
    /// Base-2 logarithm of the index's scale, or [`PAIR`].
    pub(crate) scale: u8,
    /// The register that is added as the segment's base.
    pub(crate) seg: u8,
    /// Bytes of the instruction.
    pub(crate) len: u8,
    pub(crate) room: u8,
    pub(crate) disp: i32,
    /// An immediate, or the number of a kept instruction.
    pub(crate) imm: u64,
}

impl Op {
    /// Instructions that it is.
    pub(crate) fn instructions(&self) -> usize {
        1 + usize::from(self.scale & PAIR != 0)
    }
}
