//! The accounting page, by which a guest reads how its counters were counted.

use arbiter::{CounterId, CounterSet};
use pmu_model::PmuModel;
use pmu_model::accounting::Word;

use super::{COUNTERS, index_of};
use crate::state::{Hex, SavedSnapshot};

/// What the page shows: the words of every counter at one moment.
#[derive(Debug)]
pub(super) struct Page {
    /// How many were taken.
    sequence: u64,
    /// By [`index_of`] and by [`Word`].
    counters: [[u64; 4]; COUNTERS],
}

impl Page {
    pub(super) fn new() -> Self {
        Page {
            sequence: 0,
            counters: [[0; 4]; COUNTERS],
        }
    }

    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(super) fn word(&self, counter: CounterId, word: Word) -> u64 {
        self.counters[index_of(counter)][word as usize]
    }

    /// A snapshot of these is taken.
    pub(super) fn take(&mut self, counters: impl Iterator<Item = (CounterId, [u64; 4])>) {
        self.sequence = self.sequence.wrapping_add(1);
        for (counter, words) in counters {
            self.counters[index_of(counter)] = words;
        }
    }

    /// Leaves nothing of a counter's former owner.
    pub(super) fn clear(&mut self, counter: CounterId) {
        self.counters[index_of(counter)] = [0; 4];
    }

    /// The page without what it shows of `held`, which somebody has reserved.
    pub(super) fn save(&self, model: &PmuModel, held: CounterSet) -> SavedSnapshot {
        let words = |counter| {
            if held.contains(counter) {
                Default::default()
            } else {
                self.counters[index_of(counter)].map(Hex)
            }
        };
        SavedSnapshot {
            sequence: self.sequence,
            counters: model.counters().map(words).collect(),
        }
    }

    pub(super) fn restore(&mut self, model: &PmuModel, saved: &SavedSnapshot) {
        self.sequence = saved.sequence;
        for (counter, words) in model.counters().zip(&saved.counters) {
            self.counters[index_of(counter)] = words.map(|word| word.0);
        }
    }
}
