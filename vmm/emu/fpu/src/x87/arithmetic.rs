//! Operations whose results the manual defines wholly: each is exact, or rounded once.

use super::value::{
    Calc, Class, Control, DENORMAL, EXTENDED, F80, INVALID, Operand, PRECISION, ZERO_DIVIDE,
};
use crate::soft::{Number, Rounding};

/// Basic arithmetic, by the three bits of its opcodes (SDM vol. 2, B.17).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arith {
    Add,
    Mul,
    Sub,
    SubReverse,
    Div,
    DivReverse,
}

/// What two operands compare as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Greater,
    Less,
    Equal,
    Unordered,
}

/// The result where an operand is a NaN or has no format (SDM vol. 1, tables 4-7 and 8-10).
pub(crate) fn nan_of(a: F80, b: F80) -> Option<Calc> {
    let (class_a, class_b) = (a.class(), b.class());
    if class_a == Class::Unsupported || class_b == Class::Unsupported {
        return Some(Calc::invalid());
    }
    if !a.is_nan() && !b.is_nan() {
        return None;
    }
    let signals = class_a == Class::Signaling || class_b == Class::Signaling;
    let chosen = match (class_a, class_b) {
        (Class::Signaling, Class::Quiet) => b,
        (Class::Quiet, Class::Signaling) => a,
        _ if !b.is_nan() => a,
        _ if !a.is_nan() => b,
        // Both are of a kind: the larger significand, and of equal ones the positive.
        _ if a.sig > b.sig => a,
        _ if a.sig < b.sig => b,
        _ if a.is_negative() => b,
        _ => a,
    };
    let result = Calc::exact(chosen.quieted());
    Some(if signals {
        result.with(INVALID)
    } else {
        result
    })
}

fn denormals(a: Operand, b: Operand) -> u16 {
    if a.denormal || b.denormal {
        DENORMAL
    } else {
        0
    }
}

/// FADD to FDIVR: `a` op `b`.
pub(crate) fn arithmetic(op: Arith, a: Operand, b: Operand, control: &Control) -> Calc {
    if let Some(nan) = nan_of(a.value, b.value) {
        return nan;
    }
    let result = match op {
        Arith::Add => sum(a.value, b.value, control),
        Arith::Sub => sum(a.value, b.value.negated(), control),
        Arith::SubReverse => sum(b.value, a.value.negated(), control),
        Arith::Mul => product(a.value, b.value, control),
        Arith::Div => quotient(a.value, b.value, control),
        Arith::DivReverse => quotient(b.value, a.value, control),
    };
    // An invalid operation and a division by zero come before (SDM vol. 1, 4.9.2).
    if result.flags & (INVALID | ZERO_DIVIDE) != 0 {
        return result;
    }
    result.with(denormals(a, b))
}

/// The sum of values that are no NaNs.
fn sum(a: F80, b: F80, control: &Control) -> Calc {
    let cancelled = F80::zero(control.rounding == Rounding::Down);
    let sum = match (a.class(), b.class()) {
        (Class::Infinity, Class::Infinity) if a.se != b.se => return Calc::invalid(),
        (Class::Infinity, _) => return Calc::exact(a),
        (_, Class::Infinity) => return Calc::exact(b),
        (Class::Zero, Class::Zero) if a.se == b.se => return Calc::exact(a),
        (Class::Finite { number: a, .. }, Class::Finite { number: b, .. }) => a.add(b),
        (Class::Finite { number, .. }, _) | (_, Class::Finite { number, .. }) => Some(number),
        _ => None,
    };
    match sum {
        Some(sum) => Calc::rounded(&sum, control.precision, control),
        None => Calc::exact(cancelled),
    }
}

fn product(a: F80, b: F80, control: &Control) -> Calc {
    let negative = a.is_negative() != b.is_negative();
    match (a.class(), b.class()) {
        (Class::Infinity, Class::Zero) | (Class::Zero, Class::Infinity) => Calc::invalid(),
        (Class::Infinity, _) | (_, Class::Infinity) => Calc::exact(F80::infinity(negative)),
        (Class::Finite { number: a, .. }, Class::Finite { number: b, .. }) => {
            Calc::rounded(&a.mul(b), control.precision, control)
        }
        _ => Calc::exact(F80::zero(negative)),
    }
}

fn quotient(a: F80, b: F80, control: &Control) -> Calc {
    let negative = a.is_negative() != b.is_negative();
    match (a.class(), b.class()) {
        (Class::Infinity, Class::Infinity) | (Class::Zero, Class::Zero) => Calc::invalid(),
        (Class::Infinity, _) => Calc::exact(F80::infinity(negative)),
        (_, Class::Zero) => Calc::exact(F80::infinity(negative)).with(ZERO_DIVIDE),
        (Class::Finite { number: a, .. }, Class::Finite { number: b, .. }) => {
            Calc::rounded(&a.div(b), control.precision, control)
        }
        _ => Calc::exact(F80::zero(negative)),
    }
}

