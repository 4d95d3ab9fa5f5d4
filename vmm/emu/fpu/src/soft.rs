//! Finite numbers, and rounding them to a format (IEEE 754-2008, 4 and 5.4).
//!
//! An operation gives a number with more digits than any format has, and rounding it says all
//! that exceptions ask for: so unmasked responses, which need the result as it is before it is
//! denormal or infinite, come from the same code as masked ones.

/// A number that is not zero: `sig` times 2 to the power of `exp`.
///
/// The last bit of `sig` also stands for anything below it, where `sig` has more than 66 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Number {
    pub(crate) negative: bool,
    pub(crate) exp: i32,
    pub(crate) sig: u128,
}

/// Digits of a significand, and the exponents of the leading digit of normal numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Format {
    pub(crate) digits: u32,
    pub(crate) min: i32,
    pub(crate) max: i32,
}

pub(crate) const SINGLE: Format = Format {
    digits: 24,
    min: -126,
    max: 127,
};
pub(crate) const DOUBLE: Format = Format {
    digits: 53,
    min: -1022,
    max: 1023,
};

/// Rounding control, as MXCSR and the x87 control word have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest,
    Down,
    Up,
    Zero,
}

impl Rounding {
    /// Of the two bits of a control field.
    pub(crate) fn of(control: u32) -> Self {
        match control & 3 {
            0 => Self::Nearest,
            1 => Self::Down,
            2 => Self::Up,
            _ => Self::Zero,
        }
    }
}

/// A significand with its leading digit in bit 63 (or below it, where it is denormal), and the
/// exponent of bit 63.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digits {
    pub(crate) sig: u64,
    pub(crate) exp: i32,
    /// The result is not the number.
    pub(crate) inexact: bool,
    /// Its magnitude is more than the number's.
    pub(crate) up: bool,
}

/// A number in a format: as if exponents had no bounds, and within them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rounded {
    pub(crate) negative: bool,
    /// With unbounded exponents.
    pub(crate) free: Digits,
    /// Within the least exponent: denormal or 0 where `tiny`.
    pub(crate) bounded: Digits,
    /// Below the least normal number after rounding (SDM vol. 1, 4.9.1.5).
    pub(crate) tiny: bool,
    /// Above the greatest number.
    pub(crate) huge: bool,
}

/// `sig` times 2 to the power of `exp` to so many digits, or to fewer where the last would have
/// an exponent below `least`.
fn cut(sig: u128, exp: i32, negative: bool, digits: u32, least: i32, how: Rounding) -> Digits {
    let top = 127 - sig.leading_zeros().cast_signed() + exp;
    let last = (top - digits.cast_signed() + 1).max(least);
    let shift = last - exp;
    let (kept, rest, half) = match shift {
        ..=0 => (sig << (-shift).min(127), 0, 1),
        1..=127 => (sig >> shift, sig & ((1 << shift) - 1), 1 << (shift - 1)),
        128 => (0, sig, 1 << 127),
        // Less than half of the last digit, whatever it is.
        _ => (0, 1, 2),
    };
    let up = match how {
        Rounding::Nearest => rest > half || rest == half && kept & 1 == 1,
        Rounding::Down => negative && rest != 0,
        Rounding::Up => !negative && rest != 0,
        Rounding::Zero => false,
    };
    let kept = kept + u128::from(up);
    // `kept` has at most `digits` bits, or is the power of two above them.
    let (kept, last) = match kept >> digits {
        0 => (kept, last),
        _ => (kept >> 1, last + 1),
    };
    let place = 64 - digits;
    Digits {
        sig: u64::try_from(kept).unwrap_or(0) << place,
        exp: last + digits.cast_signed() - 1,
        inexact: rest != 0,
        up,
    }
}

impl Number {
    /// In a format, rounded.
    pub(crate) fn round(&self, format: Format, how: Rounding) -> Rounded {
        let Format { digits, min, max } = format;
        let free = cut(self.sig, self.exp, self.negative, digits, i32::MIN / 2, how);
        let least = min - digits.cast_signed() + 1;
        let bounded = cut(self.sig, self.exp, self.negative, digits, least, how);
        Rounded {
            negative: self.negative,
            free,
            bounded,
            tiny: free.exp < min,
            huge: free.exp > max,
        }
    }

