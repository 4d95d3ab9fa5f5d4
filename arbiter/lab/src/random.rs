//! Random draws. Each source of demands has a stream of its own, so the same demands
//! come under every scheme and policy.

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

/// One stream.
#[derive(Clone, Debug)]
pub(crate) struct Stream(Xoshiro256PlusPlus);

/// A time in microseconds of virtual time.
pub(crate) type Micros = u64;

/// Longer than any run.
const LONGEST: f64 = 1e15;

impl Stream {
    /// The stream of one purpose and one number, of the run with `seed`.
    pub(crate) fn new(seed: u64, purpose: u8, number: u32) -> Self {
        // The seed is expanded by SplitMix64, so neighbours share nothing. The odd
        // factor keeps (seed, stream) pairs apart.
        let stream = u64::from(purpose) << 32 | u64::from(number);
        let mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stream.rotate_left(17);
        Stream(Xoshiro256PlusPlus::seed_from_u64(mixed))
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Uniform in 0..1, with 53 bits.
    fn unit(&mut self) -> f64 {
        const STEP: f64 = 1.0 / (1_u64 << 53) as f64;
        (self.bits() >> 11) as f64 * STEP
    }

    /// True with the probability `p`.
    pub(crate) fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }

    /// Below `limit`, which is not 0.
    pub(crate) fn below(&mut self, limit: u32) -> u32 {
        // The bias is below 2^-32.
        let wide = u128::from(self.bits()) * u128::from(limit);
        u32::try_from(wide >> 64).unwrap_or(0)
    }

    /// Exponential with a mean in milliseconds; at least 1 µs, unless the mean is 0.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the value is limited before"
    )]
    pub(crate) fn exponential(&mut self, mean_ms: f64) -> Micros {
        let micros = -(1.0 - self.unit()).ln() * mean_ms * 1000.0;
        let least = if mean_ms > 0.0 { 1.0 } else { 0.0 };
        micros.clamp(least, LONGEST) as u64
    }

    /// The time to the next event of a Poisson process. `None` means that none comes.
    pub(crate) fn gap(&mut self, per_second: f64) -> Option<Micros> {
        (per_second > 0.0).then(|| self.exponential(1000.0 / per_second))
    }
}
