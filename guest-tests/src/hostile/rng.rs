//! A small generator whose numbers depend on the seed alone, on every host.

/// `SplitMix64` (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
/// Generators", 2014): every seed gives another sequence.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// The sequence of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// 32 random bits.
    pub fn bits32(&mut self) -> u32 {
        let [a, b, c, d, ..] = self.bits64().to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// 8 random bits.
    pub fn byte(&mut self) -> u8 {
        self.bits64().to_le_bytes()[0]
    }

    /// 0 to `limit` - 1; `limit` is at least 1.
    pub fn below(&mut self, limit: u32) -> u32 {
        // The bias of a remainder is far below what matters here.
        self.bits32() % limit.max(1)
    }

    /// True once in `times`.
    pub fn one_in(&mut self, times: u32) -> bool {
        self.below(times) == 0
    }

    /// One of `choices`, which are not empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        let len = u32::try_from(choices.len()).unwrap_or(u32::MAX);
        choices[self.below(len) as usize]
    }

    /// A number as attackers like them: small, near a power of two, a few bits,
    /// all ones, or anything.
    pub fn nasty(&mut self) -> u64 {
        let shift = self.below(64);
        match self.below(6) {
            0 => u64::from(self.byte()),
            1 => 1 << shift,
            2 => (1 << shift) - 1,
            3 => u64::MAX << shift,
            4 => self.bits64() & self.bits64() & self.bits64(),
            _ => self.bits64(),
        }
    }
}