    /// To an integer, of a magnitude below 2 to the power of 64: `sig`, whose last digit is 1.
    pub(crate) fn integer(&self, how: Rounding) -> Digits {
        let top = 127 - self.sig.leading_zeros().cast_signed() + self.exp;
        // One digit more than there are, and as many as fit.
        let digits = (top + 2).clamp(1, 64).cast_unsigned();
        let cut = cut(self.sig, self.exp, self.negative, digits, 0, how);
        Digits {
            sig: cut.sig >> (63 - cut.exp.clamp(0, 63)),
            ..cut
        }
    }

    /// With the leading digit of `sig` in a bit. Digits that go are left in the last one.
    fn lead(self, bit: u32) -> Self {
        let top = 127 - self.sig.leading_zeros();
        let exp = self.exp + top.cast_signed() - bit.cast_signed();
        let sig = if top <= bit {
            self.sig << (bit - top)
        } else {
            sticky(self.sig, top - bit)
        };
        Self { exp, sig, ..self }
    }

    /// The sum; [`None`] is an exact zero.
    pub(crate) fn add(self, other: Self) -> Option<Self> {
        // 62 digits of 64-bit operands' sum stay below the last of the larger.
        let (a, b) = (self.lead(125), other.lead(125));
        let (large, small) = if (a.exp, a.sig) >= (b.exp, b.sig) {
            (a, b)
        } else {
            (b, a)
        };
        let down = large.exp.abs_diff(small.exp);
        let addend = if down < 126 {
            sticky(small.sig, down)
        } else {
            1
        };
        let sig = if large.negative == small.negative {
            large.sig + addend
        } else {
            large.sig - addend
        };
        (sig != 0).then_some(Self { sig, ..large })
    }

    /// The product of numbers of at most 64 digits.
    pub(crate) fn mul(self, other: Self) -> Self {
        let (a, b) = (self.lead(63), other.lead(63));
        Self {
            negative: a.negative != b.negative,
            exp: a.exp + b.exp,
            sig: a.sig * b.sig,
        }
    }

    /// The quotient of numbers of at most 64 digits.
    pub(crate) fn div(self, other: Self) -> Self {
        let (a, b) = (self.lead(63), other.lead(63));
        let high = (a.sig << 63) / b.sig;
        let rest = (a.sig << 63) % b.sig;
        let low = (rest << 63) / b.sig;
        let left = (rest << 63) % b.sig;
        Self {
            negative: a.negative != b.negative,
            exp: a.exp - b.exp - 126,
            sig: high << 63 | low | u128::from(left != 0),
        }
    }

    /// The square root of the magnitude of a number of at most 64 digits.
    pub(crate) fn sqrt(self) -> Self {
        let lead = self.lead(63);
        // An even exponent, and 136 digits of the radicand: 68 of the root.
        let odd = lead.exp & 1;
        let radicand = lead.sig << odd;
        let exp = lead.exp - odd;
        let (mut root, mut rest) = (0_u128, 0_u128);
        for step in 0..68 {
            let pair = match 64 - 2 * step {
                at @ 0.. => radicand >> at & 3,
                _ => 0,
            };
            rest = rest << 2 | pair;
            root <<= 1;
            let trial = root << 1 | 1;
            if rest >= trial {
                rest -= trial;
                root |= 1;
            }
        }
        // 33 steps used the radicand up; the other 35 are digits after the point, and one more
        // stands for the rest.
        Self {
            negative: false,
            exp: exp / 2 - 36,
            sig: root << 1 | u128::from(rest != 0),
        }
    }
}

/// A shift to the right that leaves what it drops in the last bit.
pub(crate) fn sticky(sig: u128, by: u32) -> u128 {
    match by {
        0 => sig,
        1..=127 => sig >> by | u128::from(sig << (128 - by) != 0),
        _ => u128::from(sig != 0),
    }
}
