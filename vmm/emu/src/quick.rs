//! What a block does when it runs as a whole: flags that nobody sees are not worked out, and some
//! pairs of instructions are one operation. Whoever runs a part of a block, or only one
//! instruction, runs it as it was decoded.

use crate::insn::form::{RI, RR};
use crate::insn::kinds::{CMP, TEST};
use crate::insn::{K, Pick, Sets};
use crate::insn::{Op, PAIR};

/// The operations for a block of these, if they differ.
pub(crate) fn quick(ops: &[Op]) -> Option<Vec<Op>> {
    let mut quick = ops.to_vec();
    let silenced = silence(&mut quick);
    let quick = paired(&quick);
    (silenced || quick.len() < ops.len()).then_some(quick)
}

/// Leaves out what sets flags that are set again before anybody can see them: before one reads
/// them, or may fault, which lays them on the stack. Whether there are any.
fn silence(ops: &mut [Op]) -> bool {
    let mut found = false;
    let mut seen = true;
    for op in ops.iter_mut().rev() {
        if let Some((quiet, sets)) = op.k.quiet() {
            if !seen {
                op.k = quiet;
                found = true;
            }
            // One that sets some of them is a reader of the others if it is seen itself.
            seen &= sets == Sets::Some;
        } else if overwrites(op.k) {
            seen = false;
        } else if !moves(op.k) {
            seen = true;
        }
    }
    found
}

/// A MOV and what changes its destination, a comparison and its branch, each as one.
fn paired(ops: &[Op]) -> Vec<Op> {
    let mut pairs: Vec<Op> = Vec::with_capacity(ops.len());
    for op in ops {
        match pairs.last_mut() {
            Some(last) => match moved(last, op).or_else(|| branched(last, op)) {
                Some(pair) => *last = pair,
                None => pairs.push(*op),
            },
            None => pairs.push(*op),
        }
    }
    pairs
}

/// The change is made to what was moved.
fn moved(mov: &Op, op: &Op) -> Option<Op> {
    let bits = op.k.bits_from_base()?;
    let fits = match mov.k {
        K::MovRr64 => true,
        // Above, it has cleared the destination.
        K::MovRr32 => bits == 32,
        _ => false,
    };
    if !fits || op.base != mov.dst {
        return None;
    }
    let mut pair = *op;
    pair.base = mov.src;
    if op.src == mov.dst {
        pair.src = mov.src;
    }
    pair.scale = PAIR;
    Some(pair)
}

fn branched(compare: &Op, branch: &Op) -> Option<Op> {
    let both = compares(compare.k)?;
    let branches = Pick::Jcc().conditions()?;
    let condition = branches.iter().position(|k| *k == branch.k)?;
    let mut pair = *compare;
    pair.k = both.conditions()?[condition];
    pair.disp = i32::try_from(branch.imm.cast_signed()).ok()?;
    pair.scale = PAIR;
    Some(pair)
}

/// A comparison of registers, or of one and an immediate: what it is with a branch behind it.
fn compares(k: K) -> Option<Pick> {
    Some(match k {
        K::CmpRi8 => Pick::Compare8(CMP, RI),
        K::TestRr8 => Pick::Compare8(TEST, RR),
        K::TestRi8 => Pick::Compare8(TEST, RI),
        K::CmpRr32 => Pick::Compare32(CMP, RR),
        K::CmpRi32 => Pick::Compare32(CMP, RI),
        K::TestRr32 => Pick::Compare32(TEST, RR),
        K::TestRi32 => Pick::Compare32(TEST, RI),
        K::CmpRr64 => Pick::Compare64(CMP, RR),
        K::CmpRi64 => Pick::Compare64(CMP, RI),
        K::TestRr64 => Pick::Compare64(TEST, RR),
        _ => return None,
    })
}

/// It sets all flags, knows of none, and cannot fault.
fn overwrites(k: K) -> bool {
    compares(k).is_some()
        || matches!(
            k,
            K::CmpRr8
                | K::CmpRr16
                | K::CmpRi16
                | K::TestRr16
                | K::TestRi16
                | K::TestRi64
                | K::Imul2Rr16
                | K::Imul2Rr32
                | K::Imul2Rr64
                | K::Imul3Rr16
                | K::Imul3Rr32
                | K::Imul3Rr64
        )
}

/// It knows of no flags, and cannot fault.
fn moves(k: K) -> bool {
    matches!(
        k,
        K::MovRr8
            | K::MovRr16
            | K::MovRr32
            | K::MovRr64
            | K::MovRi8
            | K::MovRi16
            | K::MovRi32
            | K::MovRi64
            | K::Movzx8To16Rr
            | K::Movsx8To16Rr
            | K::Movzx8To32Rr
            | K::Movsx8To32Rr
            | K::Movzx8To64Rr
            | K::Movsx8To64Rr
            | K::Movzx16To32Rr
            | K::Movsx16To32Rr
            | K::Movzx16To64Rr
            | K::Movsx16To64Rr
            | K::Movsx32To64Rr
            | K::NotR8
            | K::NotR16
            | K::NotR32
            | K::NotR64
            | K::Lea32
            | K::Lea64
            | K::Bswap32
            | K::Bswap64
            | K::Cwde
            | K::Cdqe
            | K::Cdq
            | K::Cqo
            | K::Nop
    )
}
