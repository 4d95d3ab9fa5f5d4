//! Instructions of any form, by the decoder's instruction: what is rare, and all code of 16 and
//! 32 bits.

use iced_x86::{Instruction, Mnemonic, OpKind, Register};
use instruction_facts::is_canonical;

use super::core::{Core, Exec, Trap, Width};
use super::kinds::{binary_of, is_cmovcc, is_hint, is_setcc, shift_of};
use super::op::Op;
use super::operand::{
    Linear, address_bits, below, bits, by_width, drop_stack, get, in_segment, linear, memory_seg,
    modify, number, offset, peek, push, read, seg_of, set, set_stack, stack_at, stack_bits, write,
};
use super::{alu, bits as bit, far, muldiv, segment, shift, system, vector};
use crate::flags::{CF, Flags, STATUS};
use crate::slow_path::SlowPath;
use crate::state::{AC, DF, ID, IF, IOPL, NT, RF, Seg, Shadow, TF, VM};
use crate::stop::Missing;

/// Executes a kept instruction by the handler of its family. It stays out of the dispatch, whose
/// registers it would take.
#[inline(never)]
pub(super) fn kept(
    core: &mut Core,
    op: &Op,
    path: SlowPath,
    step: fn(&mut Core, &Instruction) -> Exec,
) -> Exec {
    core.slow_paths.took(path);
    let Some(insn) = core.kept.get(op.imm as usize).copied() else {
        return Ok(());
    };
    step(core, &insn)
}

/// What is no instruction, and what CPUID does not announce, which is told.
pub(super) fn undefined(core: &mut Core, op: &Op) -> Exec {
    if let Some(insn) = core.kept.get(op.imm as usize) {
        core.unannounced.met(insn.code(), insn.ip());
    }
    core.ud()
}

/// More than 15 bytes.
pub(super) fn too_long(core: &mut Core, _op: &Op) -> Exec {
    core.gp(0)
}

/// What is announced and not there.
pub(super) fn absent(core: &mut Core, op: &Op) -> Exec {
    let code = core.kept.get(op.imm as usize).map(Instruction::code);
    core.missing(Missing::Instruction(
        code.unwrap_or(iced_x86::Code::INVALID),
    ))
}

fn condition(insn: &Instruction) -> u8 {
    (insn.condition_code() as u8).wrapping_sub(1)
}

/// Whether `step` executes an instruction.
pub(super) fn is_integer(insn: &Instruction) -> bool {
    let mnemonic = insn.mnemonic();
    binary_of(mnemonic).is_some()
        || shift_of(mnemonic).is_some()
        || insn.is_jcc_short_or_near()
        || insn.is_loop()
        || insn.is_loopcc()
        || insn.is_jcx_short()
        || is_setcc(mnemonic)
        || is_cmovcc(mnemonic)
        || is_hint(mnemonic)
        || KNOWN.contains(&mnemonic)
}

