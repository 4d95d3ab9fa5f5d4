//! Moves, and the stack.

use super::core::{Core, Exec, Width};
use super::op::Op;
use super::operand::{MR, RI, RM, RR};
use crate::state::{RSP, STACK};

pub(super) fn mov<W: Width, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    match F {
        RR => core.set_reg(op.dst, core.reg::<W>(op.src)),
        RI => core.set_reg(op.dst, W::of(op.imm)),
        RM => {
            let value = core.load::<W>(core.address(op), op.seg)?;
            core.set_reg(op.dst, value);
        }
        MR => return core.store(core.address(op), op.seg, core.reg::<W>(op.src)),
        _ => return core.store(core.address(op), op.seg, W::of(op.imm)),
    }
    Ok(())
}

/// MOVZX, MOVSX, MOVSXD.
pub(super) fn extend<N: Width, W: Width, const F: u8, const SIGNED: bool>(
    core: &mut Core,
    op: &Op,
) -> Exec {
    let value = if F == RR {
        core.reg::<N>(op.src)
    } else {
        core.load::<N>(core.address(op), op.seg)?
    };
    let value = if SIGNED { value.signed() } else { value.wide() };
    core.set_reg(op.dst, W::of(value));
    Ok(())
}

pub(super) fn lea<W: Width>(core: &mut Core, op: &Op) -> Exec {
    core.set_reg(op.dst, W::of(core.offset(op)));
    Ok(())
}

/// The source is read, and 32-bit registers lose their upper half, also if it does not hold.
#[inline(always)]
fn cmov<W: Width, const C: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let value = if F == RR {
        core.reg::<W>(op.src)
    } else {
        core.load(core.address(op), op.seg)?
    };
    let holds = core.state.flags.holds(C);
    let value = if holds { value } else { core.reg(op.dst) };
    core.set_reg(op.dst, value);
    Ok(())
}

pub(super) fn cmov16<const C: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    cmov::<u16, C, F>(core, op)
}

pub(super) fn cmov32<const C: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    cmov::<u32, C, F>(core, op)
}

pub(super) fn cmov64<const C: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    cmov::<u64, C, F>(core, op)
}

pub(super) fn push<const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let value = match F {
        RR => core.reg::<u64>(op.src),
        RI => op.imm,
        _ => core.load(core.address(op), op.seg)?,
    };
    core.push(value)
}

pub(super) fn pop(core: &mut Core, op: &Op) -> Exec {
    let value = core.top::<u64>()?;
    core.state.r[RSP] = core.state.r[RSP].wrapping_add(8);
    core.set_reg(op.dst, value);
    Ok(())
}

pub(super) fn leave(core: &mut Core, _op: &Op) -> Exec {
    let frame = core.reg::<u64>(5);
    let value = core.load::<u64>(frame, STACK)?;
    core.state.r[RSP] = frame.wrapping_add(8);
    core.set_reg(5, value);
    Ok(())
}

pub(super) fn xchg<W: Width, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    debug_assert_eq!(F, RR);
    let (a, b) = (core.reg::<W>(op.dst), core.reg::<W>(op.src));
    core.set_reg(op.dst, b);
    core.set_reg(op.src, a);
    Ok(())
}

pub(super) fn nop(_core: &mut Core, _op: &Op) -> Exec {
    Ok(())
}
