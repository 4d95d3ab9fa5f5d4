//! FSIN, FCOS, FPTAN, FPATAN, F2XM1, FYL2X and FYL2XP1.
//!
//! Processors differ in the last digit of these. Ours is one value: the true one, rounded once,
//! as RC says, to 64 digits; PC is not asked (SDM vol. 1, 8.3.9 and 8.1.5.2). Operands that are
//! infinite, 0 or NaNs have the results of the tables in SDM vol. 2.
//!
//! What the manual leaves undefined: F2XM1 outside of -1 to 1 gives its operand, and FYL2XP1 of
//! a sum outside of √½ to √2 is FYL2X of the sum, rounded.

use super::arithmetic::{Arith, arithmetic, nan_of};
use super::value::{Calc, Class, Control, DENORMAL, EXTENDED, F80, PRECISION, ZERO_DIVIDE};
use crate::fixed::{FRACTION, Fixed};
use crate::soft::{Number, Rounding};

const HALF_PI: Fixed = Fixed::of_limbs([
    0xdf2a_3367_9a74_8636,
    0xa294_10f3_1c68_09bb,
    0x0417_7d4c_7627_3644,
    0x5204_9c11_14cf_98e8,
    0x898c_c517_01b8_39a2,
    0x921f_b544_42d1_8469,
    1,
]);
const TWO_BY_PI: Fixed = Fixed::of_limbs([
    0x0649_2eea_09d1_921c,
    0xb724_6e3a_424d_d2e0,
    0xfe51_63ab_debb_c561,
    0xdb62_9599_3c43_9041,
    0xfc27_57d1_f534_ddc0,
    0xa2f9_836e_4e44_1529,
    0,
]);
const LN_2: Fixed = Fixed::of_limbs([
    0x5595_52fb_4afa_1b10,
    0xe7b8_7620_6deb_ac98,
    0x8a0d_175b_8baa_fa2b,
    0x40f3_4326_7298_b62d,
    0xc9e3_b398_03f2_f6af,
    0xb172_17f7_d1cf_79ab,
    0,
]);
const LOG2_E: Fixed = Fixed::of_limbs([
    0x49b2_5eeb_82d7_c167,
    0xbc38_87ee_aa2e_d9ac,
    0x164a_2cd9_a342_648f,
    0xd6ae_f551_bad2_b4b1,
    0x7d0f_fda0_d23a_7d11,
    0x7154_7652_b82f_e177,
    1,
]);
/// Arctangents of 1/8 to 8/8.
const ARCTANGENTS: [Fixed; 8] = [
    Fixed::of_limbs([
        0xa7ff_4baa_3c46_9ae3,
        0x1a9a_0100_403b_384c,
        0x5d92_6aef_bf6d_82ed,
        0xf167_2afb_2bb3_5b24,
        0x5912_f313_e7d1_11de,
        0x1fd5_ba9a_ac2f_6dc6,
        0,
    ]),
    Fixed::of_limbs([
        0xc16f_a316_e960_c68f,
        0x64ae_4945_9a39_5d94,
        0xde8e_9d9f_2512_69d9,
        0x6a9f_ea40_e22c_e0da,
        0x5b71_e7bd_7de8_85f9,
        0x3eb6_ebf2_5901_bac5,
        0,
    ]),
    Fixed::of_limbs([
        0x6e66_7254_0067_b9e9,
        0x3266_2c10_1cfe_e06b,
        0x2399_f2e5_19a4_8470,
        0x9ec2_1cbb_d72a_2ae6,
        0xc551_9091_6e7f_2241,
        0x5bd8_6507_937b_c239,
        0,
    ]),
    Fixed::of_limbs([
        0x43e4_097c_6352_30c1,
        0xfd4e_2c8b_c495_a8b6,
        0x7167_8b73_74b1_2384,
        0xb70a_0ac3_930e_6f80,
        0xb7f2_22f6_5e1d_4681,
        0x76b1_9c15_86ed_3da2,
        0,
    ]),
    Fixed::of_limbs([
        0x66cd_7dd3_073d_6a58,
        0x3669_dcd3_918d_712b,
        0xf53d_a46d_1338_9eb2,
        0x918a_67e0_652b_375c,
        0x5c83_5e16_65c4_3747,
        0x8f00_5d5e_f7f5_9f9b,
        0,
    ]),
    Fixed::of_limbs([
        0x5762_206e_d3d0_24b3,
        0xa7f7_b7db_933c_b84f,
        0x2148_6665_8cc4_ef3a,
        0xe3f0_8689_eeb2_b9e7,
        0x19a8_7f2a_457d_ac9e,
        0xa4bc_7d19_34f7_0924,
        0,
    ]),
    Fixed::of_limbs([
        0x49c4_9ec7_2668_272c,
        0x4655_f065_cec9_8182,
        0xa012_155f_64ca_e530,
        0x3d7a_ecc1_14c7_9a80,
        0xcb2d_a552_10a4_443d,
        0xb805_3e2b_c231_9e73,
        0,
    ]),
    Fixed::of_limbs([
        0xef95_19b3_cd3a_431b,
        0x514a_0879_8e34_04dd,
        0x020b_bea6_3b13_9b22,
        0x2902_4e08_8a67_cc74,
        0xc4c6_628b_80dc_1cd1,
        0xc90f_daa2_2168_c234,
        0,
    ]),
];

