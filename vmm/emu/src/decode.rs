//! From bytes to operations.
#![allow(
    clippy::cast_possible_truncation,
    reason = "numbers of registers and lengths of instructions fit in a byte"
)]

use iced_x86::{
    Code, CpuidFeature, Decoder, DecoderError, DecoderOptions, FlowControl, Instruction,
    InstructionInfoFactory, Mnemonic, OpKind, Register,
};

use crate::block::{Blocks, Decoded, Flow};
use crate::cpuid::Cpuid;
use crate::events;
use crate::insn::Op;
use crate::insn::{K, Pick, extend as extended, form, is_hint, is_slow, kinds, moved, row, vector};
use crate::state::{BLOCK, FS_BASE, GS_BASE, STACK, ZERO};

/// Instructions of a block at most.
const MOST: usize = 64;

/// In place of the number of a kept instruction.
const NONE: u64 = u64::MAX;

/// Bytes of an instruction at most. The decoder stops there.
const MOST_BYTES: usize = 15;

/// Where a block is decoded from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) rip: u64,
    pub(crate) bits: u32,
}

/// Why not even one instruction was decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Short {
    /// It goes on on the next page.
    NextPage,
}

/// Decodes a block; instructions that operations name are put into `kept`.
pub(crate) fn block(
    source: Source<'_>,
    cpuid: &Cpuid,
    blocks: &mut Blocks,
    kept: &mut Vec<Instruction>,
    factory: &mut InstructionInfoFactory,
) -> Result<Decoded, Short> {
    let Source { bytes, rip, bits } = source;
    let mut decoder = Decoder::with_ip(bits, bytes, rip, options(cpuid));
    let mut decoded = Decoded::default();
    let mut at = 0;
    while decoded.ops.len() < MOST {
        let insn = decoder.decode();
        if decoder.last_error() == DecoderError::NoMoreBytes {
            if decoded.ops.is_empty() {
                return Err(Short::NextPage);
            }
            break;
        }
        let next = decoder.position();
        let insn = plain_exchange(insn, &bytes[at..next], source);
        let insn = plain_control(insn, &bytes[at..next], bits, cpuid);
        let mut op = operation(&insn, source, cpuid, kept);
        op.len = (next - at) as u8;
        op.events = blocks.number(events::vector(&insn, factory));
        decoded.ops.push(op);
        decoded.len = next as u32;
        decoded.flow = flow(&insn);
        at = next;
        if matches!(op.k, K::Ud | K::TooLong | K::Absent) || ends(&insn) {
            break;
        }
        if at == bytes.len() {
            break;
        }
    }
    Ok(decoded)
}

/// F3 90 with REX.B is XCHG of RAX and R8, and no PAUSE.
fn plain_exchange(insn: Instruction, bytes: &[u8], source: Source<'_>) -> Instruction {
    let rex = bytes.len().checked_sub(2).map_or(0, |at| bytes[at]);
    if insn.code() != Code::Pause || source.bits != 64 || rex & 0xf1 != 0x41 {
        return insn;
    }
    Decoder::with_ip(64, bytes, insn.ip(), DecoderOptions::NO_PAUSE).decode()
}

/// LOCK MOV CR0 is MOV CR8 where AMD's processors announce it (APM vol. 3, "MOV CRn"); elsewhere the
/// prefix is refused. With REX.R it is CR8 for all.
fn plain_control(insn: Instruction, bytes: &[u8], bits: u32, cpuid: &Cpuid) -> Instruction {
    let registers = [insn.op0_register(), insn.op1_register()];
    if !registers.contains(&Register::CR8) || cpuid.has_locked_cr8() {
        return insn;
    }
    let options = options(cpuid) & !DecoderOptions::AMD;
    Decoder::with_ip(bits, bytes, insn.ip(), options).decode()
}

/// Without their features LZCNT, TZCNT and WBNOINVD are BSR, BSF and WBINVD with a prefix that
/// means nothing.
fn options(cpuid: &Cpuid) -> u32 {
    // Near branches with an operand size of 16 bits differ.
    let mut options = if cpuid.is_amd() {
        DecoderOptions::AMD
    } else {
        DecoderOptions::NONE
    };
    if !cpuid.has(CpuidFeature::LZCNT) {
        options |= DecoderOptions::NO_MPFX_0FBD;
    }
    if !cpuid.has(CpuidFeature::WBNOINVD) {
        options |= DecoderOptions::NO_WBNOINVD;
    }
    if !cpuid.has(CpuidFeature::BMI1) {
        options |= DecoderOptions::NO_MPFX_0FBC;
    }
    options
}

