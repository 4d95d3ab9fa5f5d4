//! MMX: what instructions of XMM registers make of 64 bits, in x87's registers (SDM vol. 1, 9).

use emu_fpu::sse::Op;
use iced_x86::{CpuidFeature, Instruction, Mnemonic, OpKind, Register};

use super::lanes::{shuffle_words, signs};
use super::{V, X, float, immediate, set_xmm, table, xmm};
use crate::insn::core::{Core, Exec};
use crate::insn::operand::{self, bits, read, set};
use crate::state::{CR0_EM, CR0_TS};

/// x87's status word in its image: an exception waits, and which register is the top.
const PENDING: u64 = 1 << 7 << 16;
const TOP: u32 = 16 + 11;
/// The tags in short: which registers are in use.
const TAGS: u64 = 0xff << 32;

/// Whether an instruction has to do with registers of MMX.
pub(in crate::insn) fn is_known(insn: &Instruction) -> bool {
    use Mnemonic as M;
    let names = (0..insn.op_count()).any(|operand| insn.op_register(operand).is_mm());
    names
        || matches!(
            insn.mnemonic(),
            M::Emms
                | M::Movq2dq
                | M::Movdq2q
                | M::Movntq
                | M::Maskmovq
                | M::Pshufw
                | M::Cvtpi2ps
                | M::Cvtpi2pd
                | M::Cvtps2pi
                | M::Cvttps2pi
                | M::Cvtpd2pi
                | M::Cvttpd2pi
        )
}

/// Executes an instruction, of which [`is_known`] is true.
pub(in crate::insn) fn step(core: &mut Core, insn: &Instruction) -> Exec {
    if let Some(op) = conversion(insn.mnemonic()) {
        return convert(core, insn, op);
    }
    if is_of_sse(insn) {
        super::ready(core)?;
    }
    ready(core)?;
    match insn.mnemonic() {
        Mnemonic::Emms => {
            enter(core);
            core.state.x87[0] &= !TAGS;
            return Ok(());
        }
        Mnemonic::Maskmovq => return masked(core, insn),
        _ => {}
    }
    let from = if insn.op_count() > 1 {
        source(core, insn)?
    } else {
        0
    };
    if insn.op0_kind() == OpKind::Memory {
        operand::write(core, insn, 0, from)?;
        enter(core);
        return Ok(());
    }
    let a = match insn.op0_register() {
        register if register.is_mm() => before(core, register),
        _ => 0,
    };
    let Some(value) = made(insn.mnemonic(), a, from, immediate(insn)) else {
        return core.ud();
    };
    enter(core);
    put(core, insn, value);
    Ok(())
}

/// Whether SSE has to be switched on as well: it, or something later, has brought the instruction
/// (SDM vol. 3A, 13.1.4).
fn is_of_sse(insn: &Instruction) -> bool {
    match insn.mnemonic() {
        Mnemonic::Pshufw | Mnemonic::Movntq => false,
        // Of SSE2's date (SDM vol. 1, 11.4.2), whatever feature its page names.
        Mnemonic::Paddq => true,
        _ => {
            let features = insn.cpuid_features();
            features.iter().any(|feature| *feature != CpuidFeature::MMX)
        }
    }
}

/// MMX is switched on, and no exception of x87 waits.
fn ready(core: &mut Core) -> Exec {
    if core.state.cr0 & CR0_EM != 0 {
        return core.ud();
    }
    if core.state.cr0 & CR0_TS != 0 {
        return core.raise(7, None);
    }
    if core.state.x87[0] & PENDING != 0 {
        return core.raise(16, None);
    }
    Ok(())
}

/// All registers are in use, and register 0 is the top: the image has them by their distance
/// from it.
fn enter(core: &mut Core) {
    let x87 = &mut core.state.x87;
    let top = (x87[0] >> TOP & 7) as usize;
    x87[0] = x87[0] & !(7 << TOP) | TAGS;
    x87[4..].rotate_right(2 * top);
}

fn place(register: Register) -> usize {
    4 + 2 * register.number()
}

/// Sets a register, once [`enter`] has been called.
fn set_mm(core: &mut Core, register: Register, value: u64) {
    let at = place(register);
    core.state.x87[at] = value;
    core.state.x87[at + 1] |= 0xffff;
}

/// A register of MMX before [`enter`] has been called.
fn before(core: &Core, register: Register) -> u64 {
    let top = (core.state.x87[0] >> TOP & 7) as usize;
    core.state.x87[4 + 2 * (register.number().wrapping_sub(top) & 7)]
}

