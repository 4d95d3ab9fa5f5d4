//! Shifts and rotations. Flags that the manual leaves undefined are: AF 0 after a shift; OF of
//! counts above 1 as if the last step had been the only one.

use super::core::{Core, Exec, Width};
use super::op::Op;
use super::operand::RI;
use crate::flags::Flags;

pub(super) const ROL: u8 = 0;
pub(super) const ROR: u8 = 1;
pub(super) const RCL: u8 = 2;
pub(super) const RCR: u8 = 3;
pub(super) const SHL: u8 = 4;
pub(super) const SHR: u8 = 5;
pub(super) const SAR: u8 = 7;

/// Result and flags; the count is not masked yet.
#[inline(always)]
pub(super) fn compute<W: Width>(operation: u8, a: W, count: u8, old: Flags) -> (W, Flags) {
    let count = u32::from(count) & if W::BITS == 64 { 63 } else { 31 };
    if count == 0 {
        return (a, old);
    }
    compute_some(operation, a, count, old)
}

/// The same, of a count that is masked and not 0.
#[inline(always)]
fn compute_some<W: Width>(operation: u8, a: W, count: u32, old: Flags) -> (W, Flags) {
    match operation {
        ROL | ROR => rotate(operation, a, count, old),
        RCL | RCR => rotate_through(operation, a, count, old),
        _ => shifted(operation, a, count),
    }
}

fn top<W: Width>(value: u64) -> bool {
    value >> (W::BITS - 1) & 1 != 0
}

#[inline(always)]
fn shifted<W: Width>(operation: u8, a: W, count: u32) -> (W, Flags) {
    match operation {
        SHL => {
            // 64 bits have room for 32 shifted by 31, but for none above their own.
            let wide = a.wide() << count;
            let value = W::of(wide);
            let cf = if W::BITS == 64 {
                a.wide() >> (64 - count) & 1 != 0
            } else {
                wide >> W::BITS & 1 != 0
            };
            let of = top::<W>(value.wide()) != cf;
            (value, Flags::result(value.signed(), cf, of))
        }
        SHR => {
            let value = W::of(a.wide() >> count);
            let cf = a.wide() >> (count - 1) & 1 != 0;
            // Of a count of 1 it is the old sign.
            let of = top::<W>(a.wide() >> (count - 1));
            (value, Flags::result(value.signed(), cf, of))
        }
        _ => {
            let wide = a.signed().cast_signed();
            let value = W::of((wide >> count).cast_unsigned());
            let cf = wide >> (count - 1) & 1 != 0;
            (value, Flags::result(value.signed(), cf, false))
        }
    }
}

/// Only CF and OF change. A rotation to the right leaves CF in the top bit, and OF is whether the
/// bit below differs; one to the left leaves CF in the lowest bit, and OF is whether the top one
/// differs: the top two bits of what one step further to the right has.
#[inline(always)]
fn rotate<W: Width>(operation: u8, a: W, count: u32, old: Flags) -> (W, Flags) {
    if operation == ROL {
        let value = a.rotated_left(count);
        (
            value,
            old.with_carries_of(value.rotated_right(1).wide(), W::BITS),
        )
    } else {
        let value = a.rotated_right(count);
        (value, old.with_carries_of(value.wide(), W::BITS))
    }
}

fn rotate_through<W: Width>(operation: u8, a: W, count: u32, old: Flags) -> (W, Flags) {
    let bits = W::BITS;
    let count = count % (bits + 1);
    let mut value = u128::from(old.cf()) << bits | u128::from(a.wide());
    let whole = bits + 1;
    if count != 0 {
        let left = if operation == RCL {
            count
        } else {
            whole - count
        };
        let mask = (1u128 << whole) - 1;
        value = (value << left | value >> (whole - left)) & mask;
    }
    let cf = value >> bits & 1 != 0;
    let result = W::of(value as u64);
    let high = top::<W>(result.wide());
    let of = if operation == RCL {
        high != cf
    } else {
        high != top::<W>(result.wide() << 1)
    };
    (result, old.with_carry_overflow(cf, of))
}

/// SHLD and SHRD. A count above the width, which 16-bit ones can have, is undefined: the result
/// is that of the three values in a row.
pub(super) fn double<W: Width>(left: bool, a: W, b: W, count: u8, old: Flags) -> (W, Flags) {
    let count = u32::from(count) & if W::BITS == 64 { 63 } else { 31 };
    if count == 0 {
        return (a, old);
    }
    let (x, y, bits) = (u128::from(a.wide()), u128::from(b.wide()), W::BITS);
    let (value, cf) = if left {
        let row = x << bits | y;
        let row = if bits == 16 { row << 16 | x } else { row };
        let row_bits = if bits == 16 { 48 } else { 2 * bits };
        let value = row >> (row_bits - bits - count);
        (value, row >> (row_bits - count) & 1 != 0)
    } else {
        let row = y << bits | x;
        let row = if bits == 16 { row | x << 32 } else { row };
        (row >> count, row >> (count - 1) & 1 != 0)
    };
    let value = W::of(value as u64);
    let of = top::<W>(value.wide()) != top::<W>(a.wide());
    (value, Flags::result(value.signed(), cf, of))
}

pub(super) fn shift<W: Width, const O: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    let old = core.state.flags;
    let (value, flags) = if F == RI {
        compute_some(O, core.reg::<W>(op.base), op.imm as u32, old)
    } else {
        compute(O, core.reg::<W>(op.dst), core.reg::<u8>(1), old)
    };
    core.set_reg(op.dst, value);
    core.state.flags = flags;
    Ok(())
}

/// As [`shift`] does by an immediate, but the flags stay.
pub(super) fn quiet<W: Width, const O: u8, const F: u8>(core: &mut Core, op: &Op) -> Exec {
    debug_assert_eq!(F, RI);
    let a = core.reg::<W>(op.base);
    let (value, _) = compute_some(O, a, op.imm as u32, core.state.flags);
    core.set_reg(op.dst, value);
    Ok(())
}
