//! MXCSR, and FXSAVE's image of x87 and SSE (SDM vol. 1, 10.5).

use iced_x86::{Instruction, Mnemonic};

use super::core::{Core, Exec};
use super::operand::{Linear, linear, read, write};
use super::vector::ready;
use super::x87;
use crate::state::{CR0_EM, CR0_TS, CR4_OSFXSR};

/// Bits that MXCSR has; the image says so.
const MXCSR_MASK: u32 = 0xffff;

/// Bytes of the image.
const BYTES: u32 = 512;

/// Places in the image, by 16 bytes: of x87's registers, XMM0, and the end.
const ST: usize = 2;
const XMM: usize = 10;
const END: usize = 26;

pub(super) fn is_known(mnemonic: Mnemonic) -> bool {
    matches!(
        mnemonic,
        Mnemonic::Fxsave
            | Mnemonic::Fxsave64
            | Mnemonic::Fxrstor
            | Mnemonic::Fxrstor64
            | Mnemonic::Ldmxcsr
            | Mnemonic::Stmxcsr
    )
}

/// Executes an instruction, of which [`is_known`] is true.
pub(super) fn step(core: &mut Core, insn: &Instruction) -> Exec {
    match insn.mnemonic() {
        Mnemonic::Stmxcsr => {
            ready(core)?;
            write(core, insn, 0, u64::from(core.state.mxcsr))
        }
        Mnemonic::Ldmxcsr => {
            ready(core)?;
            let value = read(core, insn, 0)? as u32;
            set_mxcsr(core, value)
        }
        Mnemonic::Fxsave | Mnemonic::Fxsave64 => save(core, insn),
        _ => restore(core, insn),
    }
}

fn set_mxcsr(core: &mut Core, value: u32) -> Exec {
    if value & !MXCSR_MASK != 0 {
        return core.gp(0);
    }
    core.state.mxcsr = value;
    Ok(())
}

/// Where the image is.
fn place(core: &mut Core, insn: &Instruction, write: bool) -> Exec<Linear> {
    if core.state.cr0 & (CR0_EM | CR0_TS) != 0 {
        return core.raise(7, None);
    }
    let at = linear(core, insn, write)?;
    if at.at & 15 != 0 {
        return core.gp(0);
    }
    Ok(at)
}

/// Where its last part that is used ends. SSE is left out where the system does not know it,
/// XMM8 to XMM15 outside of 64-bit code.
fn end(core: &Core) -> usize {
    match (core.state.cr4 & CR4_OSFXSR != 0, core.state.bits()) {
        (false, _) => XMM,
        (true, 64) => END,
        (true, _) => XMM + 8,
    }
}

fn is_wide(insn: &Instruction) -> bool {
    matches!(insn.mnemonic(), Mnemonic::Fxsave64 | Mnemonic::Fxrstor64)
}

/// A pointer of x87 as the image has it: with 64 bits, or with 32 and no selector, as processors
/// do that have dropped it (SDM vol. 1, 8.1.8).
fn pointer(value: u64, wide: bool) -> u64 {
    if wide { value } else { value & 0xffff_ffff }
}

fn save(core: &mut Core, insn: &Instruction) -> Exec {
    let Linear { at, seg } = place(core, insn, true)?;
    let end = end(core);
    // All 512 bytes can be written, on two pages at most, also those that stay as they are.
    core.check_write(at, 8, seg)?;
    let last = core.beyond(at, BYTES - 1);
    core.check_write(last, 1, seg)?;
    let x87 = core.state.x87;
    let wide = is_wide(insn);
    let mxcsr = u64::from(core.state.mxcsr) | u64::from(MXCSR_MASK) << 32;
    for part in 0..end {
        let value = match part {
            0 => [x87[0], pointer(x87[1], wide)],
            1 => [pointer(x87[2], wide), mxcsr],
            ST..XMM => [x87[2 * part], x87[2 * part + 1]],
            _ => core.state.xmm[part - XMM],
        };
        core.store_pair(core.beyond(at, 16 * part as u32), seg, value)?;
    }
    Ok(())
}

fn restore(core: &mut Core, insn: &Instruction) -> Exec {
    let Linear { at, seg } = place(core, insn, false)?;
    let end = end(core);
    // All of it can be read before a device is asked; the end is not loaded.
    core.check_read(at, seg)?;
    let last = core.beyond(at, BYTES - 1);
    core.check_read(last, seg)?;
    let mut parts = [[0; 2]; END];
    for (part, value) in (0..).zip(&mut parts[..end]) {
        *value = core.load_pair(core.beyond(at, 16 * part), seg)?;
    }
    if end > XMM {
        set_mxcsr(core, parts[1][1] as u32)?;
        core.state.xmm[..end - XMM].copy_from_slice(&parts[XMM..end]);
    }
    let wide = is_wide(insn);
    let x87 = &mut core.state.x87;
    // FCW, FSW, the tags in short, FOP.
    x87[0] = parts[0][0] & 0x07ff_00ff_ffff_ffff;
    x87[1] = pointer(parts[0][1], wide);
    x87[2] = pointer(parts[1][0], wide);
    for part in ST..XMM {
        x87[2 * part] = parts[part][0];
        x87[2 * part + 1] = parts[part][1] & 0xffff;
    }
    x87::settle(core);
    Ok(())
}
