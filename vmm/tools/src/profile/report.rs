//! `umpire report`: which symbols the samples are in.

mod cells;
mod columns;
mod graph;
mod header;
mod hierarchy;
mod json;
mod options;
mod print;
#[cfg(test)]
mod tests;
mod tree;

pub(super) use columns::title;
pub use columns::{Column, ColumnError, Columns};
pub use graph::{CallGraph, CallGraphError, Graph, GraphOrder, GraphStyle, GraphValue};
pub use header::write_header;
pub use json::write_json;
pub(super) use options::percent;
pub use options::{Percentage, ReportOptions};
pub(super) use print::below_dots;
pub use print::write_text;

use std::collections::BTreeMap;

use super::names::Names;
use super::paths::{Callers, Paths};
use super::programs::FileId;
use super::record::{Filter, Record, Sample, Sink};
use super::tally::{Rows, SampleRow, SampleTally, SortKeys, Sum};

/// How a report looks.
#[derive(Clone, Debug)]
pub struct Looks {
    /// What samples are grouped by.
    pub keys: SortKeys,
    /// What a row shows.
    pub columns: Vec<Column>,
    /// Callers have rows of their own, with all that is called from them.
    pub children: bool,
    /// The tree of callers is below each row.
    pub graph: Option<Graph>,
    /// Rows with less than this are not printed, in percent.
    pub least_percent: f64,
    /// What is between columns, which are as wide as their words then; none: blanks, so that
    /// they are below each other.
    pub separator: Option<String>,
    /// Keys stand below each other, each with what the next one makes of it.
    pub hierarchy: bool,
    /// What parts are of.
    pub percentage: Percentage,
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

    fn looks(&self) -> &Looks {
        &self.looks
    }

    fn paths(&self) -> &Paths<'a> {
        &self.paths
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

    /// What the rows of an event are parts of.
    pub(super) fn whole(&self, tally: &SampleTally) -> Sum {
        match self.looks.percentage {
            Percentage::Absolute => tally.whole(),
            Percentage::Relative => tally.all(),
        }
    }

    /// The events that the filter lets through, by their number.
    pub(super) fn events(&self) -> impl Iterator<Item = (u16, &SampleTally)> {
        let tallies = (0u16..).zip(&self.tallies);
        tallies.filter(|(event, _)| self.filter.event.is_none_or(|only| only == *event))
    }

    /// Files of programs with samples in no symbol, and how many; that with most first.
    pub(super) fn unnamed(&self) -> Vec<(FileId, u64)> {
        let mut all: BTreeMap<FileId, u64> = BTreeMap::new();
        for (_, tally) in self.events() {
            for (file, sum) in tally.unnamed(&self.paths) {
                *all.entry(file).or_default() += sum.samples;
            }
        }
        let mut all: Vec<(FileId, u64)> = all.into_iter().collect();
        all.sort_by_key(|(_, samples)| std::cmp::Reverse(*samples));
        all
    }

    /// What the rows of an event have in their columns, and their parts in percent.
    pub(super) fn parts(&self, tally: &SampleTally) -> Vec<(Vec<String>, f64)> {
        let (rows, _) = self.rows(tally);
        let cells = |row: &SampleRow| {
            let keys = self.looks.keys.keys().iter();
            let cells = keys.map(|key| cells::cell(*key, row, self)).collect();
            (cells, row.own.percent(self.whole(tally)))
        };
        rows.iter().map(cells).collect()
    }

    /// The rows of an event that are shown, and how many are not.
    fn rows(&self, tally: &SampleTally) -> (Vec<SampleRow>, usize) {
        let wanted = Rows {
            children: self.looks.children,
            paths: self.looks.graph.is_some(),
        };
        let mut rows = tally.rows(&self.looks.keys, &self.paths, wanted);
        let all = rows.len();
        let (least, whole) = (self.looks.least_percent, self.whole(tally));
        // In a hierarchy what is small may be part of what is not.
        let is_shown = |row: &SampleRow| self.looks.hierarchy || row.total.percent(whole) >= least;
        rows.retain(is_shown);
        // They come with the greatest total first.
        match self.looks.columns.iter().find(|one| one.is_number()) {
            Some(Column::Overhead | Column::Period) => {
                rows.sort_by_key(|row| std::cmp::Reverse(row.own.events));
            }
            Some(Column::Sample) => rows.sort_by_key(|row| std::cmp::Reverse(row.own.samples)),
            Some(Column::Children | Column::Key(_)) | None => {}
        }
        let left_out = all - rows.len();
        (rows, left_out)
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

    fn pass(&mut self, sample: &Sample) {
        if self.filter.takes(sample)
            && let Some(tally) = self.tallies.get_mut(usize::from(sample.event))
        {
            tally.pass(sample);
        }
    }
}
