//! Fixed-point numbers of 384 fractional bits, for what FSIN and its kin compute: a register has
//! 64 digits, and no result of theirs is nearer than about 2^-140 of itself to a place where
//! rounding changes, as far as chance goes.

use crate::soft::Number;

const LIMBS: usize = 7;
/// Bits behind the point; before it are 64.
pub(crate) const FRACTION: i32 = 384;

/// Not negative; the least limb first, the last before the point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fixed([u64; LIMBS]);

#[allow(clippy::cast_possible_truncation, reason = "the low half is meant")]
fn low(value: u128) -> u64 {
    value as u64
}

fn high(value: u128) -> u64 {
    (value >> 64) as u64
}

impl Fixed {
    pub(crate) const ZERO: Self = Self([0; LIMBS]);
    pub(crate) const ONE: Self = Self([0, 0, 0, 0, 0, 0, 1]);

    pub(crate) const fn of_limbs(limbs: [u64; LIMBS]) -> Self {
        Self(limbs)
    }

    /// `sig` times 2 to the power of `exp`, its digits beyond the last dropped. The number is
    /// below 2^64.
    pub(crate) fn new(sig: u64, exp: i32) -> Self {
        let at = FRACTION + exp;
        let mut limbs = [0; LIMBS];
        if at <= -64 {
            return Self(limbs);
        }
        if at < 0 {
            limbs[0] = sig >> -at;
            return Self(limbs);
        }
        let (limb, bit) = (at.cast_unsigned() as usize / 64, at & 63);
        let wide = u128::from(sig) << bit;
        for (n, part) in [low(wide), high(wide)].into_iter().enumerate() {
            if let Some(place) = limbs.get_mut(limb + n) {
                *place = part;
            }
        }
        Self(limbs)
    }

    /// The part before the point.
    pub(crate) fn whole(self) -> u64 {
        self.0[LIMBS - 1]
    }

    pub(crate) fn add(self, other: Self) -> Self {
        let mut carry = false;
        let mut limbs = self.0;
        for (a, b) in limbs.iter_mut().zip(other.0) {
            let (sum, first) = a.overflowing_add(b);
            let (sum, second) = sum.overflowing_add(u64::from(carry));
            (*a, carry) = (sum, first || second);
        }
        Self(limbs)
    }

    /// The difference; `other` is not more.
    pub(crate) fn sub(self, other: Self) -> Self {
        let mut borrow = false;
        let mut limbs = self.0;
        for (a, b) in limbs.iter_mut().zip(other.0) {
            let (rest, first) = a.overflowing_sub(b);
            let (rest, second) = rest.overflowing_sub(u64::from(borrow));
            (*a, borrow) = (rest, first || second);
        }
        Self(limbs)
    }

    /// The difference without its sign, and whether it is negative.
    pub(crate) fn apart(self, other: Self) -> (Self, bool) {
        if self.is_less(other) {
            (other.sub(self), true)
        } else {
            (self.sub(other), false)
        }
    }

    pub(crate) fn is_less(self, other: Self) -> bool {
        self.0.iter().rev().lt(other.0.iter().rev())
    }

    pub(crate) fn is_zero(self) -> bool {
        self == Self::ZERO
    }

    pub(crate) fn doubled(self) -> Self {
        self.add(self)
    }

    pub(crate) fn mul(self, other: Self) -> Self {
        let mut product = [0_u64; 2 * LIMBS];
        for (i, a) in self.0.into_iter().enumerate() {
            let mut carry = 0;
            for (j, b) in other.0.into_iter().enumerate() {
                let part =
                    u128::from(a) * u128::from(b) + u128::from(product[i + j]) + u128::from(carry);
                (product[i + j], carry) = (low(part), high(part));
            }
            product[i + LIMBS] = carry;
        }
        let mut limbs = [0; LIMBS];
        limbs.copy_from_slice(&product[LIMBS - 1..2 * LIMBS - 1]);
        Self(limbs)
    }

    pub(crate) fn mul_word(self, word: u64) -> Self {
        let mut carry = 0;
        let mut limbs = self.0;
        for limb in &mut limbs {
            let part = u128::from(*limb) * u128::from(word) + u128::from(carry);
            (*limb, carry) = (low(part), high(part));
        }
        Self(limbs)
    }

    pub(crate) fn div_word(self, word: u64) -> Self {
        let mut rest = 0;
        let mut limbs = self.0;
        for limb in limbs.iter_mut().rev() {
            let part = u128::from(rest) << 64 | u128::from(*limb);
            *limb = low(part / u128::from(word));
            rest = low(part % u128::from(word));
        }
        Self(limbs)
    }

    /// The quotient, where it is below 2^63 and the divisor below 2^62.
    pub(crate) fn div(self, divisor: Self) -> Self {
        let mut rest = Self::ZERO;
        let mut quotient = Self::ZERO;
        let bits = 64 * LIMBS;
        for at in (0..bits).rev() {
            rest = rest.doubled();
            rest.0[0] |= self.0[at / 64] >> (at % 64) & 1;
            quotient = quotient.doubled();
            if !rest.is_less(divisor) {
                rest = rest.sub(divisor);
                quotient.0[0] |= 1;
            }
        }
        for _ in 0..FRACTION {
            rest = rest.doubled();
            quotient = quotient.doubled();
            if !rest.is_less(divisor) {
                rest = rest.sub(divisor);
                quotient.0[0] |= 1;
            }
        }
        quotient
    }

    /// The number times 2 to the power of `exp`, which is irrational: its last digit stands for
    /// those that follow for ever. [`None`] is 0.
    pub(crate) fn number(self, negative: bool, exp: i32) -> Option<Number> {
        let top = self.0.iter().rposition(|limb| *limb != 0)?;
        let limb = |back: usize| top.checked_sub(back).map_or(0, |at| u128::from(self.0[at]));
        let shift = self.0[top].leading_zeros();
        let wide = limb(0) << 64 | limb(1);
        let sig = match shift {
            0 => wide,
            _ => wide << shift | limb(2) >> (64 - shift),
        };
        let place = i32::try_from(64 * top).unwrap_or(0) - 64 - FRACTION - shift.cast_signed();
        Some(Number {
            negative,
            // 126 digits, of which the last is 1.
            sig: sig >> 2 | 1,
            exp: exp + place + 2,
        })
    }
}
