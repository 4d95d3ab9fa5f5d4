//! Lanes out of XMM registers and into them, tests, and CRC32.

use iced_x86::Instruction;

use super::lanes::Lane;
use super::{Args, Operand, full, general, set_general, set_xmm, to, xmm};
use crate::flags::{CF, Flags, ZF};
use crate::insn::core::{Core, Exec, Width};
use crate::insn::operand::{bits, read, set};

/// PEXTRB and its like: lane `imm` to a general register or memory.
pub(super) fn extract<L, W, const N: usize>(core: &mut Core, args: &Args) -> Exec
where
    L: Lane<N> + Into<u64>,
    W: Width,
{
    let value = match args.from {
        Operand::Xmm(number) => xmm(core, number),
        _ => [0; 2],
    };
    let lane = L::split(value)[usize::from(args.imm) % N];
    set_general::<W>(core, args, lane.into())
}

/// PINSRB and its like: a general register or memory to lane `imm`.
pub(super) fn insert<L, W, const N: usize>(core: &mut Core, args: &Args) -> Exec
where
    L: Lane<N> + TryFrom<u64>,
    W: Width,
{
    let value = general::<W>(core, args)?;
    let to = to(args);
    let mut lanes = L::split(xmm(core, to));
    if let Ok(value) = L::try_from(value) {
        lanes[usize::from(args.imm) % N] = value;
    }
    set_xmm(core, to, L::join(lanes));
    Ok(())
}

/// INSERTPS: which lane of a register, to where, and which become 0.
pub(super) fn insert_single(core: &mut Core, args: &Args) -> Exec {
    let value = match args.from {
        Operand::Xmm(number) => u32::split(xmm(core, number))[usize::from(args.imm >> 6)],
        _ => general::<u32>(core, args)? as u32,
    };
    let to = to(args);
    let mut lanes = u32::split(xmm(core, to));
    lanes[usize::from(args.imm >> 4 & 3)] = value;
    for (at, lane) in lanes.iter_mut().enumerate() {
        if args.imm >> at & 1 != 0 {
            *lane = 0;
        }
    }
    set_xmm(core, to, u32::join(lanes));
    Ok(())
}

/// PTEST.
pub(super) fn test(core: &mut Core, args: &Args) -> Exec {
    let b = full(core, args)?;
    let a = xmm(core, to(args));
    let none = (a[0] & b[0]) | (a[1] & b[1]) == 0;
    let all = (!a[0] & b[0]) | (!a[1] & b[1]) == 0;
    let flags = if none { ZF } else { 0 } | if all { CF } else { 0 };
    core.state.flags = Flags::from_bits(flags);
    Ok(())
}

/// CRC32 of Castagnoli's polynomial, bits reflected (SDM vol. 2A).
pub(in crate::insn) fn crc(core: &mut Core, insn: &Instruction) -> Exec {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let value = read(core, insn, 1)?;
    let bytes = bits(insn, 1) / 8;
    let mut sum = core.reg::<u32>(super::operand::number(insn.op0_register()));
    for byte in value.to_le_bytes().into_iter().take(bytes as usize) {
        sum ^= u32::from(byte);
        for _ in 0..8 {
            sum = sum >> 1 ^ (POLYNOMIAL & (sum & 1).wrapping_neg());
        }
    }
    set(core, insn.op0_register(), u64::from(sum));
    Ok(())
}