/// Whether what comes behind an instruction has to be looked for anew: it branches, changes
/// translation, mode or interrupts, asks the caller, or takes more time than others.
fn ends(insn: &Instruction) -> bool {
    use Mnemonic as M;
    let registers = [insn.op0_register(), insn.op1_register()];
    let control = registers.iter().any(|one| one.is_cr() || one.is_dr());
    let loads_segment = matches!(insn.mnemonic(), M::Mov | M::Pop)
        && registers[0].is_segment_register()
        && insn.op0_kind() == OpKind::Register
        || matches!(insn.mnemonic(), M::Lss | M::Lfs | M::Lgs | M::Lds | M::Les);
    insn.flow_control() != FlowControl::Next
        || control
        || loads_segment
        || insn.is_string_instruction()
        || is_request(insn)
        || is_slow(insn)
        || matches!(
            insn.mnemonic(),
            M::Sti
                | M::Popf
                | M::Popfd
                | M::Popfq
                | M::In
                | M::Out
                | M::Rdmsr
                | M::Wrmsr
                | M::Rdpmc
                | M::Rdtsc
                | M::Rdtscp
                | M::Pause
                | M::Hlt
                | M::Invlpg
                | M::Clts
                | M::Lmsw
                | M::Ltr
                | M::Lldt
                | M::Syscall
                | M::Sysret
                | M::Sysretq
                | M::Sysenter
                | M::Sysexit
                | M::Sysexitq
        )
}

fn flow(insn: &Instruction) -> Flow {
    match insn.flow_control() {
        FlowControl::Call | FlowControl::IndirectCall => Flow::Call,
        FlowControl::Return => Flow::Return,
        _ => Flow::Other,
    }
}

/// By which programs ask Valgrind for something, if the right ones stand before it.
fn is_request(insn: &Instruction) -> bool {
    insn.code() == Code::Xchg_rm64_r64
        && insn.op0_register() == Register::RBX
        && insn.op1_register() == Register::RBX
}

fn empty(k: K) -> Op {
    Op {
        k,
        events: 0,
        dst: 0,
        src: 0,
        base: ZERO,
        index: ZERO,
        scale: 0,
        seg: ZERO,
        len: 0,
        room: 0,
        disp: 0,
        imm: 0,
    }
}

fn operation(
    insn: &Instruction,
    source: Source<'_>,
    cpuid: &Cpuid,
    kept: &mut Vec<Instruction>,
) -> Op {
    if insn.is_invalid() && insn.len() == MOST_BYTES {
        return empty(K::TooLong);
    }
    if insn.is_invalid() {
        let mut op = empty(K::Ud);
        op.imm = NONE;
        return op;
    }
    if !is_announced(insn, cpuid) {
        return keep(insn, K::Ud, kept);
    }
    if source.bits == 64
        && let Some(op) = fast(insn, source.rip)
    {
        return op;
    }
    keep(insn, row(insn).unwrap_or(K::Absent), kept)
}

/// An operation that needs the decoder's instruction.
fn keep(insn: &Instruction, k: K, kept: &mut Vec<Instruction>) -> Op {
    let mut op = empty(k);
    op.imm = kept.len() as u64;
    kept.push(*insn);
    op
}

/// Whether every feature that an instruction needs is announced.
fn is_announced(insn: &Instruction, cpuid: &Cpuid) -> bool {
    // Without shadow stacks only RDSSP is a hint that does nothing.
    let shadow_stacks = insn.cpuid_features().contains(&CpuidFeature::CET_SS);
    // MMX has instructions of SSE's date, and the x87 one of SSE3's.
    let mmx = (0..insn.op_count()).any(|operand| insn.op_register(operand).is_mm());
    let x87 = insn.mnemonic() == Mnemonic::Fisttp;
    (!shadow_stacks || is_hint(insn.mnemonic()))
        && (!mmx || cpuid.has(CpuidFeature::MMX))
        && (!x87 || cpuid.has(CpuidFeature::FPU))
        && insn
            .cpuid_features()
            .iter()
            .all(|feature| cpuid.has(*feature))
}

fn is_plain(register: Register) -> bool {
    register.is_gpr()
        && !matches!(
            register,
            Register::AH | Register::CH | Register::DH | Register::BH
        )
}

fn number(register: Register) -> u8 {
    register.full_register().number() as u8
}

