//! x87: when it may be used, where its operands are, and what it keeps of the last instruction.
//! What instructions do is `emu_fpu::x87`'s.

use emu_fpu::x87::{Access, Done, FXSAVE_LEN, ImageFormat, Insn, X87};
use iced_x86::{Code, Instruction, OpKind, Register};

use super::core::{Core, Exec};
use super::operand::{Linear, by_width, linear, offset, set};
use super::segment::is_real;
use crate::flags::{CF, Flags, PF, STATUS, ZF};
use crate::insn::core::Width;
use crate::state::{CR0_EM, CR0_MP, CR0_TS, Seg};

/// Ticks that functions take besides their own. In software they are the slowest instructions
/// by far: for operands that ask for all of the computation up to 40 us (FPATAN, FYL2X, FYL2XP1),
/// 24 us (FPTAN), 12 us (F2XM1), 10 us (FSINCOS) and 5 us (FSIN, FCOS) were measured, where FSQRT
/// takes 0.2 us. A tick for each 32 ns is what INVLPG and MOV CR3 pay. It is the same for all
/// operands.
fn function_ticks(name: Insn) -> i64 {
    match name.bits() {
        0x1f1 | 0x1f3 | 0x1f9 => 1279,
        0x1f2 => 767,
        0x1f0 => 383,
        0x1fb => 319,
        0x1fe | 0x1ff => 159,
        _ => 0,
    }
}

/// Whether it takes more than one tick: nothing follows it in its block.
pub(crate) fn is_slow(insn: &Instruction) -> bool {
    named(insn).is_some_and(|name| function_ticks(name) != 0)
}

/// Whether an instruction is one of x87, FWAIT excepted.
pub(super) fn is_known(insn: &Instruction) -> bool {
    named(insn)
        .and_then(Insn::access)
        // The assembler's names for FWAIT and an instruction without it; the decoder sees two.
        .is_some_and(|_| !insn.code().op_code().fwait())
}

/// FWAIT (SDM vol. 2, WAIT).
pub(super) fn wait(core: &mut Core) -> Exec {
    const BOTH: u64 = CR0_MP | CR0_TS;
    if core.state.cr0 & BOTH == BOTH {
        return core.raise(7, None);
    }
    pending(core, &current(core))
}

/// To be called when the FPU's image was loaded: ES says what flags and masks say, and reserved
/// bits are as they always are.
pub(super) fn settle(core: &mut Core) {
    let x87 = current(core);
    keep(core, &x87);
}

/// Executes an instruction, of which [`is_known`] is true. What faults has changed nothing: the
/// FPU is taken over last.
pub(super) fn step(core: &mut Core, insn: &Instruction) -> Exec {
    let Some(name) = named(insn) else {
        return core.ud();
    };
    let Some(access) = name.access() else {
        return core.ud();
    };
    if core.state.cr0 & (CR0_EM | CR0_TS) != 0 {
        return core.raise(7, None);
    }
    let x87 = current(core);
    if name.waits() {
        pending(core, &x87)?;
    }
    core.spend(function_ticks(name));
    let mut behind = match access {
        Access::LoadEnvironment | Access::LoadState => load_image(core, insn, &x87)?,
        Access::StoreEnvironment | Access::StoreState => store_image(core, insn, &x87)?,
        _ => execute(core, insn, name, &x87)?,
    };
    if !name.is_control() {
        point(core, insn, name, &mut behind);
    }
    keep(core, &behind);
    Ok(())
}

/// FOP of an instruction: its opcode, and its ModRM byte out of its operands.
fn named(insn: &Instruction) -> Option<Insn> {
    let [_, _, high, low] = insn.code().op_code().op_code().to_be_bytes();
    if insn.code().op_code().op_code_len() == 1 {
        let reg = u8::try_from(insn.code().op_code().group_index()).ok()?;
        return Insn::new(low, reg << 3 | mod_rm(insn));
    }
    // Of two registers one is ST(0).
    let index = (0..insn.op_count())
        .filter(|operand| insn.op_kind(*operand) == OpKind::Register)
        .map(|operand| insn.op_register(operand))
        .filter(|register| register.is_st())
        .map(|register| register.number() as u8)
        .max();
    Insn::new(high, low | index.unwrap_or(0))
}

