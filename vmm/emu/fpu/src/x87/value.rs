//! Values of x87 registers (SDM vol. 1, 4.2.2 and 8.2.2), and what results are in them.

use crate::soft::{DOUBLE, Format, Number, Rounded, Rounding, SINGLE};

/// Exception flags of the status word, whose masks have the same bits of the control word.
pub(crate) const INVALID: u16 = 1;
pub(crate) const DENORMAL: u16 = 2;
pub(crate) const ZERO_DIVIDE: u16 = 4;
pub(crate) const OVERFLOW: u16 = 8;
pub(crate) const UNDERFLOW: u16 = 16;
pub(crate) const PRECISION: u16 = 32;
/// Those that are found before a result is computed.
pub(crate) const BEFORE: u16 = INVALID | DENORMAL | ZERO_DIVIDE;

const BIAS: i32 = 16383;
const INTEGER: u64 = 1 << 63;
const QUIET: u64 = 1 << 62;
const SIGN: u16 = 0x8000;
const TOP: u16 = 0x7fff;
/// What is taken from, or added to, the exponent of a result out of range whose exception is
/// unmasked (SDM vol. 1, 8.5.4 and 8.5.5).
const ADJUST: i32 = 24576;

/// Double extended precision, its exponents, and all 64 digits.
pub(crate) const EXTENDED: Format = Format {
    digits: 64,
    min: -16382,
    max: 16383,
};

/// A register: significand with its integer bit, exponent with the sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct F80 {
    pub sig: u64,
    pub se: u16,
}

/// What a register holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Zero,
    /// `denormal` of denormals and pseudo-denormals.
    Finite {
        number: Number,
        denormal: bool,
    },
    Infinity,
    Quiet,
    Signaling,
    /// Unnormals, pseudo-infinities and pseudo-NaNs (SDM vol. 1, 8.2.2).
    Unsupported,
}

impl F80 {
    /// The QNaN of masked invalid operations (SDM vol. 1, table 4-3).
    pub(crate) const INDEFINITE: Self = Self {
        sig: INTEGER | QUIET,
        se: SIGN | TOP,
    };
    pub(crate) const ONE: Self = Self {
        sig: INTEGER,
        se: 0x3fff,
    };

    pub(crate) const fn zero(negative: bool) -> Self {
        Self {
            sig: 0,
            se: if negative { SIGN } else { 0 },
        }
    }

    pub(crate) const fn infinity(negative: bool) -> Self {
        Self {
            sig: INTEGER,
            se: TOP | if negative { SIGN } else { 0 },
        }
    }

    fn new(negative: bool, field: i32, sig: u64) -> Self {
        let field = u16::try_from(field).unwrap_or(0) & TOP;
        Self {
            sig,
            se: field | if negative { SIGN } else { 0 },
        }
    }

    pub(crate) fn is_negative(self) -> bool {
        self.se & SIGN != 0
    }

    pub(crate) fn negated(self) -> Self {
        Self {
            se: self.se ^ SIGN,
            ..self
        }
    }

    pub(crate) fn absolute(self) -> Self {
        Self {
            se: self.se & TOP,
            ..self
        }
    }

    /// A NaN that does not signal.
    pub(crate) fn quieted(self) -> Self {
        Self {
            sig: self.sig | QUIET,
            ..self
        }
    }

    pub(crate) fn class(self) -> Class {
        let field = self.se & TOP;
        match (field, self.sig & INTEGER != 0) {
            (0, _) if self.sig == 0 => Class::Zero,
            (0, _) => Class::Finite {
                number: self.number(1),
                denormal: true,
            },
            (_, false) => Class::Unsupported,
            (TOP, true) if self.sig == INTEGER => Class::Infinity,
            (TOP, true) if self.sig & QUIET != 0 => Class::Quiet,
            (TOP, true) => Class::Signaling,
            (field, true) => Class::Finite {
                number: self.number(field),
                denormal: false,
            },
        }
    }

    fn number(self, field: u16) -> Number {
        Number {
            negative: self.is_negative(),
            exp: i32::from(field) - BIAS - 63,
            sig: u128::from(self.sig),
        }
    }

    pub(crate) fn is_nan(self) -> bool {
        matches!(self.class(), Class::Quiet | Class::Signaling)
    }

    /// The tag of FSTENV's image: valid, zero, special (SDM vol. 1, 8.1.7).
    pub(crate) fn tag(self) -> u16 {
        match self.class() {
            Class::Finite {
                denormal: false, ..
            } => 0,
            Class::Zero => 1,
            _ => 2,
        }
    }

    /// Of the 10 bytes that FSTP and FXSAVE store.
    #[must_use]
    pub fn of_bytes(bytes: [u8; 10]) -> Self {
        let mut sig = [0; 8];
        sig.copy_from_slice(&bytes[..8]);
        Self {
            sig: u64::from_le_bytes(sig),
            se: u16::from_le_bytes([bytes[8], bytes[9]]),
        }
    }

