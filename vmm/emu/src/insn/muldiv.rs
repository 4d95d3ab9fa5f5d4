//! Multiplications and divisions. SF, ZF, AF and PF after a multiplication are undefined: they
//! are those of the low half. Flags stay as they are over a division.

use super::core::{Core, Exec, Width};
use super::op::Op;
use super::operand::RR;
use crate::flags::Flags;

pub(super) const MUL: u8 = 4;
pub(super) const IMUL: u8 = 5;
pub(super) const DIV: u8 = 6;
pub(super) const IDIV: u8 = 7;

/// The number that `hi:lo` is, each half of the width.
fn joined<W: Width>(hi: W, lo: W, signed: bool) -> i128 {
    let both = u128::from(hi.wide()) << W::BITS | u128::from(lo.wide());
    let room = 128 - 2 * W::BITS;
    if signed {
        both.cast_signed() << room >> room
    } else {
        both.cast_signed()
    }
}

/// MUL, IMUL, DIV and IDIV of RDX:RAX, of AX where the operand is a byte.
pub(super) fn wide<W: Width>(core: &mut Core, operation: u8, by: W) -> Exec {
    let (hi, lo) = if W::BITS == 8 {
        (W::of(core.reg::<u16>(0).wide() >> 8), core.reg::<W>(0))
    } else {
        (core.reg::<W>(2), core.reg::<W>(0))
    };
    let (hi, lo) = match operation {
        MUL => multiply(core, u128::from(lo.wide()) * u128::from(by.wide()), false),
        IMUL => {
            let a = i128::from(lo.signed().cast_signed());
            let b = i128::from(by.signed().cast_signed());
            multiply(core, (a * b).cast_unsigned(), true)
        }
        _ => divide(core, hi, lo, by, operation == IDIV)?,
    };
    if W::BITS == 8 {
        core.set_reg(0, (hi.wide() << 8 | lo.wide()) as u16);
    } else {
        core.set_reg(0, lo);
        core.set_reg(2, hi);
    }
    Ok(())
}

/// CF and OF say whether the high half is more than the low half's sign (or 0).
fn multiply<W: Width>(core: &mut Core, product: u128, signed: bool) -> (W, W) {
    let (hi, lo) = (W::of((product >> W::BITS) as u64), W::of(product as u64));
    let sign = if signed {
        W::of((lo.signed().cast_signed() >> 63).cast_unsigned())
    } else {
        W::of(0)
    };
    let over = hi != sign;
    core.state.flags = Flags::result(lo.signed(), over, over);
    (hi, lo)
}

/// Remainder and quotient.
fn divide<W: Width>(core: &mut Core, hi: W, lo: W, by: W, signed: bool) -> Exec<(W, W)> {
    if by.wide() == 0 {
        return core.raise(0, None);
    }
    if signed {
        let value = joined(hi, lo, true);
        let by = i128::from(by.signed().cast_signed());
        // The smallest number by -1 has no quotient at all.
        let Some(quotient) = value.checked_div(by) else {
            return core.raise(0, None);
        };
        let fits = i128::from(W::of(quotient as u64).signed().cast_signed()) == quotient;
        if !fits {
            return core.raise(0, None);
        }
        return Ok((W::of((value % by) as u64), W::of(quotient as u64)));
    }
    // The quotient has room if the high half is below the divisor.
    if hi.wide() >= by.wide() {
        return core.raise(0, None);
    }
    if hi.wide() == 0 {
        let (value, by) = (lo.wide(), by.wide());
        return Ok((W::of(value % by), W::of(value / by)));
    }
    let value = joined(hi, lo, false).cast_unsigned();
    let by = u128::from(by.wide());
    Ok((W::of((value % by) as u64), W::of((value / by) as u64)))
}

pub(super) fn one<W: Width, const O: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let by = if F == RR {
        core.reg::<W>(op.src)
    } else {
        core.load(core.address(op), op.seg)?
    };
    wide(core, O, by)
}

/// Product and flags of IMUL with two or three operands.
#[inline(always)]
pub(super) fn product<W: Width>(a: W, b: W) -> (W, Flags) {
    let (x, y) = (a.signed().cast_signed(), b.signed().cast_signed());
    let (low, over) = x.overflowing_mul(y);
    let value = W::of(low.cast_unsigned());
    let over = over || value.signed() != low.cast_unsigned();
    (value, Flags::result(value.signed(), over, over))
}

pub(super) fn two<W: Width, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let b = if F == RR {
        core.reg::<W>(op.src)
    } else {
        core.load(core.address(op), op.seg)?
    };
    let (value, flags) = product(core.reg::<W>(op.dst), b);
    core.set_reg(op.dst, value);
    core.state.flags = flags;
    Ok(())
}

pub(super) fn three<W: Width, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let a = if F == RR {
        core.reg::<W>(op.src)
    } else {
        core.load(core.address(op), op.seg)?
    };
    let (value, flags) = product(a, W::of(op.imm));
    core.set_reg(op.dst, value);
    core.state.flags = flags;
    Ok(())
}
