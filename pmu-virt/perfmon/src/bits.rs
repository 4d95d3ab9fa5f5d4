//! Sets of PMDs.

use std::fmt;

use perfmon_abi::PMD_WORDS;

/// A set of PMD indices below 128, as the interface's vectors of bits hold it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PmdBits(u128);

impl PmdBits {
    /// The set without members.
    pub const EMPTY: PmdBits = PmdBits(0);

    /// The set that a structure's field holds.
    #[must_use]
    pub fn from_words(words: [u64; PMD_WORDS]) -> Self {
        PmdBits(u128::from(words[0]) | u128::from(words[1]) << 64)
    }

    /// The same for a structure's field.
    #[must_use]
    pub fn words(self) -> [u64; PMD_WORDS] {
        let bytes = self.0.to_le_bytes();
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        [word(0), word(8)]
    }

    /// Adds an index. One above 127 cannot be a member and changes nothing.
    pub fn insert(&mut self, pmd: u16) {
        if pmd < 128 {
            self.0 |= 1 << pmd;
        }
    }

    /// Takes an index out.
    pub fn remove(&mut self, pmd: u16) {
        if pmd < 128 {
            self.0 &= !(1 << pmd);
        }
    }

    /// Whether `pmd` is a member.
    #[must_use]
    pub fn contains(self, pmd: u16) -> bool {
        pmd < 128 && self.0 & (1 << pmd) != 0
    }

    /// Whether there is no member.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Number of members.
    #[must_use]
    pub fn len(self) -> usize {
        usize::try_from(self.0.count_ones()).unwrap_or(0)
    }

    /// The members of either set.
    #[must_use]
    pub fn union(self, other: PmdBits) -> Self {
        PmdBits(self.0 | other.0)
    }

    /// The members of both.
    #[must_use]
    pub fn intersection(self, other: PmdBits) -> Self {
        PmdBits(self.0 & other.0)
    }

    /// The members that are not in `other`.
    #[must_use]
    pub fn difference(self, other: PmdBits) -> Self {
        PmdBits(self.0 & !other.0)
    }

    /// The members in ascending order.
    pub fn iter(self) -> impl Iterator<Item = u16> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let lowest = u16::try_from(rest.trailing_zeros()).ok()?;
            rest &= rest.checked_sub(1)?;
            Some(lowest)
        })
    }
}

impl FromIterator<u16> for PmdBits {
    fn from_iter<I: IntoIterator<Item = u16>>(pmds: I) -> Self {
        let mut bits = PmdBits::EMPTY;
        for pmd in pmds {
            bits.insert(pmd);
        }
        bits
    }
}

impl fmt::Display for PmdBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.iter().map(|pmd| format!("PMD{pmd}"));
        f.write_str(&pmu_model::list(names))
    }
}