const KNOWN: &[Mnemonic] = &[
    Mnemonic::Inc,
    Mnemonic::Dec,
    Mnemonic::Neg,
    Mnemonic::Not,
    Mnemonic::Mov,
    Mnemonic::Movzx,
    Mnemonic::Movsx,
    Mnemonic::Movsxd,
    Mnemonic::Movnti,
    Mnemonic::Movbe,
    Mnemonic::Lea,
    Mnemonic::Push,
    Mnemonic::Pop,
    Mnemonic::Pushf,
    Mnemonic::Pushfd,
    Mnemonic::Pushfq,
    Mnemonic::Popf,
    Mnemonic::Popfd,
    Mnemonic::Popfq,
    Mnemonic::Enter,
    Mnemonic::Leave,
    Mnemonic::Xchg,
    Mnemonic::Xadd,
    Mnemonic::Cmpxchg,
    Mnemonic::Cmpxchg8b,
    Mnemonic::Cmpxchg16b,
    Mnemonic::Shld,
    Mnemonic::Shrd,
    Mnemonic::Mul,
    Mnemonic::Imul,
    Mnemonic::Div,
    Mnemonic::Idiv,
    Mnemonic::Bt,
    Mnemonic::Bts,
    Mnemonic::Btr,
    Mnemonic::Btc,
    Mnemonic::Bsf,
    Mnemonic::Bsr,
    Mnemonic::Tzcnt,
    Mnemonic::Lzcnt,
    Mnemonic::Popcnt,
    Mnemonic::Crc32,
    Mnemonic::Bswap,
    Mnemonic::Cbw,
    Mnemonic::Cwde,
    Mnemonic::Cdqe,
    Mnemonic::Cwd,
    Mnemonic::Cdq,
    Mnemonic::Cqo,
    Mnemonic::Xlatb,
    Mnemonic::Lahf,
    Mnemonic::Sahf,
    Mnemonic::Clc,
    Mnemonic::Stc,
    Mnemonic::Cmc,
    Mnemonic::Cld,
    Mnemonic::Std,
    Mnemonic::Jmp,
    Mnemonic::Call,
    Mnemonic::Ret,
    Mnemonic::Retf,
    Mnemonic::Lds,
    Mnemonic::Les,
    Mnemonic::Lfs,
    Mnemonic::Lgs,
    Mnemonic::Lss,
    Mnemonic::Ud0,
    Mnemonic::Ud1,
    Mnemonic::Ud2,
];