/// The memory operand, if a fast operation can address it.
fn memory(op: &mut Op, insn: &Instruction, block: u64) -> Option<()> {
    let (base, index) = (insn.memory_base(), insn.memory_index());
    let wide = |register: Register| register == Register::None || register.is_gpr64();
    if insn.is_ip_rel_memory_operand() {
        if base != Register::RIP {
            return None;
        }
        op.base = BLOCK;
        let away = insn.memory_displacement64().wrapping_sub(block);
        op.disp = i32::try_from(away.cast_signed()).ok()?;
    } else {
        if !wide(base) || !wide(index) {
            return None;
        }
        if base == Register::None && index == Register::None && insn.memory_displ_size() != 8 {
            return None;
        }
        if base != Register::None {
            op.base = number(base);
        }
        if index != Register::None {
            op.index = number(index);
            op.scale = insn.memory_index_scale().trailing_zeros() as u8;
        }
        let displacement = insn.memory_displacement64().cast_signed();
        op.disp = i32::try_from(displacement).ok()?;
    }
    op.seg = match insn.memory_segment() {
        Register::FS => FS_BASE,
        Register::GS => GS_BASE,
        // Other prefixes mean nothing in 64-bit code: the base decides.
        _ if matches!(base, Register::RSP | Register::RBP) => STACK,
        _ => ZERO,
    };
    Some(())
}

/// Forms of an operation with operands 0 and 1.
fn two(op: &mut Op, insn: &Instruction, block: u64) -> Option<u8> {
    let plain = |operand: u32| {
        let register = insn.op_register(operand);
        is_plain(register).then(|| number(register))
    };
    let kinds = (insn.op_kind(0), insn.op_kind(1));
    match kinds {
        (OpKind::Register, OpKind::Register) => {
            op.dst = plain(0)?;
            op.base = op.dst;
            op.src = plain(1)?;
            Some(form::RR)
        }
        (OpKind::Register, OpKind::Memory) => {
            op.dst = plain(0)?;
            memory(op, insn, block)?;
            Some(form::RM)
        }
        (OpKind::Memory, OpKind::Register) => {
            op.src = plain(1)?;
            memory(op, insn, block)?;
            Some(form::MR)
        }
        (OpKind::Register, _) => {
            op.dst = plain(0)?;
            op.base = op.dst;
            op.imm = insn.try_immediate(1).ok()?;
            Some(form::RI)
        }
        (OpKind::Memory, _) => {
            op.imm = insn.try_immediate(1).ok()?;
            memory(op, insn, block)?;
            Some(form::MI)
        }
        _ => None,
    }
}

/// Operand 0 alone, as source and destination.
fn single(op: &mut Op, insn: &Instruction, block: u64, memory_form: u8) -> Option<u8> {
    match insn.op0_kind() {
        OpKind::Register if is_plain(insn.op0_register()) => {
            op.dst = number(insn.op0_register());
            op.src = op.dst;
            op.base = op.dst;
            Some(form::RR)
        }
        OpKind::Memory => {
            memory(op, insn, block)?;
            Some(memory_form)
        }
        _ => None,
    }
}

/// Bytes of operand 0, as a place in a table of widths.
fn width(insn: &Instruction, operand: u32) -> Option<usize> {
    let bytes = match insn.op_kind(operand) {
        OpKind::Register => insn.op_register(operand).size(),
        _ => insn.memory_size().size(),
    };
    match bytes {
        1 => Some(0),
        2 => Some(1),
        4 => Some(2),
        8 => Some(3),
        _ => None,
    }
}

/// A common instruction of 64-bit code as an operation of its own.
fn fast(insn: &Instruction, block: u64) -> Option<Op> {
    let mut op = empty(K::Nop);
    let mnemonic = insn.mnemonic();
    let k = if is_hint(mnemonic) {
        K::Nop
    } else if insn.is_jcc_short_or_near() {
        relative(&mut op, insn)?;
        Pick::Jcc().conditions()?[condition(insn)]
    } else if let Some(what) = vector::of(insn) {
        vectors(&mut op, insn, block, what)?
    } else if let Some(k) = by_mnemonic(&mut op, insn, block)? {
        k
    } else if kinds::is_setcc(mnemonic) {
        let form = single(&mut op, insn, block, form::MR)?;
        Pick::Set(form).conditions()?[condition(insn)]
    } else if kinds::is_cmovcc(mnemonic) {
        let form = two(&mut op, insn, block)?;
        let pick = match width(insn, 0)? {
            1 => Pick::Cmov16(form),
            2 => Pick::Cmov32(form),
            _ => Pick::Cmov64(form),
        };
        pick.conditions()?[condition(insn)]
    } else {
        families(&mut op, insn, block)?
    };
    op.k = k;
    Some(op)
}