/// Below 2 to this power, f(x) is x but for less than 2^-140 of it.
const SMALL: i32 = -70;
/// The square of the mantissa's bound √2, as a significand's 64 digits.
const ROOT_2: u64 = 0xb504_f333_f9de_6484;

/// Operands with 64 digits, the leading one 1.
fn normal(number: Number) -> (u64, i32) {
    let shift = number.sig.leading_zeros() - 64;
    let sig = u64::try_from(number.sig << shift).unwrap_or(0);
    (sig, number.exp - shift.cast_signed())
}

fn denormal(is: bool) -> u16 {
    if is { DENORMAL } else { 0 }
}

/// An irrational result in a register.
fn irrational(number: Option<Number>, control: &Control) -> Calc {
    match number {
        Some(number) => Calc::rounded(&number, EXTENDED, control),
        // No function is 0 where it is irrational.
        None => Calc::exact(F80::zero(false)),
    }
}

/// A number a little further from 0, or nearer to it, than one of 64 digits.
fn beside(sig: u64, exp: i32, negative: bool, further: bool) -> Number {
    let wide = u128::from(sig) << 62;
    Number {
        negative,
        exp: exp - 62,
        sig: if further { wide + 1 } else { wide - 1 },
    }
}

/// An operand of FSIN and its kin within its range, reduced.
struct Angle {
    /// Quarter turns, of which the low two bits count.
    quarters: u64,
    /// The rest's magnitude, at most π/4, and its sign.
    rest: Fixed,
    negative: bool,
}

impl Angle {
    /// Of a magnitude below 2^63.
    fn new(sig: u64, exp: i32) -> Self {
        let x = Fixed::new(sig, exp);
        let turns = x.mul(TWO_BY_PI).add(Fixed::new(1, -1));
        let quarters = turns.whole();
        let (rest, negative) = x.apart(HALF_PI.mul_word(quarters));
        Self {
            quarters,
            rest,
            negative,
        }
    }

    fn sine(&self) -> Fixed {
        self.rest.mul(alternating(self.rest, 1))
    }

    fn cosine(&self) -> Fixed {
        alternating(self.rest, 0)
    }
}

/// The sum of (-x²)^k / (2k + first)!, with `first` 1 the sine by x, with 0 the cosine.
fn alternating(x: Fixed, first: u64) -> Fixed {
    let square = x.mul(x);
    let mut term = Fixed::ONE;
    let (mut plus, mut minus) = (Fixed::ONE, Fixed::ZERO);
    let mut n = first;
    let mut negative = false;
    loop {
        term = term.mul(square).div_word((n + 1) * (n + 2));
        if term.is_zero() {
            return plus.sub(minus);
        }
        n += 2;
        negative = !negative;
        let sum = if negative { &mut minus } else { &mut plus };
        *sum = sum.add(term);
    }
}

/// What FSIN, FCOS and FPTAN make of operands: the value that needs no angle, or the angle.
enum Turned {
    Known(Calc),
    TooLarge,
    Small { sig: u64, exp: i32, flags: u16 },
    Angle { angle: Angle, flags: u16 },
}

