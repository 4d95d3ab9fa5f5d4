//! Instructions of the XMM registers: SSE to SSE4.2.

use iced_x86::{Instruction, Mnemonic, OpKind};

use super::core::{Core, Exec};
use super::op::Op;
use super::operand::{self, Linear, linear};
use crate::state::{CR0_EM, CR0_TS, CR4_OSFXSR};

mod float;
mod lanes;
pub(super) mod mmx;
pub(super) mod moves;
mod scalar;
mod table;
mod text;

pub(super) use self::scalar::crc;
pub(crate) use self::table::V;

/// The value of an XMM register, the low half first.
pub(crate) type X = [u64; 2];

/// `Op::room`: two bits for each of the operands 0 and 1, and REX.W.
const XMM: u8 = 0;
const GENERAL: u8 = 1;
const MEMORY: u8 = 2;
const NOTHING: u8 = 3;
const WIDE: u8 = 1 << 4;

#[derive(Debug, Clone, Copy)]
enum Operand {
    Xmm(u8),
    General(u8),
    Memory(Linear),
    /// An immediate takes its place.
    Nothing,
}

/// What an instruction is about.
#[derive(Debug, Clone, Copy)]
struct Args {
    to: Operand,
    from: Operand,
    imm: u8,
    /// General registers have 64 bits.
    wide: bool,
}

/// Whether an instruction is one of XMM registers that are here.
pub(crate) fn of(insn: &Instruction) -> Option<V> {
    let is_mmx = (0..insn.op_count()).any(|operand| insn.op_register(operand).is_mm());
    if insn.is_string_instruction() || is_mmx {
        return None;
    }
    V::of(insn.mnemonic())
}

/// Fills in an operation, but for the address of a memory operand.
pub(crate) fn fill(op: &mut Op, insn: &Instruction, what: V) {
    let kind = |operand: u32| match insn.op_kind(operand) {
        OpKind::Register if insn.op_register(operand).is_xmm() => XMM,
        OpKind::Register => GENERAL,
        OpKind::Memory => MEMORY,
        _ => NOTHING,
    };
    let (to, from) = (kind(0), kind(1));
    if to <= GENERAL {
        op.dst = operand::number(insn.op0_register());
    }
    if from <= GENERAL {
        op.src = operand::number(insn.op1_register());
    }
    op.room = to | from << 2 | if is_wide(insn) { WIDE } else { 0 };
    op.imm = (what as u64) << 8 | u64::from(immediate(insn));
}

fn immediate(insn: &Instruction) -> u8 {
    let last = insn.op_count().saturating_sub(1);
    match insn.op_kind(last) {
        OpKind::Immediate8 => insn.immediate8(),
        _ => 0,
    }
}

/// Some general register that it names, or the memory in its place, has 64 bits.
fn is_wide(insn: &Instruction) -> bool {
    let named = (0..insn.op_count()).any(|operand| insn.op_register(operand).is_gpr64());
    let memory = matches!(
        insn.mnemonic(),
        Mnemonic::Cvtsi2ss | Mnemonic::Cvtsi2sd | Mnemonic::Movq
    );
    named
        || memory && insn.memory_size().size() == 8
        || matches!(
            insn.mnemonic(),
            Mnemonic::Pcmpestri64 | Mnemonic::Pcmpestrm64
        )
}

/// An operation of 64-bit code.
pub(super) fn quick(core: &mut Core, op: &Op) -> Exec {
    let operand = |kind: u8, number: u8| match kind & 3 {
        XMM => Operand::Xmm(number),
        GENERAL => Operand::General(number),
        MEMORY => Operand::Memory(Linear {
            at: core.address(op),
            seg: op.seg,
        }),
        _ => Operand::Nothing,
    };
    let args = Args {
        to: operand(op.room, op.dst),
        from: operand(op.room >> 2, op.src),
        imm: op.imm as u8,
        wide: op.room & WIDE != 0,
    };
    ready(core)?;
    match V::ALL.get((op.imm >> 8) as usize) {
        Some(what) => table::perform(core, *what, args),
        None => core.ud(),
    }
}