/// Executes an instruction, of which [`is_integer`] is true.
pub(super) fn step(core: &mut Core, insn: &Instruction) -> Exec {
    let mnemonic = insn.mnemonic();
    if let Some(operation) = binary_of(mnemonic) {
        return binary(core, insn, operation);
    }
    if let Some(operation) = shift_of(mnemonic) {
        return shifts(core, insn, operation);
    }
    match mnemonic {
        Mnemonic::Inc => unary(core, insn, alu::INC),
        Mnemonic::Dec => unary(core, insn, alu::DEC),
        Mnemonic::Neg => unary(core, insn, alu::NEG),
        Mnemonic::Not => unary(core, insn, alu::NOT),
        Mnemonic::Mov => mov(core, insn),
        Mnemonic::Movnti | Mnemonic::Movzx => {
            let value = read(core, insn, 1)?;
            write(core, insn, 0, value)
        }
        Mnemonic::Movbe => {
            let value = read(core, insn, 1)?.swap_bytes();
            write(core, insn, 0, value >> (64 - bits(insn, 0)))
        }
        Mnemonic::Movsx | Mnemonic::Movsxd => {
            let value = read(core, insn, 1)?;
            let value = by_width!(bits(insn, 1), W => W::of(value).signed());
            write(core, insn, 0, value)
        }
        Mnemonic::Lea => {
            let value = offset(core, insn);
            set(core, insn.op0_register(), value);
            Ok(())
        }
        Mnemonic::Lds => far_pointer(core, insn, Seg::Ds),
        Mnemonic::Les => far_pointer(core, insn, Seg::Es),
        Mnemonic::Lfs => far_pointer(core, insn, Seg::Fs),
        Mnemonic::Lgs => far_pointer(core, insn, Seg::Gs),
        Mnemonic::Lss => far_pointer(core, insn, Seg::Ss),
        Mnemonic::Push => push_operand(core, insn),
        Mnemonic::Pop => pop_operand(core, insn),
        Mnemonic::Pushf => push_flags(core, 16),
        Mnemonic::Pushfd => push_flags(core, 32),
        Mnemonic::Pushfq => push_flags(core, 64),
        Mnemonic::Popf => pop_flags(core, 16),
        Mnemonic::Popfd => pop_flags(core, 32),
        Mnemonic::Popfq => pop_flags(core, 64),
        Mnemonic::Enter => enter(core, insn),
        Mnemonic::Leave => leave(core, insn),
        Mnemonic::Xchg => exchange(core, insn),
        Mnemonic::Xadd => exchange_add(core, insn),
        Mnemonic::Cmpxchg => compare_exchange(core, insn),
        Mnemonic::Cmpxchg8b => compare_exchange_pair(core, insn, 4),
        Mnemonic::Cmpxchg16b => compare_exchange_pair(core, insn, 8),
        Mnemonic::Shld | Mnemonic::Shrd => double_shift(core, insn),
        Mnemonic::Mul => multiply_divide(core, insn, muldiv::MUL),
        Mnemonic::Imul if insn.op_count() > 1 => imul(core, insn),
        Mnemonic::Imul => multiply_divide(core, insn, muldiv::IMUL),
        Mnemonic::Div => multiply_divide(core, insn, muldiv::DIV),
        Mnemonic::Idiv => multiply_divide(core, insn, muldiv::IDIV),
        Mnemonic::Bt => bit_test(core, insn, 0),
        Mnemonic::Bts => bit_test(core, insn, 1),
        Mnemonic::Btr => bit_test(core, insn, 2),
        Mnemonic::Btc => bit_test(core, insn, 3),
        Mnemonic::Bsf | Mnemonic::Bsr => bit_scan(core, insn),
        Mnemonic::Tzcnt | Mnemonic::Lzcnt | Mnemonic::Popcnt => bit_count(core, insn),
        Mnemonic::Crc32 => vector::crc(core, insn),
        Mnemonic::Bswap => swap_bytes(core, insn),
        Mnemonic::Cbw
        | Mnemonic::Cwde
        | Mnemonic::Cdqe
        | Mnemonic::Cwd
        | Mnemonic::Cdq
        | Mnemonic::Cqo => sign(core, mnemonic),
        Mnemonic::Xlatb => translate(core, insn),
        Mnemonic::Lahf => {
            let flags = core.state.flags.bits() as u8 | 2;
            set(core, Register::AH, u64::from(flags));
            Ok(())
        }
        Mnemonic::Sahf => {
            let low = get(core, Register::AH) & 0xd5;
            let kept = core.state.flags.bits() & !0xd5;
            core.state.flags = Flags::from_bits(kept | low);
            Ok(())
        }
        Mnemonic::Clc => carry(core, |_| false),
        Mnemonic::Stc => carry(core, |_| true),
        Mnemonic::Cmc => carry(core, |cf| !cf),
        Mnemonic::Cld => {
            core.state.system_flags &= !DF;
            Ok(())
        }
        Mnemonic::Std => {
            core.state.system_flags |= DF;
            Ok(())
        }
        Mnemonic::Jmp | Mnemonic::Call if far::is_far(insn) => far::transfer(core, insn),
        Mnemonic::Jmp => {
            let target = near_target(core, insn)?;
            jump(core, target)
        }
        Mnemonic::Call => call(core, insn),
        Mnemonic::Ret => near_return(core, insn),
        Mnemonic::Retf => far::far_return(core, insn),
        _ if insn.is_jcc_short_or_near() => {
            let holds = core.state.flags.holds(condition(insn));
            branch_if(core, insn, holds)
        }
        _ if insn.is_loop() || insn.is_loopcc() => count_down(core, insn),
        _ if insn.is_jcx_short() => {
            let count = get(core, count_register(insn.op_code().address_size()));
            branch_if(core, insn, count == 0)
        }
        _ if is_setcc(mnemonic) => {
            let value = core.state.flags.holds(condition(insn));
            write(core, insn, 0, u64::from(value))
        }
        _ if is_cmovcc(mnemonic) => {
            let value = read(core, insn, 1)?;
            let holds = core.state.flags.holds(condition(insn));
            let value = if holds { value } else { read(core, insn, 0)? };
            write(core, insn, 0, value)
        }
        _ if is_hint(mnemonic) => Ok(()),
        // UD0, UD1, UD2.
        _ => core.ud(),
    }
}

/// What two values make, and the flags.
fn calculated(operation: u8, width: u32, values: (u64, u64), carry: bool) -> (u64, Flags) {
    by_width!(width, W => {
        let (value, flags) = alu::compute(operation, W::of(values.0), W::of(values.1), carry);
        (value.wide(), flags)
    })
}

