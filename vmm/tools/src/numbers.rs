//! Lists of vCPUs or cores.

use std::ops::RangeInclusive;
use std::str::FromStr;

use thiserror::Error;

/// Numbers of vCPUs or cores: `0,2-3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbers(Vec<RangeInclusive<u32>>);

/// A list of numbers that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("'{0}' is neither a number nor a range that ascends; give a list like 0,2-3")]
pub struct NumbersError(String);

impl FromStr for Numbers {
    type Err = NumbersError;

    fn from_str(text: &str) -> Result<Self, NumbersError> {
        let range = |part: &str| {
            let number = |digits: &str| -> Option<u32> {
                let plain = digits.bytes().all(|digit| digit.is_ascii_digit());
                plain.then(|| digits.parse().ok()).flatten()
            };
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let range = number(first)?..=number(last)?;
            (!range.is_empty()).then_some(range)
        };
        let parts = text.split(',').map(str::trim);
        parts
            .map(|part| range(part).ok_or_else(|| NumbersError(part.to_owned())))
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl Numbers {
    /// All of them in order, each once.
    ///
    /// # Errors
    /// One is not below `count`: the least such one.
    pub fn below(&self, count: u32) -> Result<Vec<u32>, u32> {
        let beyond = |range: &&RangeInclusive<u32>| *range.end() >= count;
        if let Some(range) = self.0.iter().find(beyond) {
            return Err((*range.start()).max(count));
        }
        let mut all: Vec<u32> = self.0.iter().cloned().flatten().collect();
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    /// `number` is one of them.
    #[must_use]
    pub fn has(&self, number: u32) -> bool {
        self.0.iter().any(|range| range.contains(&number))
    }
}
