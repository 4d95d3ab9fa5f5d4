//! Which row of the table an instruction is that has none of its own by width or condition.

use iced_x86::Instruction;

use super::vector::V;
use super::{K, image, legacy, slow, system, vector, x87};

/// Whether an instruction is there.
#[must_use]
pub fn is_known(insn: &Instruction) -> bool {
    row(insn).is_some()
}

/// The operation of an instruction that has to be kept, by its family; `None` if it is not there.
pub(crate) fn row(insn: &Instruction) -> Option<K> {
    let mnemonic = insn.mnemonic();
    Some(if insn.is_string_instruction() {
        K::String
    } else if system::KNOWN.contains(&mnemonic) {
        K::System
    } else if vector::of(insn).is_some() {
        K::VectorSlow
    } else if vector::mmx::is_known(insn) {
        K::Mmx
    } else if image::is_known(mnemonic) {
        K::Image
    } else if x87::is_known(insn) {
        K::X87
    } else if legacy::is_known(mnemonic) {
        K::Legacy
    } else if slow::is_integer(insn) {
        K::Slow
    } else {
        return None;
    })
}

/// The operation that a plain move is, by which operand is in memory.
pub(crate) fn moved(insn: &Instruction, what: V, memory: Option<u32>) -> Option<K> {
    let narrow = what == V::Movd || what == V::Movss;
    Some(match (what, memory) {
        (V::Movaps | V::Movapd | V::Movdqa, None) => K::XmmCopy,
        (V::Movups | V::Movupd | V::Movdqu, None) => K::XmmCopy,
        (V::Movaps | V::Movapd | V::Movdqa | V::Movntdqa, Some(1)) => K::XmmLoadAligned,
        (V::Movups | V::Movupd | V::Movdqu | V::Lddqu, Some(1)) => K::XmmLoad,
        (V::Movaps | V::Movapd | V::Movdqa, Some(0)) => K::XmmStoreAligned,
        (V::Movntps | V::Movntpd | V::Movntdq, Some(0)) => K::XmmStoreAligned,
        (V::Movups | V::Movupd | V::Movdqu, Some(0)) => K::XmmStore,
        (V::Movss | V::Movsd | V::Movd | V::Movq, Some(at)) => {
            debug_assert!(insn.op_register(1 - at).is_xmm());
            match (at, narrow) {
                (1, true) => K::XmmLoad32,
                (1, false) => K::XmmLoad64,
                (_, true) => K::XmmStore32,
                (_, false) => K::XmmStore64,
            }
        }
        _ => return None,
    })
}
