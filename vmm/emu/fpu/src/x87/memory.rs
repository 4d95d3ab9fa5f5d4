//! Integers and BCD in memory (SDM vol. 1, 4.7 and 8.1.2).

use super::value::{Control, F80, INVALID, PRECISION, integer};
use crate::soft::Rounding;

/// Digits of a packed decimal.
const DIGITS: u32 = 18;
/// The packed decimal of a masked invalid operation (SDM vol. 1, table 4-4).
const INDEFINITE: [u8; 10] = [0, 0, 0, 0, 0, 0, 0, 0xc0, 0xff, 0xff];

/// What a store comes to: bytes, exceptions, C1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bytes {
    pub(crate) bytes: [u8; 10],
    pub(crate) flags: u16,
    pub(crate) up: bool,
}

pub(crate) fn low(value: u64) -> [u8; 10] {
    let mut bytes = [0; 10];
    bytes[..8].copy_from_slice(&value.to_le_bytes());
    bytes
}

/// An integer of `bytes` bytes, sign-extended.
pub(crate) fn load_integer(operand: [u8; 10], bytes: u8) -> i64 {
    let mut all = [0; 8];
    all.copy_from_slice(&operand[..8]);
    let shift = 64 - 8 * u32::from(bytes);
    i64::from_le_bytes(all) << shift >> shift
}

/// FIST, FISTP and FISTTP: what is stored in `bytes` bytes.
pub(crate) fn store_integer(value: F80, bytes: u8, rounding: Rounding) -> Bytes {
    let bits = 8 * u32::from(bytes);
    match integer(value, bits, rounding) {
        Some((integer, inexact, up)) => Bytes {
            bytes: low(integer.cast_unsigned()),
            flags: if inexact { PRECISION } else { 0 },
            up,
        },
        None => Bytes {
            bytes: integer_indefinite(bytes),
            flags: INVALID,
            up: false,
        },
    }
}

/// The integer of a masked invalid operation: the least one (SDM vol. 1, table 4-1).
pub(crate) fn integer_indefinite(bytes: u8) -> [u8; 10] {
    low(1 << (8 * u32::from(bytes) - 1))
}

/// FBLD. Digits above 9, which are undefined, count as their four bits say.
pub(crate) fn load_decimal(operand: [u8; 10]) -> F80 {
    let magnitude = operand[..9].iter().rev().fold(0_u64, |value, byte| {
        value * 100 + u64::from(byte >> 4) * 10 + u64::from(byte & 15)
    });
    F80::of_magnitude(operand[9] & 0x80 != 0, magnitude)
}

/// FBSTP.
pub(crate) fn store_decimal(value: F80, control: &Control) -> Bytes {
    let invalid = Bytes {
        bytes: INDEFINITE,
        flags: INVALID,
        up: false,
    };
    let Some((whole, inexact, up)) = integer(value, 64, control.rounding) else {
        return invalid;
    };
    let mut magnitude = whole.unsigned_abs();
    if magnitude >= 10_u64.pow(DIGITS) {
        return invalid;
    }
    let mut bytes = [0; 10];
    for byte in &mut bytes[..9] {
        let pair = u8::try_from(magnitude % 100).unwrap_or(0);
        *byte = ((pair / 10) << 4) | (pair % 10);
        magnitude /= 100;
    }
    // Also of a zero, and of what was rounded to it.
    bytes[9] = if value.is_negative() { 0x80 } else { 0 };
    Bytes {
        bytes,
        flags: if inexact { PRECISION } else { 0 },
        up,
    }
}

/// FBSTP of an empty register.
pub(crate) fn decimal_indefinite() -> [u8; 10] {
    INDEFINITE
}