fn turned(x: F80) -> Turned {
    if let Some(nan) = nan_of(x, x) {
        return Turned::Known(nan);
    }
    let (number, is_denormal) = match x.class() {
        Class::Finite { number, denormal } => (number, denormal),
        Class::Zero => return Turned::Known(Calc::exact(x)),
        _ => return Turned::Known(Calc::invalid()),
    };
    let (sig, exp) = normal(number);
    let flags = denormal(is_denormal);
    match exp + 63 {
        63.. => Turned::TooLarge,
        ..SMALL => Turned::Small { sig, exp, flags },
        _ => Turned::Angle {
            angle: Angle::new(sig, exp),
            flags,
        },
    }
}

/// FSIN; [`None`] of an operand out of range, 2^63 and more.
pub(crate) fn sine(x: F80, control: &Control) -> Option<Calc> {
    let negative = x.is_negative();
    Some(match turned(x) {
        Turned::TooLarge => return None,
        Turned::Known(calc) => calc,
        Turned::Small { sig, exp, flags } => {
            irrational(Some(beside(sig, exp, negative, false)), control).with(flags)
        }
        Turned::Angle { angle, flags } => {
            let (value, turn) = match angle.quarters & 1 {
                0 => (angle.sine(), angle.negative),
                _ => (angle.cosine(), false),
            };
            let negative = negative ^ turn ^ (angle.quarters & 2 != 0);
            irrational(value.number(negative, 0), control).with(flags)
        }
    })
}

/// FCOS.
pub(crate) fn cosine(x: F80, control: &Control) -> Option<Calc> {
    Some(match turned(x) {
        Turned::TooLarge => return None,
        Turned::Known(_) if x.class() == Class::Zero => Calc::exact(F80::ONE),
        Turned::Known(calc) => calc,
        Turned::Small { flags, .. } => {
            let one = beside(1 << 63, -63, false, false);
            irrational(Some(one), control).with(flags)
        }
        Turned::Angle { angle, flags } => {
            let (value, negative) = match angle.quarters & 3 {
                0 => (angle.cosine(), false),
                1 => (angle.sine(), !angle.negative),
                2 => (angle.cosine(), true),
                _ => (angle.sine(), angle.negative),
            };
            irrational(value.number(negative, 0), control).with(flags)
        }
    })
}

/// The tangent of FPTAN.
pub(crate) fn tangent(x: F80, control: &Control) -> Option<Calc> {
    let negative = x.is_negative();
    Some(match turned(x) {
        Turned::TooLarge => return None,
        Turned::Known(calc) => calc,
        Turned::Small { sig, exp, flags } => {
            irrational(Some(beside(sig, exp, negative, true)), control).with(flags)
        }
        Turned::Angle { angle, flags } => {
            let odd = angle.quarters & 1 != 0;
            let (sine, cosine) = (angle.sine(), angle.cosine());
            let number = if odd {
                // At most 2^72: cosine by 2^10 times the sine.
                let scaled = Fixed::new(1 << 63, -73).mul(cosine);
                scaled.div(sine).number(negative == angle.negative, 10)
            } else {
                sine.div(cosine).number(negative != angle.negative, 0)
            };
            irrational(number, control).with(flags)
        }
    })
}

