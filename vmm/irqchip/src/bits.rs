//! Parts of words, and a set of vectors.

use serde::{Deserialize, Serialize};

/// Bits 31:0.
pub(crate) fn low(value: u64) -> u32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Bits 7:0.
pub(crate) fn byte(value: u32) -> u8 {
    value.to_le_bytes()[0]
}

/// `value` with its bits 31:0 replaced.
pub(crate) fn with_low(value: u64, low: u32) -> u64 {
    value & !0xffff_ffff | u64::from(low)
}

/// A set of vectors, as IRR, ISR and TMR are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Vectors([u32; 8]);

impl Vectors {
    pub(crate) fn insert(&mut self, vector: u8) {
        self.0[usize::from(vector >> 5)] |= 1 << (vector & 31);
    }

    pub(crate) fn remove(&mut self, vector: u8) {
        self.0[usize::from(vector >> 5)] &= !(1 << (vector & 31));
    }

    pub(crate) fn contains(&self, vector: u8) -> bool {
        self.0[usize::from(vector >> 5)] >> (vector & 31) & 1 != 0
    }

    /// The one of highest priority.
    pub(crate) fn highest(&self) -> Option<u8> {
        (0..8u8).zip(self.0).rev().find_map(|(at, word)| {
            let top = word.checked_ilog2()?;
            Some(at << 5 | byte(top))
        })
    }

    /// Vectors 32 × `at` and on, of which only bits 2:0 count.
    pub(crate) fn word(&self, at: u8) -> u32 {
        self.0[usize::from(at & 7)]
    }
}