fn binary(core: &mut Core, insn: &Instruction, operation: u8) -> Exec {
    let width = bits(insn, 0);
    let carry = core.state.flags.cf();
    let second = read(core, insn, 1)?;
    let of = |first| calculated(operation, width, (first, second), carry);
    let first = if matches!(operation, alu::CMP | alu::TEST) {
        read(core, insn, 0)?
    } else {
        modify(core, insn, |first| of(first).0)?
    };
    core.state.flags = of(first).1;
    Ok(())
}

fn unary(core: &mut Core, insn: &Instruction, operation: u8) -> Exec {
    let width = bits(insn, 0);
    let old = core.state.flags;
    let of = |first| {
        by_width!(width, W => {
            let (value, flags) = alu::compute_one(operation, W::of(first), old);
            (value.wide(), flags)
        })
    };
    let first = modify(core, insn, |first| of(first).0)?;
    core.state.flags = of(first).1;
    Ok(())
}

fn shifts(core: &mut Core, insn: &Instruction, operation: u8) -> Exec {
    let width = bits(insn, 0);
    let old = core.state.flags;
    let count = read(core, insn, 1)? as u8;
    let of = |first| {
        by_width!(width, W => {
            let (value, flags) = shift::compute(operation, W::of(first), count, old);
            (value.wide(), flags)
        })
    };
    let first = modify(core, insn, |first| of(first).0)?;
    core.state.flags = of(first).1;
    Ok(())
}

fn double_shift(core: &mut Core, insn: &Instruction) -> Exec {
    let width = bits(insn, 0);
    let old = core.state.flags;
    let left = insn.mnemonic() == Mnemonic::Shld;
    let second = read(core, insn, 1)?;
    let count = read(core, insn, 2)? as u8;
    let of = |first| {
        by_width!(width, W => {
            let (value, flags) = shift::double(left, W::of(first), W::of(second), count, old);
            (value.wide(), flags)
        })
    };
    let first = modify(core, insn, |first| of(first).0)?;
    core.state.flags = of(first).1;
    Ok(())
}

fn mov(core: &mut Core, insn: &Instruction) -> Exec {
    let (to, from) = (insn.op0_register(), insn.op1_register());
    if to.is_segment_register() {
        let selector = read(core, insn, 1)? as u16;
        return segment::load(core, seg_of(to), selector);
    }
    if to.is_cr() || to.is_dr() || from.is_cr() || from.is_dr() {
        return system::move_control(core, insn);
    }
    if insn.op1_kind() == OpKind::Register && from.is_segment_register() {
        let selector = core.state.segment(seg_of(from)).selector;
        return write(core, insn, 0, u64::from(selector));
    }
    let value = read(core, insn, 1)?;
    write(core, insn, 0, value)
}

/// LDS and its like: a register and a segment register, of which both or none are loaded.
fn far_pointer(core: &mut Core, insn: &Instruction, seg: Seg) -> Exec {
    let Linear { at, seg: code } = linear(core, insn, false)?;
    let register = insn.op0_register();
    let value = by_width!(register.size() * 8, W => core.load::<W>(at, code).map(W::wide))?;
    let behind = core.beyond(at, register.size() as u32);
    let selector = core.load::<u16>(behind, code)?;
    let loaded = segment::load(core, seg, selector);
    if loaded == Err(Trap::Leave) {
        set(core, register, value);
        // LSS loads both halves of the stack's address: it holds nothing back.
        core.state.shadow = Shadow::None;
    }
    loaded
}

/// Bytes by which a stack instruction moves RSP.
fn stack_width(insn: &Instruction) -> u32 {
    insn.stack_pointer_increment().unsigned_abs() * 8
}