/// One of XMM registers.
fn vectors(op: &mut Op, insn: &Instruction, block: u64, what: vector::V) -> Option<K> {
    if what == vector::V::Maskmovdqu {
        return None;
    }
    vector::fill(op, insn, what);
    let at = (0..2).find(|operand| insn.op_kind(*operand) == OpKind::Memory);
    if at.is_some() {
        memory(op, insn, block)?;
    }
    Some(moved(insn, what, at).unwrap_or(K::Vector))
}

fn condition(insn: &Instruction) -> usize {
    (insn.condition_code() as usize).wrapping_sub(1) & 15
}

/// A branch relative to RIP.
fn relative(op: &mut Op, insn: &Instruction) -> Option<()> {
    if insn.op0_kind() != OpKind::NearBranch64 {
        return None;
    }
    op.imm = insn.near_branch64().wrapping_sub(insn.next_ip());
    Some(())
}

/// Families that the table has by width.
fn families(op: &mut Op, insn: &Instruction, block: u64) -> Option<K> {
    let mnemonic = insn.mnemonic();
    let pick = if let Some(operation) = kinds::binary_of(mnemonic) {
        Pick::Alu(operation, two(op, insn, block)?)
    } else if let Some(operation) = kinds::shift_of(mnemonic) {
        if insn.op0_kind() != OpKind::Register || !is_plain(insn.op0_register()) {
            return None;
        }
        op.dst = number(insn.op0_register());
        let by_register = insn.op1_kind() == OpKind::Register;
        if !by_register {
            op.base = op.dst;
            let mask = if width(insn, 0)? == 3 { 63 } else { 31 };
            op.imm = insn.try_immediate(1).ok()? & mask;
            if op.imm == 0 {
                // It changes nothing, and nobody writes it.
                return None;
            }
        }
        Pick::Shift(operation, if by_register { form::RR } else { form::RI })
    } else if let Some(operation) = kinds::unary_of(mnemonic) {
        Pick::Unary(operation, single(op, insn, block, form::MR)?)
    } else {
        match mnemonic {
            Mnemonic::Imul if insn.op_count() == 3 => {
                op.imm = insn.try_immediate(2).ok()?;
                Pick::ImulImm(two(op, insn, block)?)
            }
            Mnemonic::Imul if insn.op_count() == 2 => Pick::Imul(two(op, insn, block)?),
            // A row of its own would make all others slower.
            Mnemonic::Xchg if is_request(insn) => return None,
            Mnemonic::Xchg => Pick::Xchg(two(op, insn, block)?),
            Mnemonic::Bt => {
                let form = two(op, insn, block)?;
                if form == form::MR || form == form::MI {
                    return None;
                }
                Pick::Bt(form)
            }
            _ => {
                let operation = kinds::multiply_of(mnemonic)?;
                Pick::MulDiv(operation, single(op, insn, block, form::RM)?)
            }
        }
    };
    Some(pick.widths()?[width(insn, 0)?])
}

/// Those with a row of their own; `None` within if it is none of them, `None` if it is one that
/// has to go the slow way.
fn by_mnemonic(op: &mut Op, insn: &Instruction, block: u64) -> Option<Option<K>> {
    use Mnemonic as M;
    let k = match insn.mnemonic() {
        M::Mov => {
            let form = two(op, insn, block)?;
            let control = [insn.op0_register(), insn.op1_register()];
            if control.iter().any(|one| one.is_cr() || one.is_dr()) {
                return None;
            }
            Pick::Mov(form).widths()?[width(insn, 0)?]
        }
        M::Movzx | M::Movsx | M::Movsxd => extend(op, insn, block)?,
        M::Lea => {
            op.dst = number(insn.op0_register());
            memory(op, insn, block)?;
            // The segment is no part of it.
            op.seg = ZERO;
            match insn.op0_register().size() {
                8 => K::Lea64,
                4 => K::Lea32,
                _ => return None,
            }
        }
        M::Push if insn.stack_pointer_increment() == -8 => push(op, insn, block)?,
        M::Pop if insn.op0_register().is_gpr64() => {
            op.dst = number(insn.op0_register());
            K::PopR
        }
        M::Leave if insn.code() == Code::Leaveq => K::Leave,
        M::Jmp | M::Call => near(op, insn, block)?,
        M::Ret if matches!(insn.code(), Code::Retnq | Code::Retnq_imm16) => {
            if insn.op_count() > 0 {
                op.imm = u64::from(insn.immediate16());
            }
            K::Ret
        }
        M::Cwde => K::Cwde,
        M::Cdqe => K::Cdqe,
        M::Cdq => K::Cdq,
        M::Cqo => K::Cqo,
        M::Bswap => {
            op.dst = number(insn.op0_register());
            match insn.op0_register().size() {
                8 => K::Bswap64,
                4 => K::Bswap32,
                _ => return None,
            }
        }
        M::Push | M::Pop | M::Leave | M::Ret => return None,
        _ => return Some(None),
    };
    Some(Some(k))
}