/// ModRM's mod and r/m fields. A SIB byte that says nothing is told as none.
fn mod_rm(insn: &Instruction) -> u8 {
    let (base, index) = (insn.memory_base(), insn.memory_index());
    if [base, index].iter().any(|register| register.is_gpr16()) {
        let rm = match (base, index) {
            (Register::BX, Register::SI) => 0,
            (Register::BX, Register::DI) => 1,
            (Register::BP, Register::SI) => 2,
            (Register::BP, Register::DI) => 3,
            (Register::SI, _) => 4,
            (Register::DI, _) => 5,
            (Register::BP, _) => 6,
            _ => 7,
        };
        return displaced(insn) | rm;
    }
    match (base, index) {
        (Register::None, Register::None) => match insn.memory_displ_size() {
            2 => 6,
            // In 64-bit code an address alone needs a SIB byte.
            8 => 4,
            _ => 5,
        },
        (Register::RIP | Register::EIP, _) => 5,
        (Register::None, _) => 4,
        (base, Register::None) if base.number() & 7 != 4 => {
            displaced(insn) | (base.number() & 7) as u8
        }
        _ => displaced(insn) | 4,
    }
}

/// ModRM's mod field, by the displacement.
fn displaced(insn: &Instruction) -> u8 {
    match insn.memory_displ_size() {
        0 => 0,
        1 => 0x40,
        _ => 0x80,
    }
}

/// #MF, if an unmasked exception is pending. With CR0.NE clear it is #MF too: nothing is wired
/// to FERR#.
fn pending(core: &mut Core, x87: &X87) -> Exec {
    if x87.is_pending() {
        return core.raise(16, None);
    }
    Ok(())
}

fn current(core: &Core) -> X87 {
    let mut image = [0; FXSAVE_LEN];
    for (to, word) in image.chunks_exact_mut(8).zip(core.state.x87) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    X87::of_fxsave(&image, true)
}

fn keep(core: &mut Core, x87: &X87) {
    let mut image = [0; FXSAVE_LEN];
    x87.to_fxsave(&mut image, true);
    for (word, from) in core.state.x87.iter_mut().zip(image.as_chunks().0) {
        *word = u64::from_le_bytes(*from);
    }
}

/// FIP, FDP and FOP (SDM vol. 1, 8.1.8): offsets, and linear addresses in real mode.
fn point(core: &Core, insn: &Instruction, name: Insn, x87: &mut X87) {
    let base = |seg| {
        if is_real(core) {
            core.state.segment(seg).base
        } else {
            0
        }
    };
    x87.opcode = name.bits();
    x87.ip = base(Seg::Cs).wrapping_add(insn.ip());
    if insn.op_kinds().any(|kind| kind == OpKind::Memory) {
        let seg = super::operand::memory_seg(core, insn);
        x87.dp = base(seg).wrapping_add(offset(core, insn));
    }
}

/// All but what loads or stores an image.
fn execute(core: &mut Core, insn: &Instruction, name: Insn, x87: &X87) -> Exec<X87> {
    let mut operand = [0; 10];
    let to = match name.access() {
        Some(Access::Load(bytes)) => {
            let from = linear(core, insn, false)?;
            load(core, from, &mut operand[..usize::from(bytes)], 8)?;
            None
        }
        Some(Access::Store(bytes)) => {
            let to = linear(core, insn, true)?;
            Some((to, usize::from(bytes)))
        }
        _ => None,
    };
    let rflags = core.state.flags.bits();
    let done = x87.execute(name, operand, rflags);
    match (to, done.store) {
        (Some((to, bytes)), Some(result)) => store(core, to, &result[..bytes], 8)?,
        // What stores nothing, for its exception is unmasked, faults as if it did.
        (Some((to, bytes)), None) => check(core, to, bytes, 8)?,
        (None, _) => {}
    }
    finish(core, &done);
    Ok(done.x87)
}

/// What an instruction writes to general registers.
fn finish(core: &mut Core, done: &Done) {
    if let Some(ax) = done.ax {
        set(core, Register::AX, u64::from(ax));
    }
    if let Some(flags) = done.rflags {
        let kept = core.state.flags.bits() & !STATUS;
        core.state.flags = Flags::from_bits(kept | flags & (ZF | PF | CF));
    }
}

/// The layout of FNSTENV's image, and whether the registers follow.
fn layout(core: &Core, insn: &Instruction) -> (ImageFormat, bool) {
    use Code as C;
    let small = matches!(
        insn.code(),
        C::Fldenv_m14byte | C::Fnstenv_m14byte | C::Frstor_m94byte | C::Fnsave_m94byte
    );
    let format = match (is_real(core), small) {
        (false, false) => ImageFormat::Protected32,
        (false, true) => ImageFormat::Protected16,
        (true, false) => ImageFormat::Real32,
        (true, true) => ImageFormat::Real16,
    };
    let registers = matches!(
        insn.code(),
        C::Frstor_m94byte | C::Frstor_m108byte | C::Fnsave_m94byte | C::Fnsave_m108byte
    );
    (format, registers)
}