fn push_operand(core: &mut Core, insn: &Instruction) -> Exec {
    let width = stack_width(insn);
    let value = match insn.op0_register() {
        register if register.is_segment_register() => {
            u64::from(core.state.segment(seg_of(register)).selector)
        }
        _ => read(core, insn, 0)?,
    };
    push(core, width, value)
}

fn pop_operand(core: &mut Core, insn: &Instruction) -> Exec {
    let width = stack_width(insn);
    let value = peek(core, 0, width)?;
    let register = insn.op0_register();
    let old = core.state.r[4];
    if register.is_segment_register() {
        drop_stack(core, width / 8);
        let loaded = segment::load(core, seg_of(register), value as u16);
        if matches!(loaded, Err(trap) if trap != Trap::Leave) {
            core.state.r[4] = old;
        }
        return loaded;
    }
    // An address with RSP is made with RSP behind the pop (SDM vol. 2B, "POP").
    drop_stack(core, width / 8);
    let written = write(core, insn, 0, value);
    if written.is_err() {
        core.state.r[4] = old;
    }
    written
}

fn push_flags(core: &mut Core, width: u32) -> Exec {
    let flags = core.state.rflags() & !(RF | VM);
    push(core, width, flags)
}

fn pop_flags(core: &mut Core, width: u32) -> Exec {
    let value = peek(core, 0, width)?;
    drop_stack(core, width / 8);
    let cpl = core.state.cpl();
    let old = core.state.rflags();
    let mut open = STATUS | TF | DF | NT;
    if width > 16 {
        open |= AC | ID;
    }
    if u64::from(cpl) <= (old & IOPL) >> 12 {
        open |= IF;
    }
    if cpl == 0 {
        open |= IOPL;
    }
    let new = (old & !open | value & open) & !RF;
    core.state.set_rflags(new);
    let changed = old ^ new;
    if changed & (TF | AC | RF) == 0 && changed & new & IF == 0 {
        return Ok(());
    }
    core.refresh();
    Err(Trap::Leave)
}

/// ENTER. The frame's words are stored before RSP and RBP move.
fn enter(core: &mut Core, insn: &Instruction) -> Exec {
    let width = match insn.code() {
        iced_x86::Code::Enterw_imm16_imm8 => 16,
        iced_x86::Code::Enterd_imm16_imm8 => 32,
        _ => 64,
    };
    let room = i64::from(insn.immediate16());
    let depth = u32::from(insn.immediate8_2nd() & 31);
    if depth > 1 && !core.alone {
        // What is copied is read behind stores, which may be to it: a page of code that one of the
        // later ones meets must not have all of it done again.
        return Err(Trap::CodeWrite);
    }
    let frame = core.state.r[5];
    below(core, width / 8, width, frame)?;
    let base = stack_at(core, -i64::from(width / 8));
    for level in 1..depth {
        let from = frame.wrapping_sub(u64::from(level * width / 8));
        let from = from & (u64::MAX >> (64 - stack_bits(core)));
        let at = in_segment(core, Seg::Ss, from, u64::from(width / 8), false)?;
        let value = by_width!(width, W => core.load::<W>(at.at, at.seg).map(W::wide))?;
        below(core, (level + 1) * width / 8, width, value)?;
    }
    if depth > 0 {
        below(core, (depth + 1) * width / 8, width, base)?;
    }
    let used = i64::from((depth + 1) * width / 8);
    let top = stack_at(core, -used - room);
    // The last write of the new frame must be possible too.
    let at = in_segment(core, Seg::Ss, top, 1, true)?;
    core.check_write(at.at, 1, at.seg)?;
    by_width!(width, W => core.set_reg(5, W::of(base)));
    set_stack(core, top);
    Ok(())
}

fn leave(core: &mut Core, insn: &Instruction) -> Exec {
    let width = match insn.code() {
        iced_x86::Code::Leavew => 16,
        iced_x86::Code::Leaved => 32,
        _ => 64,
    };
    let frame = core.state.r[5] & (u64::MAX >> (64 - stack_bits(core)));
    let at = in_segment(core, Seg::Ss, frame, u64::from(width / 8), false)?;
    let value = by_width!(width, W => core.load::<W>(at.at, at.seg).map(W::wide))?;
    set_stack(core, frame);
    drop_stack(core, width / 8);
    by_width!(width, W => core.set_reg(5, W::of(value)));
    Ok(())
}

