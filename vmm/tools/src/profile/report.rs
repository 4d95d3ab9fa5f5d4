//! `umpire report`: which symbols the samples are in.

mod json;
mod print;
mod tree;

pub use json::write_json;
pub use print::write_text;
pub(super) use print::{below_dots, title};

use super::names::Names;
use super::paths::{Callers, Paths};
use super::record::{Filter, Record, Sample, Sink};
use super::tally::{Rows, SampleRow, SampleTally, SortKeys};

/// How a report looks.
#[derive(Clone, Debug)]
pub struct Looks {
    /// What samples are grouped by.
    pub keys: SortKeys,
    /// Callers have rows of their own, with all that is called from them.
    pub children: bool,
    /// The tree of callers is below each row.
    pub graph: Option<GraphOrder>,
    /// Rows with less than this are not printed, in percent.
    pub least_percent: f64,
}

/// Which way a tree of callers goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphOrder {
    /// From callers to those whom they call.
    Caller,
    /// From the sample's place to its callers.
    Callee,
}

/// Adds up the samples of each event.
#[derive(Debug)]
pub struct Report<'a> {
    looks: Looks,
    filter: &'a Filter,
    paths: Paths<'a>,
    tallies: Vec<SampleTally>,
}

impl<'a> Report<'a> {
    /// An empty report about a file of `events` events.
    #[must_use]
    pub fn new(looks: Looks, filter: &'a Filter, names: &'a Names, events: usize) -> Self {
        Self {
            looks,
            filter,
            paths: Paths::new(names),
            tallies: vec![SampleTally::default(); events],
        }
    }

    fn sample(&mut self, sample: &Sample) {
        let callers = if self.looks.children || self.looks.graph.is_some() {
            Callers::Kept
        } else {
            Callers::Left
        };
        if let Some(tally) = self.tallies.get_mut(usize::from(sample.event)) {
            tally.add(sample, &self.looks.keys, callers, &mut self.paths);
        }
    }

    /// The events that the filter lets through, by their number.
    pub(super) fn events(&self) -> impl Iterator<Item = (u16, &SampleTally)> {
        let tallies = (0u16..).zip(&self.tallies);
        tallies.filter(|(event, _)| self.filter.event.is_none_or(|only| only == *event))
    }

    /// What the rows of an event have in their columns, and their parts in percent.
    pub(super) fn parts(&self, tally: &SampleTally) -> Vec<(Vec<String>, f64)> {
        let (rows, _) = self.rows(tally);
        let cells = |row: &SampleRow| {
            let keys = self.looks.keys.keys().iter();
            let cells = keys.map(|key| print::cell(*key, row, self)).collect();
            (cells, row.own.percent(tally.all()))
        };
        rows.iter().map(cells).collect()
    }

    /// The rows of an event, and how many of them are shown.
    fn rows(&self, tally: &SampleTally) -> (Vec<SampleRow>, usize) {
        let wanted = Rows {
            children: self.looks.children,
            paths: self.looks.graph.is_some(),
        };
        let rows = tally.rows(&self.looks.keys, &self.paths, wanted);
        let least = self.looks.least_percent;
        // Rows descend.
        let shown = rows.partition_point(|row| row.total.percent(tally.all()) >= least);
        (rows, shown)
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
