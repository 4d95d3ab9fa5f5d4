//! Status flags, worked out when somebody asks.

use serde::{Deserialize, Serialize};

/// CF.
pub(crate) const CF: u64 = 1 << 0;
/// PF.
pub(crate) const PF: u64 = 1 << 2;
/// AF.
pub(crate) const AF: u64 = 1 << 4;
/// ZF.
pub(crate) const ZF: u64 = 1 << 6;
/// SF.
pub(crate) const SF: u64 = 1 << 7;
/// OF.
pub(crate) const OF: u64 = 1 << 11;
/// The six status flags.
pub(crate) const STATUS: u64 = CF | PF | AF | ZF | SF | OF;

/// Bits of `aux`.
const CARRY: u64 = 1 << 63;
const CARRY_INTO_TOP: u64 = 1 << 62;
const HALF: u64 = 1 << 3;
/// Turns SF over, for what no result has (POPF may set ZF and SF).
const TURN_SF: u64 = 1 << 0;
/// Turns PF over.
const TURN_PF: u64 = 1 << 1;

/// The six status flags as the last result and the carries that led to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(C)]
pub struct Flags {
    /// The result, sign-extended: ZF, SF and PF.
    res: u64,
    /// Bit 63 is CF, bit 62 the carry into the top bit (OF is where they differ), bit 3 AF, bits 0
    /// and 1 as below. What the others are means nothing.
    aux: u64,
}

impl Default for Flags {
    fn default() -> Self {
        Self::from_bits(0)
    }
}

impl Flags {
    /// Of a logical operation.
    #[inline(always)]
    pub(crate) fn logic(res: u64) -> Self {
        Self { res, aux: 0 }
    }

    /// Of a sum or a difference of 64 bits: the carries out of each bit.
    #[inline(always)]
    pub(crate) fn carries(res: u64, carries: u64) -> Self {
        Self {
            res,
            aux: carries & !(TURN_SF | TURN_PF),
        }
    }

    /// Of one of `bits` bits, which are fewer: the carries into each bit, and into the one above.
    #[inline(always)]
    pub(crate) fn carries_into(res: u64, carries: u64, bits: u32) -> Self {
        Self {
            res,
            aux: carries << (63 - bits) | carries >> 1 & HALF,
        }
    }

    /// With a result and its CF and OF; AF is 0.
    #[inline(always)]
    pub(crate) fn result(res: u64, cf: bool, of: bool) -> Self {
        let into = cf != of;
        Self {
            res,
            aux: u64::from(cf) << 63 | u64::from(into) << 62,
        }
    }

    /// As these, with CF as it was in `old`.
    #[inline(always)]
    pub(crate) fn keep_carry(self, old: Flags) -> Self {
        // OF is the difference of both bits, so both turn over if CF does.
        let turn = (self.aux ^ old.aux) & CARRY;
        Self {
            res: self.res,
            aux: self.aux ^ (turn | turn >> 1),
        }
    }

    /// As these, with another CF.
    #[inline(always)]
    pub(crate) fn with_carry(self, cf: bool) -> Self {
        self.keep_carry(Self {
            res: 0,
            aux: u64::from(cf) << 63,
        })
    }

    /// As these, with CF and OF so.
    #[inline(always)]
    pub(crate) fn with_carry_overflow(self, cf: bool, of: bool) -> Self {
        let kept = self.aux & !(CARRY | CARRY_INTO_TOP);
        Self {
            res: self.res,
            aux: kept | Self::result(0, cf, of).aux,
        }
    }

    /// As these, with CF the top bit of a value of `bits` bits, and OF whether the next differs.
    #[inline(always)]
    pub(crate) fn with_carries_of(self, value: u64, bits: u32) -> Self {
        const BOTH: u64 = CARRY | CARRY_INTO_TOP;
        Self {
            res: self.res,
            aux: self.aux & !BOTH | value << (64 - bits) & BOTH,
        }
    }

    /// From a value of RFLAGS.
    pub(crate) fn from_bits(rflags: u64) -> Self {
        let bit = |flag: u64| rflags & flag != 0;
        // Of 1 the parity is odd, of 3 even.
        let res = match (bit(ZF), bit(PF)) {
            (true, _) => 0,
            (false, false) => 1,
            (false, true) => 3,
        };
        let mut flags = Self::result(res, bit(CF), bit(OF));
        flags.aux |= u64::from(bit(AF)) << 3;
        if bit(SF) {
            flags.aux |= TURN_SF;
        }
        if bit(ZF) && !bit(PF) {
            flags.aux |= TURN_PF;
        }
        flags
    }

    /// The flags at their places in RFLAGS.
    pub(crate) fn bits(self) -> u64 {
        let at = |flag: u64, set: bool| if set { flag } else { 0 };
        at(CF, self.cf())
            | at(PF, self.pf())
            | at(AF, self.aux & HALF != 0)
            | at(ZF, self.zf())
            | at(SF, self.sf())
            | at(OF, self.of())
    }

    /// CF.
    #[inline(always)]
    pub(crate) fn cf(self) -> bool {
        self.aux & CARRY != 0
    }

    /// ZF.
    #[inline(always)]
    pub(crate) fn zf(self) -> bool {
        self.res == 0
    }

    /// SF.
    #[inline(always)]
    pub(crate) fn sf(self) -> bool {
        (self.res >> 63 ^ self.aux & TURN_SF) != 0
    }

    /// OF.
    #[inline(always)]
    pub(crate) fn of(self) -> bool {
        (self.aux ^ self.aux << 1) & CARRY != 0
    }

    /// PF: the low byte has an even number of ones.
    #[inline(always)]
    pub(crate) fn pf(self) -> bool {
        let odd = (self.res & 0xff).count_ones() & 1 != 0;
        odd == (self.aux & TURN_PF != 0)
    }

    /// A condition, by its number in opcodes (SDM vol. 1, appendix B).
    #[inline(always)]
    pub(crate) fn holds(self, condition: u8) -> bool {
        let positive = match condition >> 1 & 7 {
            0 => self.of(),
            1 => self.cf(),
            2 => self.zf(),
            3 => self.cf() | self.zf(),
            4 => self.sf(),
            5 => self.pf(),
            6 => self.sf() != self.of(),
            _ => self.zf() | (self.sf() != self.of()),
        };
        positive != (condition & 1 != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_of_rflags_comes_back() {
        for number in 0..64u64 {
            let bits = [CF, PF, AF, ZF, SF, OF];
            let rflags: u64 = bits
                .iter()
                .enumerate()
                .filter(|(bit, _)| number >> bit & 1 != 0)
                .map(|(_, flag)| flag)
                .sum();
            let flags = Flags::from_bits(rflags);
            assert_eq!(flags.bits(), rflags);
            for cf in [false, true] {
                let expected = rflags & !CF | u64::from(cf);
                assert_eq!(flags.with_carry(cf).bits(), expected);
                let none = flags.with_carry_overflow(cf, false).bits();
                assert_eq!(none, expected & !OF);
            }
        }
    }
}
