//! RCPPS and RSQRTPS, whose results are the processor's own within 1.5 × 2^-12 (SDM vol. 2).
//!
//! Ours is one value: the true one to the nearest of 12 significant digits, so with an error of
//! at most 2^-12 of it. Denormal operands are 0, tiny results become 0, nothing is raised, and
//! MXCSR decides nothing, as the manual says.

use crate::sys::{Raw, Xmm};

const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7f80_0000;
const QUIET: u32 = 0x0040_0000;
/// The NaN of an invalid operation (SDM vol. 1, table 4-3).
const INDEFINITE: u32 = 0xffc0_0000;
/// Digits of a result behind the leading one.
const BEHIND: u32 = 11;

pub(crate) fn rcpps(_a: Xmm, b: Xmm, _imm: u8, _mxcsr: u32) -> Raw {
    each(b, reciprocal)
}

pub(crate) fn rsqrtps(_a: Xmm, b: Xmm, _imm: u8, _mxcsr: u32) -> Raw {
    each(b, reciprocal_root)
}

pub(crate) fn rcpss(a: Xmm, b: Xmm, _imm: u8, _mxcsr: u32) -> Raw {
    first(a, b, reciprocal)
}

pub(crate) fn rsqrtss(a: Xmm, b: Xmm, _imm: u8, _mxcsr: u32) -> Raw {
    first(a, b, reciprocal_root)
}

fn each(b: Xmm, make: fn(u32) -> u32) -> Raw {
    let pair = |both: u64| {
        let [low, high] = [both, both >> 32].map(|one| make((one & 0xffff_ffff) as u32));
        u64::from(low) | u64::from(high) << 32
    };
    Raw {
        value: b.map(pair),
        flags: 0,
    }
}

fn first(a: Xmm, b: Xmm, make: fn(u32) -> u32) -> Raw {
    let low = u64::from(make((b[0] & 0xffff_ffff) as u32));
    Raw {
        value: [a[0] & !0xffff_ffff | low, a[1]],
        flags: 0,
    }
}

/// A single's sign, exponent field and 24 digits.
fn parts(bits: u32) -> (u32, u32, u64) {
    let field = bits >> 23 & 0xff;
    (bits & SIGN, field, u64::from(bits & 0x7f_ffff | 0x80_0000))
}

/// 1 / x.
fn reciprocal(bits: u32) -> u32 {
    let (sign, field, digits) = parts(bits);
    match field {
        0 => return sign | INFINITY,
        255 if bits & 0x7f_ffff != 0 => return bits | QUIET,
        255 => return sign,
        _ => {}
    }
    // x is digits × 2^(field - 150), and 1 / x the quotient × 2^(150 - field - 35). The quotient
    // has 12 digits, or is 2^12.
    let quotient = nearest(1 << 35, digits);
    rounded(sign, quotient, 150 - field.cast_signed() - 35)
}

/// 1 / √x.
fn reciprocal_root(bits: u32) -> u32 {
    let (sign, field, digits) = parts(bits);
    match field {
        0 => return sign | INFINITY,
        255 if bits & 0x7f_ffff != 0 => return bits | QUIET,
        _ if sign != 0 => return INDEFINITE,
        255 => return 0,
        _ => {}
    }
    // x is digits × 2^exp with an even exponent; the root of 2^scale / digits has 12 digits.
    let exp = field.cast_signed() - 150;
    let (digits, exp) = if exp & 1 != 0 {
        (digits << 1, exp - 1)
    } else {
        (digits, exp)
    };
    let scale = if digits >= 1 << 24 { 48 } else { 46 };
    let mut root = (1_u64 << scale) / digits;
    root = root.isqrt();
    // Up, where the true root is above root + 1/2.
    let twice = 2 * root + 1;
    if twice * twice * digits < 1 << (scale + 2) {
        root += 1;
    }
    rounded(0, root, -exp / 2 - scale / 2)
}

/// To the nearest integer. Of a power of two no quotient lies between two.
fn nearest(dividend: u64, divisor: u64) -> u64 {
    (2 * dividend + divisor) / (2 * divisor)
}

/// A single of 12 digits, times 2^exp; 0 where it is tiny.
fn rounded(sign: u32, digits: u64, exp: i32) -> u32 {
    let top = 63 - digits.leading_zeros();
    let field = exp + top.cast_signed() + 127;
    if field <= 0 {
        return sign;
    }
    let behind = ((digits << BEHIND >> top) & ((1 << BEHIND) - 1)) as u32;
    sign | field.cast_unsigned() << 23 | behind << (23 - BEHIND)
}
