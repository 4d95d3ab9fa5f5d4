//! Near branches of 64-bit code. RIP is at the next instruction when one begins.

use instruction_facts::is_canonical;

use super::alu::compute;
use super::core::{Core, Exec, Width};
use super::op::Op;
use super::operand::{RI, RR};
use crate::flags::Flags;
use crate::state::RSP;

pub(super) fn jcc<const C: u8>(core: &mut Core, op: &Op) -> Exec {
    let flags = core.state.flags;
    branch::<C>(core, flags, op.imm)
}

#[inline(always)]
fn branch<const C: u8>(core: &mut Core, flags: Flags, by: u64) -> Exec {
    if flags.holds(C) {
        let target = core.state.rip.wrapping_add(by);
        go(core, target)?;
        core.taken();
    }
    Ok(())
}

/// CMP or TEST of registers or an immediate, and the branch behind it.
#[inline(always)]
fn compare<W: Width, const C: u8, const O: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let b = if F == RR {
        core.reg::<W>(op.src)
    } else {
        W::of(op.imm)
    };
    let (_, flags) = compute(O, core.reg::<W>(op.dst), b, false);
    core.state.flags = flags;
    branch::<C>(core, flags, i64::from(op.disp).cast_unsigned())
}

pub(super) fn compare8<const C: u8, const O: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    compare::<u8, C, O, F>(core, op)
}

pub(super) fn compare32<const C: u8, const O: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    compare::<u32, C, O, F>(core, op)
}

pub(super) fn compare64<const C: u8, const O: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    compare::<u64, C, O, F>(core, op)
}

/// To `target`, which has to be canonical (SDM vol. 2A, "CALL": the branch itself faults).
#[inline(always)]
fn go(core: &mut Core, target: u64) -> Exec {
    if !is_canonical(target) {
        return core.gp(0);
    }
    core.state.rip = target;
    Ok(())
}

#[inline(always)]
fn target<const F: u8>(core: &mut Core, op: &Op) -> Exec<u64> {
    match F {
        RI => Ok(core.state.rip.wrapping_add(op.imm)),
        RR => Ok(core.reg(op.src)),
        _ => core.load(core.address(op), op.seg),
    }
}

pub(super) fn jmp<const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let target = target::<F>(core, op)?;
    go(core, target)
}

pub(super) fn call<const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let target = target::<F>(core, op)?;
    if !is_canonical(target) {
        return core.gp(0);
    }
    core.push(core.state.rip)?;
    core.state.rip = target;
    Ok(())
}

pub(super) fn ret(core: &mut Core, op: &Op) -> Exec {
    let target = core.top::<u64>()?;
    go(core, target)?;
    let above = core.state.r[RSP].wrapping_add(8).wrapping_add(op.imm);
    core.state.r[RSP] = above;
    Ok(())
}
