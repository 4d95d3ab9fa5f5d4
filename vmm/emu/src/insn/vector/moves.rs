//! Moves between XMM registers, general ones and memory.

use iced_x86::Instruction;

use super::lanes::Lane;
use super::{Args, Operand, X, aligned as check, full, loose, ready, set_xmm, xmm};
use crate::insn::Op;
use crate::insn::core::{Core, Exec, Width};
use crate::insn::operand::{Linear, in_segment, memory_seg, string_offset};

/// Where a move from a register goes to; the value of that register.
fn source(core: &Core, args: &Args) -> X {
    match args.from {
        Operand::Xmm(number) => xmm(core, number),
        _ => [0; 2],
    }
}

/// MOVAPS and its like.
pub(super) fn aligned(core: &mut Core, args: &Args) -> Exec {
    if let Operand::Memory(at) = args.to {
        check(core, at)?;
        return core.store_pair(at.at, at.seg, source(core, args));
    }
    let value = full(core, args)?;
    set_xmm(core, super::to(args), value);
    Ok(())
}

/// MOVUPS and its like.
pub(super) fn unaligned(core: &mut Core, args: &Args) -> Exec {
    if let Operand::Memory(at) = args.to {
        return core.store_pair(at.at, at.seg, source(core, args));
    }
    let value = loose(core, args)?;
    set_xmm(core, super::to(args), value);
    Ok(())
}

/// The low lane alone between registers; with zeroes above it out of memory.
fn lowest<W: Width>(core: &mut Core, args: &Args) -> Exec {
    let (to, from) = (super::to(args), source(core, args));
    match (args.to, args.from) {
        (Operand::Memory(at), _) => return core.store(at.at, at.seg, W::of(from[0])),
        (_, Operand::Memory(at)) => {
            let value = core.load::<W>(at.at, at.seg)?.wide();
            set_xmm(core, to, [value, 0]);
        }
        _ => {
            let [low, high] = xmm(core, to);
            let mask = u64::MAX >> (64 - W::BITS);
            set_xmm(core, to, [low & !mask | from[0] & mask, high]);
        }
    }
    Ok(())
}

/// MOVSS.
pub(super) fn single(core: &mut Core, args: &Args) -> Exec {
    lowest::<u32>(core, args)
}

/// MOVSD.
pub(super) fn double(core: &mut Core, args: &Args) -> Exec {
    lowest::<u64>(core, args)
}

/// MOVD and MOVQ: with zeroes above it, whatever it goes to.
fn extended<W: Width>(core: &mut Core, args: &Args) -> Exec {
    let value = match args.from {
        Operand::Xmm(number) => W::of(xmm(core, number)[0]),
        Operand::General(number) => core.reg::<W>(number),
        Operand::Memory(at) => core.load::<W>(at.at, at.seg)?,
        Operand::Nothing => W::of(0),
    };
    match args.to {
        Operand::Xmm(number) => set_xmm(core, number, [value.wide(), 0]),
        Operand::General(number) => core.set_reg(number, value),
        Operand::Memory(at) => return core.store(at.at, at.seg, value),
        Operand::Nothing => {}
    }
    Ok(())
}

/// MOVD.
pub(super) fn doubleword(core: &mut Core, args: &Args) -> Exec {
    extended::<u32>(core, args)
}

/// MOVQ.
pub(super) fn quadword(core: &mut Core, args: &Args) -> Exec {
    extended::<u64>(core, args)
}

/// 64 bits of a register from memory or to it; the others stay.
fn part(core: &mut Core, args: &Args, half: usize) -> Exec {
    if let Operand::Memory(at) = args.to {
        return core.store(at.at, at.seg, source(core, args)[half]);
    }
    if let Operand::Memory(at) = args.from {
        let value = core.load::<u64>(at.at, at.seg)?;
        let to = super::to(args);
        let mut both = xmm(core, to);
        both[half] = value;
        set_xmm(core, to, both);
    }
    Ok(())
}

/// MOVLPS and MOVLPD.
pub(super) fn low(core: &mut Core, args: &Args) -> Exec {
    part(core, args, 0)
}

/// MOVHPS and MOVHPD.
pub(super) fn high(core: &mut Core, args: &Args) -> Exec {
    part(core, args, 1)
}

/// MASKMOVDQU has its address in RDI, which is no operand of the table's kind.
pub(super) fn nowhere(core: &mut Core, _args: &Args) -> Exec {
    core.ud()
}

/// MASKMOVDQU.
pub(super) fn masked(core: &mut Core, insn: &Instruction) -> Exec {
    let value = xmm(core, super::operand::number(insn.op1_register()));
    let mask = xmm(core, super::operand::number(insn.op2_register()));
    chosen(core, insn, value, mask, 16)
}

/// Stores bytes whose mask is negative, of 8 or 16. Where none is, and on all the bytes that are
/// not stored, faults are the processor's to raise or not (SDM vol. 2B, MASKMOVDQU): as AMD's do,
/// all bytes have to be there.
pub(super) fn chosen(core: &mut Core, insn: &Instruction, value: X, mask: X, bytes: u32) -> Exec {
    let seg = memory_seg(core, insn);
    let (offset, _) = string_offset(core, insn.op0_kind());
    let at = in_segment(core, seg, offset, u64::from(bytes), true)?;
    for half in (0..bytes).step_by(8) {
        core.check_write(core.beyond(at.at, half), 8, at.seg)?;
    }
    for (byte, (value, mask)) in (0..bytes).zip(u8::split(value).into_iter().zip(u8::split(mask))) {
        if mask & 0x80 != 0 {
            core.store(core.beyond(at.at, byte), at.seg, value)?;
        }
    }
    Ok(())
}

// Operations of their own, for what code of 64 bits does most.

/// Of a register to another.
pub(in crate::insn) fn copy(core: &mut Core, op: &Op) -> Exec {
    ready(core)?;
    let value = xmm(core, op.src);
    set_xmm(core, op.dst, value);
    Ok(())
}

/// All of a register out of memory.
pub(in crate::insn) fn load<const ALIGNED: bool>(core: &mut Core, op: &Op) -> Exec {
    ready(core)?;
    let at = core.address(op);
    if ALIGNED {
        check(core, Linear { at, seg: op.seg })?;
    }
    let value = core.load_pair(at, op.seg)?;
    set_xmm(core, op.dst, value);
    Ok(())
}

/// All of a register to memory.
pub(in crate::insn) fn store<const ALIGNED: bool>(core: &mut Core, op: &Op) -> Exec {
    ready(core)?;
    let at = core.address(op);
    if ALIGNED {
        check(core, Linear { at, seg: op.seg })?;
    }
    core.store_pair(at, op.seg, xmm(core, op.src))
}

/// The low lane out of memory, with zeroes above it.
pub(in crate::insn) fn load_low<W: Width>(core: &mut Core, op: &Op) -> Exec {
    ready(core)?;
    let value = core.load::<W>(core.address(op), op.seg)?;
    set_xmm(core, op.dst, [value.wide(), 0]);
    Ok(())
}

/// The low lane to memory.
pub(in crate::insn) fn store_low<W: Width>(core: &mut Core, op: &Op) -> Exec {
    ready(core)?;
    let value = W::of(xmm(core, op.src)[0]);
    core.store(core.address(op), op.seg, value)
}
