//! Near branches of 64-bit code. RIP is at the next instruction when one begins.

use instruction_facts::is_canonical;

use super::core::{Core, Exec};
use super::operand::{RI, RR};
use crate::op::Op;
use crate::state::RSP;

pub(super) fn jcc<const C: u8>(core: &mut Core, op: &Op) -> Exec {
    if core.state.flags.holds(C) {
        let target = core.state.rip.wrapping_add(op.imm);
        go(core, target)?;
        core.taken();
    }
    Ok(())
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