fn extend(op: &mut Op, insn: &Instruction, block: u64) -> Option<K> {
    let memory = two(op, insn, block)? == form::RM;
    let signed = insn.mnemonic() != Mnemonic::Movzx;
    let from = width(insn, 1)?;
    extended(from, width(insn, 0)?, memory, signed)
}

fn push(op: &mut Op, insn: &Instruction, block: u64) -> Option<K> {
    match insn.op0_kind() {
        OpKind::Register if insn.op0_register().is_gpr64() => {
            op.src = number(insn.op0_register());
            Some(K::PushR)
        }
        OpKind::Register => None,
        OpKind::Memory => {
            memory(op, insn, block)?;
            Some(K::PushM)
        }
        _ => {
            op.imm = insn.try_immediate(0).ok()?;
            Some(K::PushI)
        }
    }
}

fn near(op: &mut Op, insn: &Instruction, block: u64) -> Option<K> {
    let is_call = insn.mnemonic() == Mnemonic::Call;
    let pick = |call, jump| if is_call { call } else { jump };
    match insn.op0_kind() {
        OpKind::NearBranch64 => {
            relative(op, insn)?;
            Some(pick(K::CallRel, K::JmpRel))
        }
        OpKind::Register if insn.op0_register().is_gpr64() => {
            op.src = number(insn.op0_register());
            Some(pick(K::CallR, K::JmpR))
        }
        OpKind::Memory if insn.memory_size().size() == 8 => {
            memory(op, insn, block)?;
            Some(pick(K::CallM, K::JmpM))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quick::quick;

    /// Operations that no encoding leads to.
    const NONE_LEADS_TO: &[(K, &str)] = &[
        (K::Absent, "what is announced is there"),
        (K::TooLong, "its 15 bytes are prefixes: `system` has one"),
    ];

    #[test]
    fn each_row_of_the_table_is_some_instruction() {
        let cpuid = Cpuid::implemented();
        let mut met = vec![false; K::ALL.len()];
        let mut ops = Vec::new();
        let mut look = |bytes: &[u8]| {
            for bits in [32, 64] {
                let source = Source {
                    bytes,
                    rip: 0x1000,
                    bits,
                };
                let insn = Decoder::with_ip(bits, bytes, 0x1000, options(&cpuid)).decode();
                let op = operation(&insn, source, &cpuid, &mut Vec::new());
                if !std::mem::replace(&mut met[op.k as usize], true) {
                    ops.push(op);
                }
            }
        };
        let maps: [&[u8]; 4] = [&[], &[0x0f], &[0x0f, 0x38], &[0x0f, 0x3a]];
        for prefix in [&[][..], &[0x66], &[0xf2], &[0xf3]] {
            for rex in [&[][..], &[0x48]] {
                for map in maps {
                    for opcode in 0..=255 {
                        for form in (0..64).step_by(8).flat_map(|reg| [0xc1 | reg, 0x01 | reg]) {
                            let rest = [opcode, form, 1, 2, 3, 4, 5, 6, 7, 8];
                            look(&[prefix, rex, map, &rest].concat());
                        }
                    }
                }
            }
        }
        // What blocks have that run as a whole.
        let pairs = ops.iter().flat_map(|a| ops.iter().map(move |b| [*a, *b]));
        for op in pairs.flat_map(|pair| quick(&pair)).flatten() {
            met[op.k as usize] = true;
        }
        let missing: Vec<K> = K::ALL
            .iter()
            .filter(|k| !met[**k as usize])
            .filter(|k| !NONE_LEADS_TO.iter().any(|(one, _)| one == *k))
            .copied()
            .collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
