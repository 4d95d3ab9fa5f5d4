//! The declared rates of a simulated PMU.

mod parse;

use pmu_model::{Constraint, EventCode};

use super::curve::Curve;
use super::error::RateError;
use super::names::EventKey;

/// Declared rates: what happens how often, by ring and over time, and which
/// counters can count it.
///
/// The text is TOML; rates are events per microsecond, with up to six
/// decimals:
///
/// ```
/// let table = pmu_virt::RateTable::parse(
///     r#"
///     counters = 4                      # physical counters; default 64
///     seed = 1                          # of the noise; default 0
///
///     [event.cycles]
///     rate = 2500                       # at both rings
///
///     [event.instructions]
///     kernel = 900
///     user = 3100.5
///     noise = 0.1                       # varies by up to 10 % either way
///
///     [event.r0729]                     # unit mask 07, event select 29
///     phases = [                        # repeat for ever
///         { us = 1000, rate = 400 },
///         { us = 250, kernel = 20, user = 1200 },
///     ]
///     slots = [1, 3]                    # only on these counters
///     exclusive = "northbridge"         # and only one of its kind at a time
///     "#,
///     "rates.toml",
/// )?;
/// # let _ = table;
/// # Ok::<(), pmu_virt::RateError>(())
/// ```
#[derive(Clone, Debug)]
pub struct RateTable {
    /// Physical counters, 1 to 128.
    pub(super) capacity: usize,
    pub(super) entries: Vec<Entry>,
}

/// What the table says of one event.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: EventKey,
    pub(super) curve: Curve,
    pub(super) constraint: Constraint,
}

impl RateTable {
    /// The table that `text` declares; `file` is its name in errors.
    ///
    /// # Errors
    /// The first thing that is wrong, with its line.
    pub fn parse(text: &str, file: &str) -> Result<RateTable, RateError> {
        parse::parse(text, file)
    }

    /// The entry for an event: one for its very code before one for its
    /// meaning.
    pub(super) fn find(&self, event: &EventCode) -> Option<(usize, &Entry)> {
        let entries = || self.entries.iter().enumerate();
        let raw = |entry: &Entry| matches!(entry.key, EventKey::Raw { .. });
        entries()
            .filter(|(_, entry)| raw(entry))
            .chain(entries().filter(|(_, entry)| !raw(entry)))
            .find(|(_, entry)| entry.key.matches(event))
    }
}
