//! Operands of a decoded instruction, in code of any size.

use iced_x86::{Instruction, OpKind, Register};

use super::core::{Core, Exec, Width};
use crate::state::{CR0_PE, STACK, Seg, ZERO};

/// Forms of operations with two operands: where they are, and the immediate.
pub(crate) const RR: u8 = 0;
pub(crate) const RI: u8 = 1;
pub(crate) const RM: u8 = 2;
pub(crate) const MR: u8 = 3;
pub(crate) const MI: u8 = 4;

/// Calls a generic function of the width in `$bits`.
macro_rules! by_width {
    ($bits:expr, $W:ident => $body:expr) => {
        match $bits {
            8 => {
                type $W = u8;
                $body
            }
            16 => {
                type $W = u16;
                $body
            }
            32 => {
                type $W = u32;
                $body
            }
            _ => {
                type $W = u64;
                $body
            }
        }
    };
}
pub(super) use by_width;

/// The number of a general register.
pub(super) fn number(register: Register) -> u8 {
    register.full_register().number() as u8
}

/// Whether it is AH, CH, DH or BH.
pub(super) fn is_high(register: Register) -> bool {
    matches!(
        register,
        Register::AH | Register::CH | Register::DH | Register::BH
    )
}

pub(super) fn seg_of(register: Register) -> Seg {
    match register {
        Register::ES => Seg::Es,
        Register::CS => Seg::Cs,
        Register::SS => Seg::Ss,
        Register::FS => Seg::Fs,
        Register::GS => Seg::Gs,
        _ => Seg::Ds,
    }
}

pub(super) fn get(core: &Core, register: Register) -> u64 {
    let value = core.state.r[usize::from(number(register))];
    if is_high(register) {
        return value >> 8 & 0xff;
    }
    match register.size() {
        1 => value & 0xff,
        2 => value & 0xffff,
        4 => value & 0xffff_ffff,
        _ => value,
    }
}

pub(super) fn set(core: &mut Core, register: Register, value: u64) {
    let number = number(register);
    if is_high(register) {
        let place = &mut core.state.r[usize::from(number)];
        *place = *place & !0xff00 | (value & 0xff) << 8;
        return;
    }
    by_width!(register.size() * 8, W => core.set_reg(number, W::of(value)));
}

/// Bits of an operand.
pub(super) fn bits(insn: &Instruction, operand: u32) -> u32 {
    let bytes = match insn.op_kind(operand) {
        OpKind::Register => insn.op_register(operand).size(),
        OpKind::Immediate8 => 1,
        OpKind::Immediate16 | OpKind::Immediate8to16 => 2,
        OpKind::Immediate32 | OpKind::Immediate8to32 => 4,
        OpKind::Immediate64 | OpKind::Immediate8to64 | OpKind::Immediate32to64 => 8,
        _ => insn.memory_size().size(),
    };
    bytes as u32 * 8
}

/// Bits of the addresses that an instruction makes.
pub(super) fn address_bits(insn: &Instruction) -> u32 {
    for register in [insn.memory_base(), insn.memory_index()] {
        match register.size() {
            2 => return 16,
            4 => return 32,
            8 => return 64,
            _ => {}
        }
    }
    8 * insn.memory_displ_size().max(2)
}

/// The offset of the memory operand in its segment.
pub(super) fn offset(core: &Core, insn: &Instruction) -> u64 {
    let displacement = insn.memory_displacement64();
    if insn.is_ip_rel_memory_operand() {
        return displacement;
    }
    let part = |register| match register {
        Register::None => 0,
        register => get(core, register),
    };
    let index = part(insn.memory_index()).wrapping_mul(u64::from(insn.memory_index_scale()));
    let sum = part(insn.memory_base())
        .wrapping_add(index)
        .wrapping_add(displacement);
    match address_bits(insn) {
        16 => sum & 0xffff,
        32 => sum & 0xffff_ffff,
        _ => sum,
    }
}

/// A linear address, and what a fault there is called.
#[derive(Debug, Clone, Copy)]
pub(super) struct Linear {
    pub(super) at: u64,
    pub(super) seg: u8,
}

/// The segment of the memory operand. In 64-bit code prefixes other than FS and GS mean
/// nothing: RSP and RBP as base choose SS, whose faults are its own.
pub(super) fn memory_seg(core: &Core, insn: &Instruction) -> Seg {
    let seg = seg_of(insn.memory_segment());
    if core.state.bits() != 64 || matches!(seg, Seg::Fs | Seg::Gs) {
        return seg;
    }
    match insn.memory_base().full_register() {
        Register::RSP | Register::RBP => Seg::Ss,
        _ => Seg::Ds,
    }
}

/// Where the memory operand is.
pub(super) fn linear(core: &mut Core, insn: &Instruction, write: bool) -> Exec<Linear> {
    let offset = offset(core, insn);
    let bytes = insn.memory_size().size().max(1) as u64;
    in_segment(core, memory_seg(core, insn), offset, bytes, write)
}

/// What a segment is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    Read,
    Write,
    /// Nothing is moved: code that can only be executed will do.
    Name,
}

/// The linear address of an offset, checked as the segment says.
pub(super) fn in_segment(
    core: &mut Core,
    seg: Seg,
    offset: u64,
    bytes: u64,
    write: bool,
) -> Exec<Linear> {
    let usage = if write { Use::Write } else { Use::Read };
    used(core, seg, offset, bytes, usage)
}