/// F2XM1: 2^x - 1.
pub(crate) fn power_less_one(x: F80, control: &Control) -> Calc {
    if let Some(nan) = nan_of(x, x) {
        return nan;
    }
    let (number, is_denormal) = match x.class() {
        Class::Finite { number, denormal } => (number, denormal),
        Class::Infinity if x.is_negative() => return Calc::exact(F80::ONE.negated()),
        _ => return Calc::exact(x),
    };
    let flags = denormal(is_denormal);
    let (sig, exp) = normal(number);
    let negative = x.is_negative();
    match exp + 63 {
        0 if sig == 1 << 63 => {
            // 2^1 - 1 and 2^-1 - 1.
            let half = F80 {
                se: 0xbffe,
                ..F80::ONE
            };
            return Calc::exact(if negative { half } else { F80::ONE });
        }
        0.. => return Calc::exact(x),
        _ => {}
    }
    // (e^t - 1) / t, of t = x ln 2, is near to 1, and x ln 2 is a product of mantissas.
    let mantissa = Fixed::new(sig, -64).mul(LN_2);
    let t = Fixed::new(sig, exp).mul(LN_2);
    let (mut plus, mut minus) = (Fixed::ONE, Fixed::ZERO);
    let mut term = Fixed::ONE;
    let mut n = 1;
    loop {
        term = term.mul(t).div_word(n + 1);
        if term.is_zero() {
            break;
        }
        let sum = if negative && n & 1 == 1 {
            &mut minus
        } else {
            &mut plus
        };
        *sum = sum.add(term);
        n += 1;
    }
    let value = mantissa.mul(plus.sub(minus));
    irrational(value.number(negative, exp + 64), control).with(flags)
}

/// A logarithm to base 2: an integer, or a fixed-point number times a power of 2.
enum Log {
    Integer(i64),
    Irrational {
        value: Fixed,
        exp: i32,
        negative: bool,
    },
}

/// 2 atanh(z) / (z ln 2): the sum of z^2k / (2k + 1), times 2 / ln 2.
fn atanh_by_z(z: Fixed) -> Fixed {
    let square = z.mul(z);
    let (mut power, mut sum) = (Fixed::ONE, Fixed::ONE);
    let mut n = 1;
    loop {
        power = power.mul(square);
        if power.is_zero() {
            return sum.mul(LOG2_E).doubled();
        }
        n += 2;
        sum = sum.add(power.div_word(n));
    }
}

/// Of `sig` times 2 to the power of `exp`.
fn log2(sig: u64, exp: i32) -> Log {
    let mut power = i64::from(exp) + 63;
    if sig == 1 << 63 {
        return Log::Integer(power);
    }
    // A mantissa of √½ to √2.
    let mut m = Fixed::new(sig, -63);
    if sig > ROOT_2 {
        m = Fixed::new(sig, -64);
        power += 1;
    }
    let (distance, below) = m.apart(Fixed::ONE);
    let z = distance.div(m.add(Fixed::ONE));
    let part = z.mul(atanh_by_z(z));
    let (value, negative) = if power == 0 {
        (part, below)
    } else {
        let whole = Fixed::new(power.unsigned_abs(), 0);
        let negative = power < 0;
        if negative == below {
            (whole.add(part), negative)
        } else {
            (whole.sub(part), negative)
        }
    };
    Log::Irrational {
        value,
        exp: 0,
        negative,
    }
}

/// `y` times a logarithm.
fn times_log(y: Number, log: &Log, control: &Control) -> Calc {
    let (sig, exp) = normal(y);
    match *log {
        Log::Integer(0) => Calc::exact(F80::zero(y.negative)),
        Log::Integer(power) => {
            let number = Number {
                negative: power < 0,
                exp: 0,
                sig: u128::from(power.unsigned_abs()),
            };
            Calc::rounded(&y.mul(number), EXTENDED, control)
        }
        Log::Irrational {
            value,
            exp: scale,
            negative,
        } => {
            let product = Fixed::new(sig, -64).mul(value);
            let number = product.number(y.negative != negative, exp + 64 + scale);
            irrational(number, control)
        }
    }
}

/// FYL2X: `y` log2 `x` (SDM vol. 2, table 3-59).
pub(crate) fn log(x: F80, y: F80, control: &Control) -> Calc {
    if let Some(nan) = nan_of(x, y) {
        return nan;
    }
    let negative = y.is_negative();
    let flags = denormal(is_denormal(x) || is_denormal(y));
    match (x.class(), y.class()) {
        (Class::Zero, Class::Zero) => Calc::invalid(),
        (Class::Zero, Class::Infinity) => Calc::exact(F80::infinity(!negative)),
        (Class::Zero, _) => Calc::exact(F80::infinity(!negative)).with(ZERO_DIVIDE),
        _ if x.is_negative() => Calc::invalid(),
        (Class::Infinity, Class::Zero) => Calc::invalid(),
        (Class::Infinity, _) => Calc::exact(F80::infinity(negative)).with(flags),
        (Class::Finite { .. }, Class::Infinity) if x == F80::ONE => Calc::invalid(),
        (Class::Finite { .. }, Class::Infinity) => {
            let below = x.se < F80::ONE.se;
            Calc::exact(F80::infinity(negative != below)).with(flags)
        }
        (Class::Finite { .. }, Class::Zero) => {
            let below = x.se < F80::ONE.se;
            Calc::exact(F80::zero(negative != below)).with(flags)
        }
        (Class::Finite { number: x, .. }, Class::Finite { number: y, .. }) => {
            let (sig, exp) = normal(x);
            times_log(y, &log2(sig, exp), control).with(flags)
        }
        _ => Calc::invalid(),
    }
}

