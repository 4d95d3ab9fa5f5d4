//! Random numbers for cookies.

use arbiter::{Cookie, Entropy};

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

impl OsRandom {
    /// A cookie that nobody knows; `None` if the source has failed.
    #[must_use]
    pub fn cookie(&mut self) -> Option<Cookie> {
        self.bits().map(Cookie::from_random)
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
}
