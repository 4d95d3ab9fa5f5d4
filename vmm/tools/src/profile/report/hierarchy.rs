//! `--hierarchy`: the keys below each other, each with its part, as perf prints them.

use std::io::{self, Write};

use super::Report;
use super::cells::cell;
use super::columns::Column;
use super::tree::Tree;
use crate::profile::tally::{SampleRow, SampleTally, Sum};

/// By how much a level is further to the right.
const STEP: usize = 3;
/// As wide as `100.00%` with a blank in front of it.
const WIDTH: usize = 8;

/// Rows that have the keys of a level, and of those above it, in common.
struct Level<'a> {
    text: String,
    sum: Sum,
    rows: Vec<(&'a SampleRow, Vec<String>)>,
}

/// Writes `rows` as such a table.
pub(super) fn write_hierarchy(
    report: &Report<'_>,
    tally: &SampleTally,
    rows: &[SampleRow],
    out: &mut dyn Write,
) -> io::Result<()> {
    let keys = report.looks().keys.keys();
    let levels = keys.len();
    let cells = |row| keys.iter().map(|key| cell(*key, row, report)).collect();
    let rows: Vec<(&SampleRow, Vec<String>)> = rows.iter().map(|row| (row, cells(row))).collect();
    let titles = keys.iter().map(|key| Column::Key(*key).title(&[]));
    let titles = titles.collect::<Vec<&str>>().join(" / ");
    let first = WIDTH + STEP * levels.saturating_sub(1);
    let texts = rows.iter().flat_map(|(_, cells)| cells.iter().enumerate());
    let texts = texts.map(|(level, text)| STEP * level + text.chars().count());
    let widest = texts.chain([titles.chars().count()]).max().unwrap_or(0);
    let table = Hierarchy {
        report,
        tally,
        levels,
        first,
    };
    writeln!(
        out,
        "# {:>first$}  {:>WIDTH$}  {titles}",
        "Overhead", "Samples"
    )?;
    let dots = [first, WIDTH, widest].map(|width| ".".repeat(width));
    writeln!(out, "# {}\n#", dots.join("  "))?;
    table.write(0, rows, out)
}

struct Hierarchy<'a> {
    report: &'a Report<'a>,
    tally: &'a SampleTally,
    levels: usize,
    /// The width of the first column.
    first: usize,
}

impl Hierarchy<'_> {
    /// Writes what `rows` have at a level and below it.
    fn write(
        &self,
        level: usize,
        rows: Vec<(&SampleRow, Vec<String>)>,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        if level == self.levels {
            if let (Some(graph), [(row, _)]) = (self.report.looks().graph, rows.as_slice()) {
                Tree::of(self.report, self.tally, row, graph).write(out)?;
            }
            return Ok(());
        }
        let first = self.first;
        let indent = " ".repeat(STEP * level);
        let (least, all) = (
            self.report.looks().least_percent,
            self.report.whole(self.tally),
        );
        let mut parts = parts(level, rows);
        parts.retain(|part| part.sum.percent(all) >= least);
        if parts.is_empty() {
            let left = " ".repeat(first + 2 + WIDTH + 2);
            return writeln!(out, "  {left}{indent}no entry >= {least:.2}%");
        }
        for part in parts {
            let percent = format!("{:.2}%", part.sum.percent(all));
            let percent = format!("{indent}{percent:>WIDTH$}");
            let (samples, text) = (part.sum.samples, part.text);
            writeln!(
                out,
                "  {percent:<first$}  {samples:>WIDTH$}  {indent}{text}"
            )?;
            self.write(level + 1, part.rows, out)?;
        }
        Ok(())
    }
}

/// The rows by what they have at a level, that with most events first.
fn parts(level: usize, rows: Vec<(&SampleRow, Vec<String>)>) -> Vec<Level<'_>> {
    let mut parts: Vec<Level<'_>> = Vec::new();
    let mut places = std::collections::HashMap::new();
    for row in rows {
        let text = row.1.get(level).cloned().unwrap_or_default();
        let place = *places.entry(text.clone()).or_insert_with(|| {
            parts.push(Level {
                text,
                sum: Sum::default(),
                rows: Vec::new(),
            });
            parts.len() - 1
        });
        parts[place].sum.add(row.0.own);
        parts[place].rows.push(row);
    }
    parts.sort_by_key(|part| std::cmp::Reverse(part.sum.events));
    parts
}
