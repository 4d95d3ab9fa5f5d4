//! Samples that have something in common, added up.

use std::collections::HashMap;
use std::str::FromStr;

use thiserror::Error;

use super::location::{CodeLocation, process};
use super::record::{Ring, Sample};
use super::symbols::SymbolTable;

/// What samples are grouped by; a column of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SortKey {
    /// The symbol.
    Symbol,
    /// The vCPU and its VM.
    Vcpu,
    /// The core.
    Core,
    /// Kernel or user.
    Ring,
    /// The address of the page tables, of kernel and user samples alike.
    Cr3,
}

impl SortKey {
    /// All of them, in the order of the help.
    pub const ALL: [Self; 5] = [Self::Symbol, Self::Vcpu, Self::Core, Self::Ring, Self::Cr3];

    /// Its name in `--sort`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Symbol => "symbol",
            Self::Vcpu => "vcpu",
            Self::Core => "core",
            Self::Ring => "ring",
            Self::Cr3 => "cr3",
        }
    }
}

/// A word that is no sort key.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "'{0}' cannot be sorted by; give symbol, vcpu, core, ring, cr3, or some of them with commas between"
)]
pub struct SortKeyError(String);

/// The keys of `--sort`, each once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SortKeys(Vec<SortKey>);

impl SortKeys {
    /// The keys, in the order of the columns.
    #[must_use]
    pub fn keys(&self) -> &[SortKey] {
        &self.0
    }
}

impl FromStr for SortKeys {
    type Err = SortKeyError;

    fn from_str(text: &str) -> Result<Self, SortKeyError> {
        let mut keys = Vec::new();
        for word in text.split(',') {
            let word = word.trim();
            let named = SortKey::ALL.into_iter().find(|key| key.name() == word);
            let key = named
                // As perf abbreviates it.
                .or((word == "sym").then_some(SortKey::Symbol))
                .ok_or_else(|| SortKeyError(word.to_owned()))?;
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        Ok(Self(keys))
    }
}

/// What the samples of a row have in common. Fields that are not sorted by are
/// none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Where they were taken.
    pub location: Option<CodeLocation>,
    /// VM and vCPU.
    pub vcpu: Option<(u32, u32)>,
    /// The core.
    pub core: Option<u32>,
    /// The ring; the inner none is one that was not sampled.
    pub ring: Option<Option<Ring>>,
    /// The page tables; the inner none is a CR3 that was not sampled.
    pub cr3: Option<Option<u64>>,
}

/// What samples amount to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    /// How many they are.
    pub samples: u64,
    /// How many events they stand for.
    pub events: u64,
}

impl Sum {
    fn add(&mut self, period: u64) {
        self.samples = self.samples.saturating_add(1);
        self.events = self.events.saturating_add(period);
    }
}

/// A row of the report.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleRow {
    /// What its samples have in common.
    pub key: Key,
    /// What they amount to.
    pub sum: Sum,
    /// Its part of all events, in percent.
    pub percent: f64,
}

/// The samples of one event, added up by [`SortKeys`].
#[derive(Clone, Debug, Default)]
pub struct SampleTally {
    rows: HashMap<Key, Sum>,
    all: Sum,
    kernel: u64,
    kernel_unknown: u64,
}

impl SampleTally {
    /// Takes `sample` in.
    pub fn add(&mut self, sample: &Sample, keys: &SortKeys, symbols: &SymbolTable) {
        let location = CodeLocation::of(sample, symbols);
        match location {
            CodeLocation::User(_) => {}
            CodeLocation::Symbol(_) => self.kernel += 1,
            CodeLocation::Unknown(_) => {
                self.kernel += 1;
                self.kernel_unknown += 1;
            }
        }
        let mut key = Key::default();
        for one in keys.keys() {
            match one {
                SortKey::Symbol => key.location = Some(location),
                SortKey::Vcpu => key.vcpu = Some((sample.vm, sample.vcpu)),
                SortKey::Core => key.core = Some(sample.core),
                SortKey::Ring => key.ring = Some(sample.ring),
                SortKey::Cr3 => key.cr3 = Some(process(sample.cr3)),
            }
        }
        self.rows.entry(key).or_default().add(sample.period);
        self.all.add(sample.period);
    }

    /// What all samples amount to.
    #[must_use]
    pub fn all(&self) -> Sum {
        self.all
    }

    /// Samples outside of user programs, and how many of them have no symbol.
    #[must_use]
    pub fn without_symbol(&self) -> (u64, u64) {
        (self.kernel, self.kernel_unknown)
    }

    /// The rows, those with most events first.
    #[must_use]
    pub fn rows(&self) -> Vec<SampleRow> {
        let mut rows: Vec<SampleRow> = self
            .rows
            .iter()
            .map(|(&key, &sum)| SampleRow {
                key,
                sum,
                percent: percent(sum.events, self.all.events),
            })
            .collect();
        rows.sort_by(|a, b| {
            let order = (b.sum.events, b.sum.samples).cmp(&(a.sum.events, a.sum.samples));
            order.then_with(|| a.key.cmp(&b.key))
        });
        rows
    }
}

fn percent(part: u64, all: u64) -> f64 {
    match all {
        0 => 0.0,
        // A percentage needs no more than the 53 bits of a double.
        #[expect(clippy::cast_precision_loss, reason = "rounded to 0.01 %")]
        _ => part as f64 / all as f64 * 100.0,
    }
}