    /// As FSTP stores it.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 10] {
        let mut bytes = [0; 10];
        bytes[..8].copy_from_slice(&self.sig.to_le_bytes());
        bytes[8..].copy_from_slice(&self.se.to_le_bytes());
        bytes
    }

    /// An integer, exactly.
    pub(crate) fn of_integer(value: i64) -> Self {
        Self::of_magnitude(value < 0, value.unsigned_abs())
    }

    pub(crate) fn of_magnitude(negative: bool, magnitude: u64) -> Self {
        if magnitude == 0 {
            return Self::zero(negative);
        }
        let shift = magnitude.leading_zeros();
        Self::new(
            negative,
            BIAS + 63 - shift.cast_signed(),
            magnitude << shift,
        )
    }
}

/// An operand: a register, or what a real of 32 or 64 bits in memory is in one. A signaling NaN
/// signals still, and a denormal counts as one, though a register holds it normalised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Operand {
    pub(crate) value: F80,
    pub(crate) denormal: bool,
}

impl From<F80> for Operand {
    fn from(value: F80) -> Self {
        let denormal = matches!(value.class(), Class::Finite { denormal: true, .. });
        Self { value, denormal }
    }
}

impl Operand {
    pub(crate) fn of_single(bits: u32) -> Self {
        Self::of_real(u64::from(bits), SINGLE, 8)
    }

    pub(crate) fn of_double(bits: u64) -> Self {
        Self::of_real(bits, DOUBLE, 11)
    }

    fn of_real(bits: u64, format: Format, exponent: u32) -> Self {
        let fraction_bits = format.digits - 1;
        let most = (1_u64 << exponent) - 1;
        let fraction = bits & ((1 << fraction_bits) - 1);
        let field = bits >> fraction_bits & most;
        let negative = bits >> (fraction_bits + exponent) & 1 != 0;
        let placed = fraction << (63 - fraction_bits);
        let value = match field {
            0 if fraction == 0 => F80::zero(negative),
            0 => {
                let shift = placed.leading_zeros();
                let field = format.min + BIAS - shift.cast_signed();
                F80::new(negative, field, placed << shift)
            }
            _ if field == most => F80::new(negative, i32::from(TOP), placed | INTEGER),
            _ => {
                let exp = i32::try_from(field).unwrap_or(0) - format.max;
                F80::new(negative, exp + BIAS, placed | INTEGER)
            }
        };
        Self {
            value,
            denormal: field == 0 && fraction != 0,
        }
    }

    pub(crate) fn class(self) -> Class {
        self.value.class()
    }
}

/// What the control word says on results (SDM vol. 1, 8.1.5).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Control {
    /// Masks of exceptions, 1 where masked.
    pub(crate) masks: u16,
    pub(crate) rounding: Rounding,
    /// Precision control; of FADD, FSUB, FMUL, FDIV and FSQRT alone.
    pub(crate) precision: Format,
}

impl Control {
    pub(crate) fn of(word: u16) -> Self {
        // 01 is reserved; the host's processor takes it as 64 digits.
        let digits = match word >> 8 & 3 {
            0 => 24,
            2 => 53,
            _ => 64,
        };
        Self {
            masks: word & 0x3f,
            rounding: Rounding::of(u32::from(word >> 10)),
            precision: Format { digits, ..EXTENDED },
        }
    }

    pub(crate) fn unmasked(&self, flags: u16) -> u16 {
        flags & !self.masks & 0x3f
    }
}

/// A result, with the exceptions of making it. Where one of those before it is unmasked the
/// value is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Calc {
    pub(crate) value: F80,
    pub(crate) flags: u16,
    /// C1: rounded up.
    pub(crate) up: bool,
}

impl Calc {
    /// A value that nothing rounds.
    pub(crate) fn exact(value: F80) -> Self {
        Self {
            value,
            flags: 0,
            up: false,
        }
    }

    pub(crate) fn invalid() -> Self {
        Self::exact(F80::INDEFINITE).with(INVALID)
    }

    pub(crate) fn with(self, flags: u16) -> Self {
        Self {
            flags: self.flags | flags,
            ..self
        }
    }

    /// A number in a register: rounded, denormal, infinite, or with its exponent adjusted, as
    /// the control word says (SDM vol. 1, 8.5.4 to 8.5.6).
    pub(crate) fn rounded(number: &Number, format: Format, control: &Control) -> Self {
        let Rounded {
            negative,
            free,
            bounded,
            tiny,
            huge,
        } = number.round(format, control.rounding);
        let precision = |inexact| if inexact { PRECISION } else { 0 };
        if huge && control.masks & OVERFLOW != 0 {
            return Self::overflowed(negative, format, control.rounding);
        }
        let (digits, adjust, flags) = if huge {
            (free, -ADJUST, OVERFLOW)
        } else if tiny && control.masks & UNDERFLOW == 0 {
            (free, ADJUST, UNDERFLOW)
        } else if tiny && bounded.inexact {
            (bounded, 0, UNDERFLOW)
        } else {
            (bounded, 0, 0)
        };
        let field = digits.exp + BIAS + adjust;
        // Of FSCALE alone: out of range though it is adjusted.
        let beyond = digits.sig & INTEGER != 0 && !(1..i32::from(TOP)).contains(&field);
        let value = match digits.sig & INTEGER {
            0 => F80::new(negative, 0, digits.sig),
            _ if beyond && tiny => F80::zero(negative),
            _ if beyond => F80::infinity(negative),
            _ => F80::new(negative, field, digits.sig),
        };
        Self {
            value,
            flags: flags | precision(digits.inexact || beyond),
            up: digits.up || beyond && huge,
        }
    }

