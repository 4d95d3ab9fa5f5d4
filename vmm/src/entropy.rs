//! Random numbers: for cookies, and for guests that have no other source.

use arbiter::{Cookie, Entropy};
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

/// The operating system's source of random bits (`getrandom(2)`).
#[derive(Debug, Clone, Copy, Default)]
pub struct OsRandom;

impl Entropy for OsRandom {
    fn bits(&mut self) -> Option<u64> {
        match getrandom::u64() {
            Ok(bits) => Some(bits),
            Err(error) => {
                // The guest sees a #GP, and no number that could be guessed.
                log::error!("the operating system has no random numbers: {error}");
                None
            }
        }
    }
}

/// Where the random numbers of a machine come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Randomness {
    /// The operating system.
    System,
    /// A number that the user gave: the same numbers each time, which anybody can guess who
    /// knows it.
    Seeded(SplitMix64),
}

impl Randomness {
    /// From a seed, if there is one.
    #[must_use]
    pub fn of(seed: Option<u64>) -> Self {
        seed.map_or(Self::System, |seed| {
            Self::Seeded(SplitMix64::seed_from_u64(seed))
        })
    }

    /// A source whose numbers do not depend on how many are taken from this one.
    #[must_use]
    pub fn fork(&mut self) -> Self {
        match self {
            Self::System => Self::System,
            Self::Seeded(numbers) => Self::of(Some(numbers.next_u64())),
        }
    }

    /// 32 bytes; `None` if the source has failed.
    #[must_use]
    pub fn bytes(&mut self) -> Option<[u8; 32]> {
        let mut bytes = [0; 32];
        let (words, _) = bytes.as_chunks_mut::<8>();
        for word in words {
            *word = self.bits()?.to_le_bytes();
        }
        Some(bytes)
    }

    /// A cookie; `None` if the source has failed.
    #[must_use]
    pub fn cookie(&mut self) -> Option<Cookie> {
        self.bits().map(Cookie::from_random)
    }
}

impl Entropy for Randomness {
    fn bits(&mut self) -> Option<u64> {
        match self {
            Self::System => OsRandom.bits(),
            Self::Seeded(numbers) => Some(numbers.next_u64()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_differ() {
        let mut numbers: Vec<u64> = (0..64).filter_map(|_| OsRandom.bits()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 64);
    }

    /// The first numbers of the published generator with the seed 1234567.
    #[test]
    fn a_seed_gives_the_same_numbers_each_time() {
        let mut seeded = Randomness::of(Some(1_234_567));
        let first: Vec<_> = (0..3).filter_map(|_| seeded.bits()).collect();
        assert_eq!(
            first,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
        let mut again = Randomness::of(Some(1_234_567));
        assert_eq!(again.bytes(), Randomness::of(Some(1_234_567)).bytes());
        assert_ne!(again.fork().bits(), again.fork().bits());
    }

    #[test]
    fn without_a_seed_numbers_are_the_systems() {
        let (mut one, mut other) = (Randomness::of(None), Randomness::of(None));
        assert_ne!(one.bytes(), other.bytes());
        assert_eq!(one.fork(), Randomness::System);
    }
}