/// An instruction of any code.
pub(super) fn step(core: &mut Core, insn: &Instruction) -> Exec {
    let Some(what) = of(insn) else {
        return core.ud();
    };
    ready(core)?;
    if what == V::Maskmovdqu {
        return moves::masked(core, insn);
    }
    let operand = |core: &mut Core, number: u32| {
        let register = insn.op_register(number);
        Ok(match insn.op_kind(number) {
            OpKind::Register if register.is_xmm() => Operand::Xmm(operand::number(register)),
            OpKind::Register => Operand::General(operand::number(register)),
            OpKind::Memory => Operand::Memory(linear(core, insn, number == 0)?),
            _ => Operand::Nothing,
        })
    };
    let args = Args {
        to: operand(core, 0)?,
        from: operand(core, 1)?,
        imm: immediate(insn),
        wide: is_wide(insn),
    };
    table::perform(core, what, args)
}

/// SSE is switched on (SDM vol. 3A, table 13-1).
#[inline(always)]
pub(super) fn ready(core: &mut Core) -> Exec {
    let off = core.state.cr0 & (CR0_EM | CR0_TS) != 0 || core.state.cr4 & CR4_OSFXSR == 0;
    if off { refuse(core) } else { Ok(()) }
}

#[cold]
fn refuse(core: &mut Core) -> Exec {
    if core.state.cr0 & CR0_EM != 0 || core.state.cr4 & CR4_OSFXSR == 0 {
        return core.ud();
    }
    core.raise(7, None)
}

// Operands.

#[inline(always)]
fn xmm(core: &Core, number: u8) -> X {
    core.state.xmm[usize::from(number & 15)]
}

#[inline(always)]
fn set_xmm(core: &mut Core, number: u8, value: X) {
    core.state.xmm[usize::from(number & 15)] = value;
}

/// The destination's number, where it can only be a register.
fn to(args: &Args) -> u8 {
    match args.to {
        Operand::Xmm(number) | Operand::General(number) => number,
        Operand::Memory(_) | Operand::Nothing => 0,
    }
}

/// All of a source that lies on a boundary of 16 bytes.
fn full(core: &mut Core, args: &Args) -> Exec<X> {
    match args.from {
        Operand::Xmm(number) => Ok(xmm(core, number)),
        Operand::Memory(at) => {
            aligned(core, at)?;
            core.load_pair(at.at, at.seg)
        }
        Operand::General(_) | Operand::Nothing => Ok([0; 2]),
    }
}

/// The memory operand of an instruction in place of [`full`]'s.
fn aligned_operand(core: &mut Core, insn: &Instruction) -> Exec<X> {
    let at = linear(core, insn, false)?;
    aligned(core, at)?;
    core.load_pair(at.at, at.seg)
}

/// All of a source, wherever it lies.
fn loose(core: &mut Core, args: &Args) -> Exec<X> {
    match args.from {
        Operand::Xmm(number) => Ok(xmm(core, number)),
        Operand::Memory(at) => core.load_pair(at.at, at.seg),
        Operand::General(_) | Operand::Nothing => Ok([0; 2]),
    }
}

/// The low lane of a source, as wide as `W` in memory; a register's others are beside it.
fn low<W: super::core::Width>(core: &mut Core, args: &Args) -> Exec<X> {
    match args.from {
        Operand::Xmm(number) => Ok(xmm(core, number)),
        Operand::Memory(at) => Ok([core.load::<W>(at.at, at.seg)?.wide(), 0]),
        Operand::General(_) | Operand::Nothing => Ok([0; 2]),
    }
}

/// Of 16 bytes at once: elsewhere it is #GP, on the stack too, and whatever else the address is.
#[inline(always)]
fn aligned(core: &mut Core, at: Linear) -> Exec {
    if at.at & 15 == 0 {
        return Ok(());
    }
    core.gp(0)
}

/// A general register, or memory of the width in its place.
fn general<W: super::core::Width>(core: &mut Core, args: &Args) -> Exec<u64> {
    match args.from {
        Operand::General(number) => Ok(core.reg::<W>(number).wide()),
        Operand::Memory(at) => core.load::<W>(at.at, at.seg).map(W::wide),
        Operand::Xmm(_) | Operand::Nothing => Ok(0),
    }
}

/// Writes a value to a general register, of which the rest is 0, or to memory of the width.
fn set_general<W: super::core::Width>(core: &mut Core, args: &Args, value: u64) -> Exec {
    match args.to {
        Operand::General(number) => {
            core.set_reg(number, value);
            Ok(())
        }
        Operand::Memory(at) => core.store(at.at, at.seg, W::of(value)),
        Operand::Xmm(_) | Operand::Nothing => Ok(()),
    }
}

// Shapes: operands read, a register written.

#[inline(always)]
fn change(core: &mut Core, args: &Args, value: impl FnOnce(X) -> X) -> Exec {
    let to = to(args);
    let value = value(xmm(core, to));
    set_xmm(core, to, value);
    Ok(())
}