    /// Overflow whose exception is masked (SDM vol. 1, table 4-10).
    fn overflowed(negative: bool, format: Format, rounding: Rounding) -> Self {
        let away = match rounding {
            Rounding::Nearest => true,
            Rounding::Down => negative,
            Rounding::Up => !negative,
            Rounding::Zero => false,
        };
        let most = u64::MAX << (64 - format.digits);
        Self {
            value: if away {
                F80::infinity(negative)
            } else {
                F80::new(negative, i32::from(TOP) - 1, most)
            },
            flags: OVERFLOW | PRECISION,
            up: away,
        }
    }
}

/// A real of 32 or 64 bits in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) bits: u64,
    pub(crate) flags: u16,
    pub(crate) up: bool,
}

/// What FST stores of a register in a format of memory.
pub(crate) fn narrowed(value: F80, format: Format, control: &Control) -> Stored {
    let fraction_bits = format.digits - 1;
    let exponent = if fraction_bits == 23 { 8 } else { 11 };
    let most = ((1_u64 << exponent) - 1) << fraction_bits;
    let sign = u64::from(value.is_negative()) << (fraction_bits + exponent);
    let plain = |bits| Stored {
        bits,
        flags: 0,
        up: false,
    };
    let nan = |value: F80| {
        let fraction = value.quieted().sig << 1 >> (64 - fraction_bits);
        plain(sign | most | fraction)
    };
    match value.class() {
        Class::Zero => plain(sign),
        Class::Infinity => plain(sign | most),
        Class::Quiet => nan(value),
        Class::Signaling => Stored {
            flags: INVALID,
            ..nan(value)
        },
        Class::Unsupported => Stored {
            flags: INVALID,
            // The indefinite: negative, whatever the sign was.
            bits: 1 << (fraction_bits + exponent) | most | 1 << (fraction_bits - 1),
            up: false,
        },
        Class::Finite { number, .. } => real(&number, format, control, sign, most),
    }
}

fn real(number: &Number, format: Format, control: &Control, sign: u64, most: u64) -> Stored {
    let fraction_bits = format.digits - 1;
    let rounded = number.round(format, control.rounding);
    if rounded.huge {
        let calc = Calc::overflowed(number.negative, format, control.rounding);
        // Where it is unmasked nothing is stored, and nothing inexact.
        let masked = control.masks & OVERFLOW != 0;
        let greatest = most - 1;
        let bits = if calc.up { most } else { greatest };
        return Stored {
            bits: sign | bits,
            flags: OVERFLOW | if masked { PRECISION } else { 0 },
            up: calc.up,
        };
    }
    let unmasked = control.masks & UNDERFLOW == 0;
    let digits = if rounded.tiny && unmasked {
        rounded.free
    } else {
        rounded.bounded
    };
    let flags = match (rounded.tiny, digits.inexact) {
        // Nothing is stored, and nothing inexact.
        (true, _) if unmasked => UNDERFLOW,
        (true, true) => UNDERFLOW | PRECISION,
        (false, true) => PRECISION,
        (_, false) => 0,
    };
    let digits = rounded.bounded;
    // The exponent field is one less where the leading digit, which is not stored, is 1 and adds
    // one to it.
    let field = i64::from(digits.exp - format.min).cast_unsigned() << fraction_bits;
    let fraction = digits.sig >> (64 - format.digits);
    Stored {
        bits: sign | (field + fraction),
        flags,
        up: digits.up,
    }
}

/// A register to an integer of so many bits; [`None`] where it is none (SDM vol. 2, FIST).
/// Also whether it is inexact, and whether it was rounded up.
pub(crate) fn integer(value: F80, bits: u32, rounding: Rounding) -> Option<(i64, bool, bool)> {
    let number = match value.class() {
        Class::Zero => return Some((0, false, false)),
        Class::Finite { number, .. } => number,
        _ => return None,
    };
    let top = number.exp + 127 - number.sig.leading_zeros().cast_signed();
    if top >= 64 {
        return None;
    }
    let whole = number.integer(rounding);
    let least = 1_u64 << (bits - 1);
    let limit = if number.negative { least } else { least - 1 };
    if whole.sig > limit {
        return None;
    }
    let value = whole.sig.cast_signed();
    let value = if number.negative {
        value.wrapping_neg()
    } else {
        value
    };
    Some((value, whole.inexact, whole.up))
}