fn exchange(core: &mut Core, insn: &Instruction) -> Exec {
    // The memory operand, if there is one, may be either.
    if insn.op1_kind() == OpKind::Memory {
        let value = get(core, insn.op0_register());
        let Linear { at, seg } = linear(core, insn, true)?;
        let old = by_width!(bits(insn, 1), W => {
            core.modify::<W>(at, seg, |_| W::of(value)).map(W::wide)
        })?;
        set(core, insn.op0_register(), old);
        return Ok(());
    }
    let registers = [insn.op0_register(), insn.op1_register()];
    if core.tells_requests && registers == [Register::RBX; 2] {
        // Nothing is exchanged, and who looks on may be asked for something.
        core.requested = true;
        return Err(Trap::Leave);
    }
    let value = get(core, insn.op1_register());
    let old = modify(core, insn, |_| value)?;
    set(core, insn.op1_register(), old);
    Ok(())
}

fn exchange_add(core: &mut Core, insn: &Instruction) -> Exec {
    let width = bits(insn, 0);
    let second = get(core, insn.op1_register());
    let of = |first| calculated(alu::ADD, width, (first, second), false);
    let first = if insn.op0_kind() == OpKind::Register {
        let first = get(core, insn.op0_register());
        set(core, insn.op1_register(), first);
        set(core, insn.op0_register(), of(first).0);
        first
    } else {
        let first = modify(core, insn, |first| of(first).0)?;
        set(core, insn.op1_register(), first);
        first
    };
    core.state.flags = of(first).1;
    Ok(())
}

/// The destination is written in any case: with its own value if they differ.
fn compare_exchange(core: &mut Core, insn: &Instruction) -> Exec {
    let width = bits(insn, 0);
    let second = get(core, insn.op1_register());
    let mask = u64::MAX >> (64 - width);
    let expected = core.state.r[0] & mask;
    let is_register = insn.op0_kind() == OpKind::Register;
    let first = if is_register {
        get(core, insn.op0_register())
    } else {
        modify(
            core,
            insn,
            |first| {
                if first == expected { second } else { first }
            },
        )?
    };
    core.state.flags = calculated(alu::CMP, width, (expected, first), false).1;
    if first == expected {
        if is_register {
            set(core, insn.op0_register(), second);
        }
    } else {
        by_width!(width, W => core.set_reg(0, W::of(first)));
    }
    Ok(())
}

/// CMPXCHG8B and CMPXCHG16B, by halves of so many bytes.
fn compare_exchange_pair(core: &mut Core, insn: &Instruction, half: u32) -> Exec {
    let Linear { at, seg } = linear(core, insn, true)?;
    if half == 8 && at & 15 != 0 {
        return core.gp(0);
    }
    let width = half * 8;
    let high_at = core.beyond(at, half);
    core.check_write(at, half, seg)?;
    core.check_write(high_at, half, seg)?;
    let mut old = [0; 2];
    for (value, at) in old.iter_mut().zip([at, high_at]) {
        *value = by_width!(width, W => core.load::<W>(at, seg).map(W::wide))?;
    }
    let mask = u64::MAX >> (64 - width);
    let r = core.state.r;
    let equal = old == [r[0] & mask, r[2] & mask];
    let new = if equal { [r[3], r[1]] } else { old };
    for (value, at) in new.into_iter().zip([at, high_at]) {
        by_width!(width, W => core.store(at, seg, W::of(value)))?;
    }
    if !equal {
        by_width!(width, W => core.set_reg(0, W::of(old[0])));
        by_width!(width, W => core.set_reg(2, W::of(old[1])));
    }
    let bits = core.state.flags.bits() & !crate::flags::ZF;
    let zf = if equal { crate::flags::ZF } else { 0 };
    core.state.flags = Flags::from_bits(bits | zf);
    Ok(())
}