/// Operand 1, an immediate, or the low half of a register.
fn source(core: &mut Core, insn: &Instruction) -> Exec<u64> {
    match (insn.op1_kind(), insn.op1_register()) {
        (OpKind::Register, register) if register.is_mm() => Ok(before(core, register)),
        (OpKind::Register, register) if register.is_xmm() => {
            Ok(xmm(core, register.number() as u8)[0])
        }
        _ => read(core, insn, 1),
    }
}

/// What an instruction makes of its destination and source.
fn made(mnemonic: Mnemonic, a: u64, b: u64, imm: u8) -> Option<u64> {
    use Mnemonic as M;
    let low = |what: V, a: X, b: X| table::value(what, a, b, imm).map(|value| value[0]);
    match mnemonic {
        M::Movd | M::Movq | M::Movntq | M::Movq2dq | M::Movdq2q => Some(b),
        M::Pmovmskb => Some(signs::<i8, _>([b, 0])),
        M::Pextrw => Some(b >> (16 * (imm & 3)) & 0xffff),
        M::Pinsrw => {
            let at = 16 * (imm & 3);
            Some(a & !(0xffff << at) | (b & 0xffff) << at)
        }
        M::Pshufw => Some(shuffle_words([b, 0], 0, imm)[0]),
        // Both operands side by side are one of twice the width.
        M::Packsswb => low(V::Packsswb, [a, b], [0; 2]),
        M::Packssdw => low(V::Packssdw, [a, b], [0; 2]),
        M::Packuswb => low(V::Packuswb, [a, b], [0; 2]),
        M::Phaddw | M::Phaddd | M::Phaddsw | M::Phsubw | M::Phsubd | M::Phsubsw => {
            low(V::of(mnemonic)?, [a, b], [0; 2])
        }
        M::Palignr => low(V::Palignr, [0; 2], [b, a]),
        // Their upper halves in turns are the upper half of all in turns.
        M::Punpckhbw => table::value(V::Punpcklbw, [a, 0], [b, 0], 0).map(|value| value[1]),
        M::Punpckhwd => table::value(V::Punpcklwd, [a, 0], [b, 0], 0).map(|value| value[1]),
        M::Punpckhdq => table::value(V::Punpckldq, [a, 0], [b, 0], 0).map(|value| value[1]),
        // Of numbers of bytes the fourth bit does not count.
        M::Pshufb => low(V::Pshufb, [a, a], [b, 0]),
        _ => low(V::of(mnemonic)?, [a, 0], [b, 0]),
    }
}

fn put(core: &mut Core, insn: &Instruction, value: u64) {
    let to = insn.op0_register();
    if to.is_mm() {
        set_mm(core, to, value);
    } else if to.is_xmm() {
        set_xmm(core, to.number() as u8, [value, 0]);
    } else {
        set(core, to, value);
    }
}

fn conversion(mnemonic: Mnemonic) -> Option<Op> {
    Some(match mnemonic {
        Mnemonic::Cvtpi2ps => Op::Cvtpi2ps,
        Mnemonic::Cvtpi2pd => Op::Cvtpi2pd,
        Mnemonic::Cvtps2pi => Op::Cvtps2pi,
        Mnemonic::Cvttps2pi => Op::Cvttps2pi,
        Mnemonic::Cvtpd2pi => Op::Cvtpd2pi,
        Mnemonic::Cvttpd2pi => Op::Cvttpd2pi,
        _ => return None,
    })
}

/// Between registers of MMX and XMM.
fn convert(core: &mut Core, insn: &Instruction, op: Op) -> Exec {
    let in_memory = insn.op1_kind() == OpKind::Memory;
    super::ready(core)?;
    if !(in_memory && op == Op::Cvtpi2pd) {
        ready(core)?;
    }
    let b = match insn.op1_register() {
        register if register.is_xmm() => xmm(core, register.number() as u8),
        _ if in_memory && bits(insn, 1) == 128 => super::aligned_operand(core, insn)?,
        _ => [source(core, insn)?, 0],
    };
    let to = insn.op0_register();
    let a = if to.is_xmm() {
        xmm(core, to.number() as u8)
    } else {
        [0; 2]
    };
    let value = float::result(core, op, a, b, 0)?;
    // CVTPI2PD out of memory has nothing to do with MMX (SDM vol. 2A).
    if !(in_memory && op == Op::Cvtpi2pd) {
        enter(core);
    }
    if to.is_xmm() {
        set_xmm(core, to.number() as u8, value);
    } else {
        set_mm(core, to, value[0]);
    }
    Ok(())
}

/// MASKMOVQ.
fn masked(core: &mut Core, insn: &Instruction) -> Exec {
    let value = before(core, insn.op1_register());
    let mask = before(core, insn.op2_register());
    super::moves::chosen(core, insn, [value, 0], [mask, 0], 8)?;
    enter(core);
    Ok(())
}
