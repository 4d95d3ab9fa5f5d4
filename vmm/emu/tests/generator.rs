//! The generator of random cases; `emu-fpu`'s tests have it too.

/// A small generator: the same cases in each run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }

    pub(crate) fn chance(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }
}