fn multiply_divide(core: &mut Core, insn: &Instruction, operation: u8) -> Exec {
    let by = read(core, insn, 0)?;
    by_width!(bits(insn, 0), W => muldiv::wide(core, operation, W::of(by)))
}

fn imul(core: &mut Core, insn: &Instruction) -> Exec {
    let last = insn.op_count() - 1;
    let a = read(core, insn, last - 1)?;
    let b = read(core, insn, last)?;
    let (value, flags) = by_width!(bits(insn, 0), W => {
        let (value, flags) = muldiv::product(W::of(a), W::of(b));
        (value.wide(), flags)
    });
    set(core, insn.op0_register(), value);
    core.state.flags = flags;
    Ok(())
}

/// The bit of a register operand may lie far from the memory operand.
fn bit_test(core: &mut Core, insn: &Instruction, operation: u8) -> Exec {
    let width = bits(insn, 0);
    let second = read(core, insn, 1)?;
    let bit = second as u32 & (width - 1);
    let of = |value| bit::changed(operation, value, bit);
    let value = if insn.op0_kind() == OpKind::Register {
        modify(core, insn, of)?
    } else {
        let mut away = 0;
        if insn.op1_kind() == OpKind::Register {
            let signed = by_width!(width, W => W::of(second).signed()).cast_signed();
            away = (signed >> width.ilog2()).wrapping_mul(i64::from(width / 8));
        }
        let offset = offset(core, insn).wrapping_add(away.cast_unsigned());
        let offset = offset & (u64::MAX >> (64 - address_bits(insn)));
        let seg = memory_seg(core, insn);
        let bytes = u64::from(width / 8);
        let at = in_segment(core, seg, offset, bytes, operation != 0)?;
        by_width!(width, W => {
            if operation == 0 {
                core.load::<W>(at.at, at.seg).map(W::wide)
            } else {
                core.modify::<W>(at.at, at.seg, |old| W::of(of(old.wide()))).map(W::wide)
            }
        })?
    };
    core.state.flags = core.state.flags.with_carry(value >> bit & 1 != 0);
    Ok(())
}

fn bit_scan(core: &mut Core, insn: &Instruction) -> Exec {
    let value = read(core, insn, 1)?;
    let reverse = insn.mnemonic() == Mnemonic::Bsr;
    let (place, flags) = by_width!(bits(insn, 1), W => {
        let (place, flags) = bit::scan(W::of(value), reverse);
        (place.map(W::wide), flags)
    });
    if let Some(place) = place {
        set(core, insn.op0_register(), place);
    }
    core.state.flags = flags;
    Ok(())
}

fn bit_count(core: &mut Core, insn: &Instruction) -> Exec {
    let value = read(core, insn, 1)?;
    let (count, flags) = by_width!(bits(insn, 1), W => {
        let value = W::of(value);
        let (count, flags) = match insn.mnemonic() {
            Mnemonic::Popcnt => bit::population(value),
            mnemonic => bit::zeros(value, mnemonic == Mnemonic::Lzcnt),
        };
        (count.wide(), flags)
    });
    set(core, insn.op0_register(), count);
    core.state.flags = flags;
    Ok(())
}

/// Of 16 bits it is undefined: 0.
fn swap_bytes(core: &mut Core, insn: &Instruction) -> Exec {
    let register = insn.op0_register();
    let value = get(core, register).swap_bytes();
    let value = match register.size() {
        2 => 0,
        4 => value >> 32,
        _ => value,
    };
    set(core, register, value);
    Ok(())
}

