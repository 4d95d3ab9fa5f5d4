//! Arithmetic and logic.

use super::core::{Core, Exec, Width};
use super::op::Op;
use super::operand::{MI, MR, RI, RM, RR};
use crate::flags::Flags;

pub(super) const ADD: u8 = 0;
pub(super) const OR: u8 = 1;
pub(super) const ADC: u8 = 2;
pub(super) const SBB: u8 = 3;
pub(super) const AND: u8 = 4;
pub(super) const SUB: u8 = 5;
pub(super) const XOR: u8 = 6;
pub(crate) const CMP: u8 = 7;
pub(crate) const TEST: u8 = 8;

pub(super) const INC: u8 = 0;
pub(super) const DEC: u8 = 1;
pub(super) const NEG: u8 = 2;
pub(super) const NOT: u8 = 3;

const fn writes(operation: u8) -> bool {
    operation != CMP && operation != TEST
}

/// Result and flags of an operation on two values.
#[inline(always)]
pub(super) fn compute<W: Width>(operation: u8, a: W, b: W, carry: bool) -> (W, Flags) {
    let (x, y, c) = (a.wide(), b.wide(), u64::from(carry));
    match operation {
        ADD | ADC => {
            let c = if operation == ADC { c } else { 0 };
            let sum = x.wrapping_add(y).wrapping_add(c);
            let carries = x & y | (x | y) & !sum;
            carried(x ^ y, sum, carries)
        }
        SUB | SBB | CMP => {
            let c = if operation == SBB { c } else { 0 };
            let rest = x.wrapping_sub(y).wrapping_sub(c);
            let borrows = !x & y | (!x | y) & rest;
            carried(x ^ y, rest, borrows)
        }
        _ => {
            let value = match operation {
                AND | TEST => x & y,
                OR => x | y,
                _ => x ^ y,
            };
            let value = W::of(value);
            (value, Flags::logic(value.signed()))
        }
    }
}

/// Result and flags of a sum or difference: from where the operands differ, or from the carries out
/// of each bit where there is no bit for the last.
#[inline(always)]
fn carried<W: Width>(differ: u64, value: u64, carries: u64) -> (W, Flags) {
    let result = W::of(value);
    let flags = if W::BITS == 64 {
        Flags::carries(value, carries)
    } else {
        Flags::carries_into(result.signed(), differ ^ value, W::BITS)
    };
    (result, flags)
}

/// Result and flags of an operation on one value.
#[inline(always)]
pub(super) fn compute_one<W: Width>(operation: u8, a: W, old: Flags) -> (W, Flags) {
    match operation {
        INC => {
            let (value, flags) = compute(ADD, a, W::of(1), false);
            (value, flags.keep_carry(old))
        }
        DEC => {
            let (value, flags) = compute(SUB, a, W::of(1), false);
            (value, flags.keep_carry(old))
        }
        NEG => compute(SUB, W::of(0), a, false),
        _ => (W::of(!a.wide()), old),
    }
}

pub(super) fn binary<W: Width, const O: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let carry = (O == ADC || O == SBB) && core.state.flags.cf();
    match F {
        MR | MI => {
            let b = if F == MR {
                core.reg::<W>(op.src)
            } else {
                W::of(op.imm)
            };
            let at = core.address(op);
            let a = if writes(O) {
                core.modify(at, op.seg, |a| compute(O, a, b, carry).0)?
            } else {
                core.load(at, op.seg)?
            };
            core.state.flags = compute(O, a, b, carry).1;
        }
        _ => {
            let b = match F {
                RR => core.reg::<W>(op.src),
                RI => W::of(op.imm),
                _ => core.load(core.address(op), op.seg)?,
            };
            let from = if F == RM || !writes(O) {
                op.dst
            } else {
                op.base
            };
            let (value, flags) = compute(O, core.reg::<W>(from), b, carry);
            if writes(O) {
                core.set_reg(op.dst, value);
            }
            core.state.flags = flags;
        }
    }
    Ok(())
}

/// As [`binary`] does, but the flags stay: nobody sees them before others are set.
pub(super) fn quiet<W: Width, const O: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let b = if F == RR {
        core.reg::<W>(op.src)
    } else {
        W::of(op.imm)
    };
    let (value, _) = compute(O, core.reg::<W>(op.base), b, false);
    core.set_reg(op.dst, value);
    Ok(())
}

pub(super) fn unary<W: Width, const O: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let old = core.state.flags;
    if F == RR {
        let (value, flags) = compute_one(O, core.reg::<W>(op.base), old);
        core.set_reg(op.dst, value);
        core.state.flags = flags;
    } else {
        let at = core.address(op);
        let a = core.modify::<W>(at, op.seg, |a| compute_one(O, a, old).0)?;
        core.state.flags = compute_one(O, a, old).1;
    }
    Ok(())
}

/// As [`unary`] does, but the flags stay.
pub(super) fn quiet_unary<W: Width, const O: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    debug_assert_eq!(F, RR);
    let (value, _) = compute_one(O, core.reg::<W>(op.base), core.state.flags);
    core.set_reg(op.dst, value);
    Ok(())
}

pub(super) fn set<const C: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let value = u8::from(core.state.flags.holds(C));
    if F == RR {
        core.set_reg(op.dst, value);
        Ok(())
    } else {
        core.store(core.address(op), op.seg, value)
    }
}

/// CBW, CWDE, CDQE.
pub(super) fn sign_ax<N: Width, W: Width>(core: &mut Core, _op: &Op) -> Exec {
    let value = core.reg::<N>(0).signed();
    core.set_reg(0, W::of(value));
    Ok(())
}

/// CWD, CDQ, CQO.
pub(super) fn sign_dx<W: Width>(core: &mut Core, _op: &Op) -> Exec {
    let value = core.reg::<W>(0).signed().cast_signed() >> 63;
    core.set_reg(2, W::of(value.cast_unsigned()));
    Ok(())
}

pub(super) fn bswap<W: Width>(core: &mut Core, op: &Op) -> Exec {
    let value = core.reg::<W>(op.dst).wide();
    let value = value.swap_bytes() >> (64 - W::BITS);
    core.set_reg(op.dst, W::of(value));
    Ok(())
}