fn is_denormal(value: F80) -> bool {
    matches!(value.class(), Class::Finite { denormal: true, .. })
}

/// FYL2XP1: `y` log2 (`x` + 1) (SDM vol. 2, table 3-60).
pub(crate) fn log_of_one_more(x: F80, y: F80, control: &Control) -> Calc {
    if let Some(nan) = nan_of(x, y) {
        return nan;
    }
    let negative = x.is_negative() != y.is_negative();
    let flags = denormal(is_denormal(x) || is_denormal(y));
    let (number, times) = match (x.class(), y.class()) {
        (Class::Zero, Class::Infinity) => return Calc::invalid(),
        (Class::Zero, _) => return Calc::exact(F80::zero(negative)).with(flags),
        (Class::Finite { number, .. }, Class::Finite { number: times, .. }) => (number, times),
        (Class::Finite { .. }, Class::Zero) if !is_below(x, F80::ONE.negated()) => {
            return Calc::exact(F80::zero(negative)).with(flags);
        }
        (Class::Finite { .. }, Class::Infinity) if is_below(F80::ONE.negated(), x) => {
            return Calc::exact(F80::infinity(negative)).with(flags);
        }
        (Class::Infinity, Class::Zero) => return Calc::invalid(),
        (Class::Infinity, _) if !x.is_negative() => {
            return Calc::exact(F80::infinity(negative)).with(flags);
        }
        _ => return Calc::invalid(),
    };
    let (sig, exp) = normal(number);
    if exp + 63 >= -2 {
        // Of 1/4 and more the sum may be beyond √½ to √2.
        let extended = Control {
            precision: EXTENDED,
            masks: 0x3f,
            rounding: Rounding::Nearest,
        };
        let sum = arithmetic(Arith::Add, x.into(), F80::ONE.into(), &extended);
        let below = Fixed::new(sig, exp.min(-63));
        let outside = exp + 63 >= 0 || !below.is_less(bound(number.negative));
        if outside {
            let inexact = sum.flags & PRECISION;
            let result = log(sum.value, y, control);
            return result.with(flags | inexact);
        }
    }
    // z = x / (2 + x), of which x's exponent is kept apart.
    let two = Fixed::ONE.doubled();
    let size = Fixed::new(sig, exp);
    let divisor = if number.negative {
        two.sub(size)
    } else {
        two.add(size)
    };
    let mantissa = Fixed::new(sig, -64).div(divisor);
    let z = size.div(divisor);
    let value = Log::Irrational {
        value: mantissa.mul(atanh_by_z(z)),
        exp: exp + 64,
        negative: number.negative,
    };
    times_log(times, &value, control).with(flags)
}

/// How far from 0 FYL2XP1's operand may be: √2 - 1 above, 1 - √½ below.
fn bound(negative: bool) -> Fixed {
    if negative {
        Fixed::ONE.sub(Fixed::new(ROOT_2, -64))
    } else {
        Fixed::new(ROOT_2, -63).sub(Fixed::ONE)
    }
}

fn is_below(a: F80, b: F80) -> bool {
    super::arithmetic::compare(a.into(), b.into(), true).0 == super::arithmetic::Order::Less
}