pub(crate) fn square_root(value: F80, control: &Control) -> Calc {
    if let Some(nan) = nan_of(value, value) {
        return nan;
    }
    match value.class() {
        Class::Zero => Calc::exact(value),
        _ if value.is_negative() => Calc::invalid(),
        Class::Finite { number, denormal } => {
            let root = Calc::rounded(&number.sqrt(), control.precision, control);
            root.with(if denormal { DENORMAL } else { 0 })
        }
        _ => Calc::exact(value),
    }
}

/// FRNDINT.
pub(crate) fn integral(value: F80, control: &Control) -> Calc {
    if let Some(nan) = nan_of(value, value) {
        return nan;
    }
    let Class::Finite { number, denormal } = value.class() else {
        return Calc::exact(value);
    };
    let denormal = if denormal { DENORMAL } else { 0 };
    if number.exp >= 0 {
        return Calc::exact(value).with(denormal);
    }
    let whole = number.integer(control.rounding);
    Calc {
        value: F80::of_magnitude(value.is_negative(), whole.sig),
        flags: denormal | if whole.inexact { PRECISION } else { 0 },
        up: whole.up,
    }
}

/// The order of two operands, and the exceptions of finding it. `quiet` of FUCOM: a QNaN is no
/// invalid operand.
pub(crate) fn compare(a: Operand, b: Operand, quiet: bool) -> (Order, u16) {
    if let Some(nan) = nan_of(a.value, b.value) {
        let flags = if quiet { nan.flags } else { INVALID };
        return (Order::Unordered, flags);
    }
    let key = |value: F80| {
        // Normalised, as a denormal of memory and one of a register have one key.
        match value.class() {
            Class::Zero => (0, 0_i32, 0),
            Class::Finite { number, .. } => {
                let shift = number.sig.leading_zeros();
                (1, number.exp - shift.cast_signed(), number.sig << shift)
            }
            _ => (2, 0, 0),
        }
    };
    let sign = |value: F80| match value.class() {
        Class::Zero => 0,
        _ if value.is_negative() => -1,
        _ => 1,
    };
    let (a_sign, b_sign) = (sign(a.value), sign(b.value));
    let magnitudes = if a_sign < 0 {
        key(b.value).cmp(&key(a.value))
    } else {
        key(a.value).cmp(&key(b.value))
    };
    let order = match a_sign.cmp(&b_sign).then(magnitudes) {
        std::cmp::Ordering::Greater => Order::Greater,
        std::cmp::Ordering::Less => Order::Less,
        std::cmp::Ordering::Equal => Order::Equal,
    };
    (order, denormals(a, b))
}

/// FSCALE: `a` times 2 to the power of `b`, truncated (SDM vol. 2, FSCALE).
pub(crate) fn scale(a: F80, b: F80, control: &Control) -> Calc {
    if let Some(nan) = nan_of(a, b) {
        return nan;
    }
    let flags = denormals(a.into(), b.into());
    let negative = a.is_negative();
    let by = match (a.class(), b.class()) {
        (Class::Zero, Class::Infinity) if !b.is_negative() => return Calc::invalid(),
        (Class::Infinity, Class::Infinity) if b.is_negative() => return Calc::invalid(),
        (Class::Zero | Class::Infinity, _) => return Calc::exact(a).with(flags),
        (_, Class::Infinity) if b.is_negative() => {
            return Calc::exact(F80::zero(negative)).with(flags);
        }
        (_, Class::Infinity) => return Calc::exact(F80::infinity(negative)).with(flags),
        (_, Class::Finite { number, .. }) => whole_power(&number),
        _ => 0,
    };
    let Class::Finite { number, .. } = a.class() else {
        return Calc::exact(a).with(flags);
    };
    let scaled = Number {
        exp: number.exp + by,
        ..number
    };
    Calc::rounded(&scaled, EXTENDED, control).with(flags)
}

/// A power of two as FSCALE takes it; beyond ±2^16 all results are out of range alike.
fn whole_power(number: &Number) -> i32 {
    const MOST: u64 = 1 << 16;
    let top = number.exp + 127 - number.sig.leading_zeros().cast_signed();
    let magnitude = match top {
        ..0 => 0,
        0..=16 => number.integer(Rounding::Zero).sig.min(MOST),
        _ => MOST,
    };
    let by = i32::try_from(magnitude).unwrap_or(0);
    if number.negative { -by } else { by }
}