/// [`in_segment`], whatever the segment is used for.
pub(super) fn used(core: &mut Core, seg: Seg, offset: u64, bytes: u64, usage: Use) -> Exec<Linear> {
    let base = core.segment_base(seg);
    let code = if seg == Seg::Ss { STACK } else { ZERO };
    let at = base.wrapping_add(offset);
    if core.state.bits() == 64 {
        return Ok(Linear { at, seg: code });
    }
    let one = core.state.segment(seg);
    let kind = one.attr & 0xf;
    let is_code = kind & 8 != 0;
    let protected = core.state.cr0 & CR0_PE != 0;
    let open = match (usage, is_code) {
        (Use::Write, true) => false,
        (Use::Read, false) | (Use::Name, _) => true,
        // Writable data, readable code.
        (Use::Write, false) | (Use::Read, true) => kind & 2 != 0,
    };
    let refused = protected && !(one.is_usable() && open);
    let last = offset.wrapping_add(bytes - 1);
    let down = !is_code && kind & 4 != 0 && protected;
    let outside = if down {
        let most = if one.is_big() { 0xffff_ffff } else { 0xffff };
        offset <= u64::from(one.limit) || last > most
    } else {
        last > u64::from(one.limit)
    };
    if refused || outside {
        let vector = if seg == Seg::Ss { 12 } else { 13 };
        return core.raise(vector, Some(0));
    }
    Ok(Linear {
        at: at & 0xffff_ffff,
        seg: code,
    })
}

/// Where an operand lies that RDI or RSI leads to: its offset, and bits of that.
pub(super) fn string_offset(core: &Core, kind: OpKind) -> (u64, u32) {
    let (number, bits) = match kind {
        OpKind::MemorySegDI | OpKind::MemoryESDI => (7, 16),
        OpKind::MemorySegEDI | OpKind::MemoryESEDI => (7, 32),
        OpKind::MemorySegSI => (6, 16),
        OpKind::MemorySegESI => (6, 32),
        OpKind::MemorySegRSI => (6, 64),
        _ => (7, 64),
    };
    (core.state.r[number] & (u64::MAX >> (64 - bits)), bits)
}

/// What an operand is, zero-extended; immediates are sign-extended.
pub(super) fn read(core: &mut Core, insn: &Instruction, operand: u32) -> Exec<u64> {
    match insn.op_kind(operand) {
        OpKind::Register => Ok(get(core, insn.op_register(operand))),
        OpKind::Memory => {
            let Linear { at, seg } = linear(core, insn, false)?;
            by_width!(bits(insn, operand), W => core.load::<W>(at, seg).map(W::wide))
        }
        _ => Ok(insn.immediate(operand)),
    }
}

/// Writes an operand.
pub(super) fn write(core: &mut Core, insn: &Instruction, operand: u32, value: u64) -> Exec {
    if insn.op_kind(operand) == OpKind::Register {
        set(core, insn.op_register(operand), value);
        return Ok(());
    }
    let Linear { at, seg } = linear(core, insn, true)?;
    by_width!(bits(insn, operand), W => core.store(at, seg, W::of(value)))
}

/// Reads operand 0 and writes what `change` makes of it; gives what it was.
pub(super) fn modify(
    core: &mut Core,
    insn: &Instruction,
    change: impl FnOnce(u64) -> u64,
) -> Exec<u64> {
    if insn.op_kind(0) == OpKind::Register {
        let register = insn.op0_register();
        let old = get(core, register);
        set(core, register, change(old));
        return Ok(old);
    }
    let Linear { at, seg } = linear(core, insn, true)?;
    by_width!(bits(insn, 0), W => {
        core.modify::<W>(at, seg, |old| W::of(change(old.wide()))).map(W::wide)
    })
}

/// Bits of the stack pointer.
pub(super) fn stack_bits(core: &Core) -> u32 {
    match core.state.bits() {
        64 => 64,
        _ if core.state.segment(Seg::Ss).is_big() => 32,
        _ => 16,
    }
}

/// RSP as the stack's size has it, moved.
pub(super) fn stack_at(core: &Core, by: i64) -> u64 {
    let moved = core.state.r[4].wrapping_add(by.cast_unsigned());
    moved & (u64::MAX >> (64 - stack_bits(core)))
}

/// Sets RSP in the stack's size.
pub(super) fn set_stack(core: &mut Core, value: u64) {
    match stack_bits(core) {
        16 => core.set_reg(4, value as u16),
        32 => core.set_reg(4, value as u32),
        _ => core.state.r[4] = value,
    }
}

/// Stores below the stack's top; RSP stays.
pub(super) fn below(core: &mut Core, depth: u32, bits: u32, value: u64) -> Exec {
    let offset = stack_at(core, -i64::from(depth));
    let Linear { at, seg } = in_segment(core, Seg::Ss, offset, u64::from(bits / 8), true)?;
    by_width!(bits, W => core.store(at, seg, W::of(value)))
}

pub(super) fn push(core: &mut Core, bits: u32, value: u64) -> Exec {
    below(core, bits / 8, bits, value)?;
    let top = stack_at(core, -i64::from(bits / 8));
    set_stack(core, top);
    Ok(())
}

/// What is on the stack, so many bytes from its top; RSP stays.
pub(super) fn peek(core: &mut Core, above: u32, bits: u32) -> Exec<u64> {
    let offset = stack_at(core, i64::from(above));
    let Linear { at, seg } = in_segment(core, Seg::Ss, offset, u64::from(bits / 8), false)?;
    by_width!(bits, W => core.load::<W>(at, seg).map(W::wide))
}

pub(super) fn drop_stack(core: &mut Core, bytes: u32) {
    let top = stack_at(core, i64::from(bytes));
    set_stack(core, top);
}
