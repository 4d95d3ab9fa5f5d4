//! `umpire report`: which symbols the samples are in.

mod json;
mod print;

pub use json::write_json;
pub use print::write_text;

use super::record::{Filter, Record, Sample, Sink};
use super::symbols::SymbolTable;
use super::tally::{SampleTally, SortKeys};

/// Adds up the samples of each event.
#[derive(Debug)]
pub struct Report<'a> {
    keys: SortKeys,
    filter: &'a Filter,
    symbols: &'a SymbolTable,
    tallies: Vec<SampleTally>,
    /// Rows with less than this are not printed, in percent.
    least_percent: f64,
}

impl<'a> Report<'a> {
    /// An empty report about a file of `events` events. Rows of less than
    /// `least_percent` percent are only counted.
    #[must_use]
    pub fn new(
        keys: SortKeys,
        filter: &'a Filter,
        symbols: &'a SymbolTable,
        events: usize,
        least_percent: f64,
    ) -> Self {
        Self {
            keys,
            filter,
            symbols,
            tallies: vec![SampleTally::default(); events],
            least_percent,
        }
    }

    fn sample(&mut self, sample: &Sample) {
        if let Some(tally) = self.tallies.get_mut(usize::from(sample.event)) {
            tally.add(sample, &self.keys, self.symbols);
        }
    }

    /// The events that the filter lets through, by their number.
    fn events(&self) -> impl Iterator<Item = (u16, &SampleTally)> {
        let tallies = (0u16..).zip(&self.tallies);
        tallies.filter(|(event, _)| self.filter.event.is_none_or(|only| only == *event))
    }
}

impl Sink for Report<'_> {
    fn take(&mut self, record: &Record) -> std::io::Result<()> {
        if let Record::Sample(sample) = record
            && self.filter.takes(sample)
        {
            self.sample(sample);
        }
        Ok(())
    }
}
