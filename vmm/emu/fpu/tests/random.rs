//! Random operands of the kind that finds faults.

#[path = "../../tests/generator.rs"]
mod generator;

pub(crate) use generator::Random;

impl Random {
    /// Bits of a fraction: often few ones, at either end.
    pub(crate) fn fraction(&mut self, bits: u32) -> u64 {
        let all = u64::MAX >> (64 - bits);
        let some = self.below(u64::from(bits)) as u32;
        all & match self.below(8) {
            0 => 0,
            1 => all,
            2 => 1 << some,
            3 => all << some,
            4 => all >> some,
            5 => self.next() << (bits - 1 - some),
            _ => self.next(),
        }
    }

    /// A single or double by the widths of its fields: exponents near the ends, near integers'
    /// bounds and near the other operand's.
    pub(crate) fn float(&mut self, fraction: u32, exponent: u32) -> u64 {
        let most = (1_u64 << exponent) - 1;
        let bias = most >> 1;
        let field = match self.below(10) {
            0 => 0,
            1 => 1 + self.below(3),
            2 => most - self.below(3),
            3 => most,
            4 => bias + 29 + self.below(5),
            5 => bias + 61 + self.below(5),
            6 => bias / 2 + self.below(5),
            7 => self.below(most),
            8 => self.below(2 * u64::from(fraction)),
            _ => bias - 3 + self.below(6),
        };
        let sign = self.below(2) << (fraction + exponent);
        sign | field.min(most) << fraction | self.fraction(fraction)
    }

    pub(crate) fn single(&mut self) -> u64 {
        self.float(23, 8)
    }

    pub(crate) fn double(&mut self) -> u64 {
        self.float(52, 11)
    }

    /// An integer at a bound of a conversion, or any.
    pub(crate) fn integer(&mut self) -> u64 {
        match self.below(4) {
            0 => (1_u64 << self.below(64)).wrapping_sub(self.below(3)),
            1 => self.below(100).wrapping_neg(),
            _ => self.next() >> self.below(64),
        }
    }
}