fn sign(core: &mut Core, mnemonic: Mnemonic) -> Exec {
    use Register as R;
    let (from, to, high) = match mnemonic {
        Mnemonic::Cbw => (R::AL, R::AX, false),
        Mnemonic::Cwde => (R::AX, R::EAX, false),
        Mnemonic::Cdqe => (R::EAX, R::RAX, false),
        Mnemonic::Cwd => (R::AX, R::DX, true),
        Mnemonic::Cdq => (R::EAX, R::EDX, true),
        _ => (R::RAX, R::RDX, true),
    };
    let value = get(core, from);
    let value = by_width!(from.size() * 8, W => W::of(value).signed());
    let value = if high {
        (value.cast_signed() >> 63).cast_unsigned()
    } else {
        value
    };
    set(core, to, value);
    Ok(())
}

fn translate(core: &mut Core, insn: &Instruction) -> Exec {
    let offset = offset(core, insn);
    let at = in_segment(core, memory_seg(core, insn), offset, 1, false)?;
    let value = core.load::<u8>(at.at, at.seg)?;
    core.set_reg(0, value);
    Ok(())
}

fn carry(core: &mut Core, change: impl FnOnce(bool) -> bool) -> Exec {
    let flags = core.state.flags;
    core.state.flags = flags.with_carry(change(flags.bits() & CF != 0));
    Ok(())
}

/// Bits of a near branch's target.
fn branch_bits(insn: &Instruction) -> u32 {
    match insn.op0_kind() {
        OpKind::NearBranch16 => 16,
        OpKind::NearBranch32 => 32,
        OpKind::NearBranch64 => 64,
        _ => bits(insn, 0),
    }
}

fn near_target(core: &mut Core, insn: &Instruction) -> Exec<u64> {
    match insn.op0_kind() {
        OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
            let mask = u64::MAX >> (64 - branch_bits(insn));
            Ok(insn.near_branch_target() & mask)
        }
        _ => read(core, insn, 0),
    }
}

/// To an address in the same code segment.
fn jump(core: &mut Core, target: u64) -> Exec {
    let outside = if core.state.bits() == 64 {
        !is_canonical(target)
    } else {
        target > u64::from(core.state.segment(Seg::Cs).limit)
    };
    if outside {
        return core.gp(0);
    }
    core.state.rip = target;
    Ok(())
}

fn branch_if(core: &mut Core, insn: &Instruction, taken: bool) -> Exec {
    if taken {
        let target = near_target(core, insn)?;
        jump(core, target)?;
        core.taken();
    }
    Ok(())
}

fn count_register(bits: u32) -> Register {
    match bits {
        16 => Register::CX,
        32 => Register::ECX,
        _ => Register::RCX,
    }
}

/// LOOP, LOOPE, LOOPNE.
fn count_down(core: &mut Core, insn: &Instruction) -> Exec {
    let register = count_register(insn.op_code().address_size());
    let mask = u64::MAX >> (64 - 8 * register.size() as u32);
    let count = get(core, register).wrapping_sub(1) & mask;
    let holds = match insn.mnemonic() {
        Mnemonic::Loope => core.state.flags.zf(),
        Mnemonic::Loopne => !core.state.flags.zf(),
        _ => true,
    };
    branch_if(core, insn, count != 0 && holds)?;
    set(core, register, count);
    debug_assert_eq!(number(register), 1);
    Ok(())
}

fn call(core: &mut Core, insn: &Instruction) -> Exec {
    let target = near_target(core, insn)?;
    let back = core.state.rip;
    let width = stack_width(insn);
    jump(core, target)?;
    let pushed = push(core, width, back);
    if pushed.is_err() {
        core.state.rip = back;
    }
    pushed
}

fn near_return(core: &mut Core, insn: &Instruction) -> Exec {
    let width = match insn.code() {
        iced_x86::Code::Retnw | iced_x86::Code::Retnw_imm16 => 16,
        iced_x86::Code::Retnd | iced_x86::Code::Retnd_imm16 => 32,
        _ => 64,
    };
    let target = peek(core, 0, width)?;
    jump(core, target)?;
    let more = if insn.op_count() > 0 {
        u32::from(insn.immediate16())
    } else {
        0
    };
    drop_stack(core, width / 8 + more);
    Ok(())
}