/// FPATAN: the angle of `x`, `y` (SDM vol. 2, table 3-40).
pub(crate) fn arctangent(x: F80, y: F80, control: &Control) -> Calc {
    if let Some(nan) = nan_of(x, y) {
        return nan;
    }
    let negative = y.is_negative();
    let flags = denormal(is_denormal(x) || is_denormal(y));
    // Quarters of π.
    let turn = |quarters: u64| {
        let value = HALF_PI.mul_word(quarters);
        irrational(value.number(negative, -1), control).with(flags)
    };
    let flat = |result: F80| Calc::exact(result).with(flags);
    match (y.class(), x.class()) {
        (Class::Infinity, Class::Infinity) => turn(if x.is_negative() { 3 } else { 1 }),
        (Class::Infinity, _) | (Class::Finite { .. }, Class::Zero) => turn(2),
        (Class::Zero, _) | (_, Class::Infinity) if x.is_negative() => turn(4),
        (Class::Zero, _) | (_, Class::Infinity) => flat(F80::zero(negative)),
        (Class::Finite { number: y, .. }, Class::Finite { number: x, .. }) => {
            angle(x, y, control).with(flags)
        }
        _ => Calc::invalid(),
    }
}

fn angle(x: Number, y: Number, control: &Control) -> Calc {
    let ((x_sig, x_exp), (y_sig, y_exp)) = (normal(x), normal(y));
    let steep = (y_exp, y_sig) > (x_exp, x_sig);
    let ((top, top_exp), (bottom, bottom_exp)) = if steep {
        ((x_sig, x_exp), (y_sig, y_exp))
    } else {
        ((y_sig, y_exp), (x_sig, x_exp))
    };
    let apart = bottom_exp - top_exp;
    if apart > -SMALL && !steep && !x.negative {
        return small_angle(x, y, control);
    }
    let q = Fixed::new(top, -64 - apart).div(Fixed::new(bottom, -64));
    let angle = arctangent_of(q);
    let angle = match (steep, x.negative) {
        (false, false) => {
            // Of a small quotient the digits that `q` has lost count too.
            let mantissa = Fixed::new(top, -64).div(Fixed::new(bottom, -64));
            if apart > 0 && q.is_less(Fixed::new(1, -4)) {
                let value = mantissa.mul(arctangent_by(q));
                return irrational(value.number(y.negative, -apart), control);
            }
            angle
        }
        (false, true) => HALF_PI.doubled().sub(angle),
        (true, false) => HALF_PI.sub(angle),
        (true, true) => HALF_PI.add(angle),
    };
    irrational(angle.number(y.negative, 0), control)
}

/// The quotient, less than 2^-140 of it.
fn small_angle(x: Number, y: Number, control: &Control) -> Calc {
    let quotient = Number {
        negative: false,
        ..y
    }
    .div(Number {
        negative: false,
        ..x
    });
    let nearer = Number {
        negative: y.negative,
        sig: if quotient.sig & 1 == 0 {
            quotient.sig - 1
        } else {
            quotient.sig
        },
        ..quotient
    };
    Calc::rounded(&nearer, EXTENDED, control)
}

/// The arctangent of a quotient of at most 1.
fn arctangent_of(q: Fixed) -> Fixed {
    let eighths = q.mul_word(8).add(Fixed::new(1, -1)).whole();
    let near = Fixed::new(eighths, -3);
    let Some(known) = usize::try_from(eighths)
        .ok()
        .and_then(|at| ARCTANGENTS.get(at.wrapping_sub(1)))
    else {
        return q.mul(arctangent_by(q));
    };
    let (distance, below) = q.apart(near);
    let t = distance.div(Fixed::ONE.add(q.mul(near)));
    let part = t.mul(arctangent_by(t));
    if below {
        known.sub(part)
    } else {
        known.add(part)
    }
}

/// The sum of (-t²)^k / (2k + 1): the arctangent by t.
fn arctangent_by(t: Fixed) -> Fixed {
    let square = t.mul(t);
    let (mut plus, mut minus) = (Fixed::ONE, Fixed::ZERO);
    let mut power = Fixed::ONE;
    let mut n = 1;
    loop {
        power = power.mul(square);
        if power.is_zero() {
            return plus.sub(minus);
        }
        n += 2;
        let sum = if n & 2 != 0 { &mut minus } else { &mut plus };
        *sum = sum.add(power.div_word(n));
    }
}

const _: () = assert!(FRACTION > 2 * 64 - SMALL);
