//! Decoded operations.

use crate::insn::K;

/// An instruction, decoded: what to do, with what.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Op {
    /// What to do.
    pub(crate) k: K,
    /// The number of its event vector.
    pub(crate) events: u16,
    /// Registers by number.
    pub(crate) dst: u8,
    pub(crate) src: u8,
    pub(crate) base: u8,
    pub(crate) index: u8,
    /// Base-2 logarithm of the index's scale.
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