/// FXTRACT: exponent and significand.
pub(crate) fn extract(value: F80) -> (Calc, F80) {
    if let Some(nan) = nan_of(value, value) {
        return (nan, nan.value);
    }
    match value.class() {
        Class::Zero => (Calc::exact(F80::infinity(true)).with(ZERO_DIVIDE), value),
        Class::Finite { number, denormal } => {
            let shift = number.sig.leading_zeros() - 64;
            let exponent = number.exp + 63 - shift.cast_signed();
            let significand = F80 {
                sig: value.sig << shift,
                se: F80::ONE.se | value.se & 0x8000,
            };
            let exponent = F80::of_integer(i64::from(exponent));
            let flags = if denormal { DENORMAL } else { 0 };
            (Calc::exact(exponent).with(flags), significand)
        }
        _ => (Calc::exact(F80::infinity(false)), value),
    }
}

/// What FPREM tells of the quotient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Quotient {
    /// Its low three bits.
    Low(u64),
    /// The remainder is partial: C2.
    Partial,
    /// There is none, of a NaN or an invalid operation.
    None,
}

/// FPREM and FPREM1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Remainder {
    pub(crate) calc: Calc,
    pub(crate) quotient: Quotient,
}

/// The remainder of `a` by `b`: exact (SDM vol. 2, FPREM). `nearest` of FPREM1.
pub(crate) fn remainder(a: F80, b: F80, nearest: bool, control: &Control) -> Remainder {
    let none = |calc| Remainder {
        calc,
        quotient: Quotient::None,
    };
    let done = |calc| Remainder {
        calc,
        quotient: Quotient::Low(0),
    };
    if let Some(nan) = nan_of(a, b) {
        return none(nan);
    }
    let flags = denormals(a.into(), b.into());
    let (dividend, divisor) = match (a.class(), b.class()) {
        (Class::Infinity, _) | (_, Class::Zero) => return none(Calc::invalid()),
        (Class::Zero, _) => return done(Calc::exact(a).with(flags)),
        (Class::Finite { number, .. }, Class::Infinity) => {
            return done(Calc::rounded(&number, EXTENDED, control).with(flags));
        }
        (Class::Finite { number: a, .. }, Class::Finite { number: b, .. }) => (a, b),
        _ => return done(Calc::exact(a)),
    };
    let (negative, exp, rest, quotient) = divided(&dividend, &divisor, nearest);
    let calc = if rest == 0 {
        Calc::exact(F80::zero(dividend.negative))
    } else {
        let number = Number {
            negative,
            exp,
            sig: rest,
        };
        Calc::rounded(&number, EXTENDED, control)
    };
    Remainder {
        calc: calc.with(flags),
        quotient,
    }
}

/// Sign, exponent and digits of a remainder, and the quotient where it is complete.
fn divided(a: &Number, b: &Number, nearest: bool) -> (bool, i32, u128, Quotient) {
    let normal = |number: &Number| {
        let shift = number.sig.leading_zeros() - 64;
        (number.sig << shift, number.exp - shift.cast_signed())
    };
    let ((a_sig, a_exp), (b_sig, b_exp)) = (normal(a), normal(b));
    let apart = a_exp - b_exp;
    if apart < -1 || apart < 0 && !nearest {
        // Less than half of the divisor, or less than it.
        return (a.negative, a_exp, a_sig, Quotient::Low(0));
    }
    // Of 64 and more a part, by a whole number of 32 to 63 digits: the manual leaves it to the
    // processor how many; this is what the 80387 took.
    let (steps, complete) = if apart < 64 {
        (apart, true)
    } else {
        (apart & 31 | 32, false)
    };
    if apart == -1 {
        // Twice the dividend's digits against the divisor's: half of it at the least.
        let more = a_sig > b_sig;
        return if more {
            (!a.negative, a_exp, (b_sig << 1) - a_sig, Quotient::Low(1))
        } else {
            (a.negative, a_exp, a_sig, Quotient::Low(0))
        };
    }
    let (mut rest, mut quotient) = (a_sig, 0_u64);
    for step in 0..=steps {
        if step > 0 {
            rest <<= 1;
            quotient <<= 1;
        }
        if rest >= b_sig {
            rest -= b_sig;
            quotient |= 1;
        }
    }
    let exp = a_exp - steps;
    if !complete {
        return (a.negative, exp, rest, Quotient::Partial);
    }
    let mut negative = a.negative;
    if nearest && (rest << 1 > b_sig || rest << 1 == b_sig && quotient & 1 == 1) {
        rest = b_sig - rest;
        negative = !negative;
        quotient = quotient.wrapping_add(1);
    }
    (negative, exp, rest, Quotient::Low(quotient & 7))
}