/// Of two whole values.
#[inline(always)]
fn whole(core: &mut Core, args: &Args, of: impl FnOnce(X, X) -> X) -> Exec {
    let b = full(core, args)?;
    change(core, args, |a| of(a, b))
}

/// Of two whole values and the immediate.
#[inline(always)]
fn with_imm(core: &mut Core, args: &Args, of: impl FnOnce(X, X, u8) -> X) -> Exec {
    let b = full(core, args)?;
    change(core, args, |a| of(a, b, args.imm))
}

/// Of the low 64 bits of the source.
#[inline(always)]
fn half(core: &mut Core, args: &Args, of: impl FnOnce(X, X) -> X) -> Exec {
    let b = low::<u64>(core, args)?;
    change(core, args, |a| of(a, b))
}

/// Of the low 32.
#[inline(always)]
fn quarter(core: &mut Core, args: &Args, of: impl FnOnce(X, X) -> X) -> Exec {
    let b = low::<u32>(core, args)?;
    change(core, args, |a| of(a, b))
}

/// Of the low 16.
#[inline(always)]
fn eighth(core: &mut Core, args: &Args, of: impl FnOnce(X, X) -> X) -> Exec {
    let b = low::<u16>(core, args)?;
    change(core, args, |a| of(a, b))
}

/// By a count: the low 64 bits of the source, or the immediate.
#[inline(always)]
fn shift(core: &mut Core, args: &Args, of: impl FnOnce(X, u32) -> X) -> Exec {
    let count = match args.from {
        Operand::Nothing => u64::from(args.imm),
        _ => full(core, args)?[0],
    };
    // More than 63 are as many as 64.
    let count = count.min(64) as u32;
    change(core, args, |a| of(a, count))
}

/// With XMM0 as a third.
#[inline(always)]
fn by_xmm0(core: &mut Core, args: &Args, of: impl FnOnce(X, X, X) -> X) -> Exec {
    let b = full(core, args)?;
    let third = xmm(core, 0);
    change(core, args, |a| of(a, b, third))
}

/// An immediate in place of the source.
#[inline(always)]
fn imm_alone(core: &mut Core, args: &Args, of: impl FnOnce(X, u8) -> X) -> Exec {
    change(core, args, |a| of(a, args.imm))
}

/// A general register made of a register of this kind.
#[inline(always)]
fn mask(core: &mut Core, args: &Args, of: impl FnOnce(X) -> u64) -> Exec {
    let value = match args.from {
        Operand::Xmm(number) => of(xmm(core, number)),
        _ => 0,
    };
    core.set_reg(to(args), value);
    Ok(())
}

/// By a handler of its own.
#[inline(always)]
fn own(core: &mut Core, args: &Args, of: impl FnOnce(&mut Core, &Args) -> Exec) -> Exec {
    of(core, args)
}

/// The same shapes, of values alone; `None` of those that have more to do.
mod value {
    use emu_fpu::sse::Op;

    use super::X;

    #[inline(always)]
    pub(super) fn whole(a: X, b: X, _imm: u8, of: impl FnOnce(X, X) -> X) -> Option<X> {
        Some(of(a, b))
    }

    #[inline(always)]
    pub(super) fn with_imm(a: X, b: X, imm: u8, of: impl FnOnce(X, X, u8) -> X) -> Option<X> {
        Some(of(a, b, imm))
    }

    #[inline(always)]
    pub(super) fn shift(a: X, b: X, _imm: u8, of: impl FnOnce(X, u32) -> X) -> Option<X> {
        Some(of(a, b[0].min(64) as u32))
    }

    macro_rules! none {
        ($($name:ident: $of:ty;)*) => {$(
            pub(super) fn $name(_a: X, _b: X, _imm: u8, _of: $of) -> Option<X> {
                None
            }
        )*};
    }

    none! {
        half: impl FnOnce(X, X) -> X;
        quarter: impl FnOnce(X, X) -> X;
        eighth: impl FnOnce(X, X) -> X;
        by_xmm0: impl FnOnce(X, X, X) -> X;
        imm_alone: impl FnOnce(X, u8) -> X;
        mask: impl FnOnce(X) -> u64;
        own: impl Sized;
        packed: Op;
        double: Op;
        single: Op;
        integer: [Op; 2];
        double_to_integer: [Op; 2];
        single_to_integer: [Op; 2];
        compare_double: Op;
        compare_single: Op;
    }
}