/// Bytes of a part of the environment, of which it is aligned to a multiple.
fn part(format: ImageFormat) -> usize {
    if format.environment_len() == 28 { 4 } else { 2 }
}

fn load_image(core: &mut Core, insn: &Instruction, x87: &X87) -> Exec<X87> {
    let (format, registers) = layout(core, insn);
    let from = linear(core, insn, false)?;
    if !registers {
        let mut image = [0; 28];
        let image = &mut image[..format.environment_len()];
        load(core, from, image, part(format))?;
        return Ok(x87.load_environment(format, image));
    }
    let mut image = [0; 108];
    let image = &mut image[..format.state_len()];
    load(core, from, image, part(format))?;
    Ok(x87.load_state(format, image))
}

fn store_image(core: &mut Core, insn: &Instruction, x87: &X87) -> Exec<X87> {
    let (format, registers) = layout(core, insn);
    let to = linear(core, insn, true)?;
    let (image, behind) = if registers {
        x87.store_state(format)
    } else {
        x87.store_environment(format)
    };
    store(core, to, &image, part(format))?;
    Ok(behind)
}

/// The places and sizes of an operand's parts, none larger than `most`.
fn parts(bytes: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let left = bytes - at;
        let size = most.min(1 << left.checked_ilog2()?);
        at += size;
        Some((at - size, size))
    })
}

fn load(core: &mut Core, from: Linear, bytes: &mut [u8], most: usize) -> Exec {
    for (at, size) in parts(bytes.len(), most) {
        let address = core.beyond(from.at, at as u32);
        let value = by_width!(size * 8, W => core.load::<W>(address, from.seg).map(W::wide))?;
        bytes[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
    }
    Ok(())
}

/// All of it can be written.
fn check(core: &mut Core, to: Linear, bytes: usize, most: usize) -> Exec {
    for (at, size) in parts(bytes, most) {
        core.check_write(core.beyond(to.at, at as u32), size as u32, to.seg)?;
    }
    Ok(())
}

/// Stores bytes, all of which can be written before the first is.
fn store(core: &mut Core, to: Linear, bytes: &[u8], most: usize) -> Exec {
    if bytes.len() > most {
        check(core, to, bytes.len(), most)?;
    }
    for (at, size) in parts(bytes.len(), most) {
        let mut word = [0; 8];
        word[..size].copy_from_slice(&bytes[at..at + size]);
        let address = core.beyond(to.at, at as u32);
        let value = u64::from_le_bytes(word);
        by_width!(size * 8, W => core.store(address, to.seg, W::of(value)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    /// Every ModRM and SIB byte, in code of each size: FOP is the instruction's own bytes.
    #[test]
    fn fop_is_the_instructions_bytes() {
        let mut checked = 0;
        for bits in [16, 32, 64] {
            for escape in 0xd8..=0xdf_u8 {
                for modrm in 0..=255_u8 {
                    for sib in 0..=255_u8 {
                        let bytes = [escape, modrm, sib, 1, 2, 3, 4, 5];
                        let insn = Decoder::new(bits, &bytes, DecoderOptions::NONE).decode();
                        if insn.is_invalid() {
                            continue;
                        }
                        let has_sib = bits != 16 && modrm < 0xc0 && modrm & 7 == 4;
                        // No index, and a base that needs no SIB byte; or none in 32-bit code.
                        let redundant = has_sib
                            && sib & 0x38 == 0x20
                            && sib & 7 != 4
                            && (bits == 32 || modrm >= 0x40 || sib & 7 != 5);
                        if redundant {
                            continue;
                        }
                        let own = u16::from(escape & 7) << 8 | u16::from(modrm);
                        assert_eq!(named(&insn).map(Insn::bits), Some(own), "{bytes:x?} {bits}");
                        checked += 1;
                        if !has_sib {
                            break;
                        }
                    }
                }
            }
        }
        assert!(checked > 50_000);
    }

    #[test]
    fn parts_are_whole() {
        let all = |bytes, most| parts(bytes, most).collect::<Vec<_>>();
        assert_eq!(all(10, 8), [(0, 8), (8, 2)]);
        assert_eq!(all(2, 8), [(0, 2)]);
        assert_eq!(all(14, 2).len(), 7);
        assert_eq!(all(94, 2).len(), 47);
        assert_eq!(all(108, 4).len(), 27);
        assert_eq!(all(0, 8), []);
    }
}
