//! The form of every report.

use std::io::{self, Write};
use std::ops::RangeInclusive;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::stats::Percentiles;

/// What a measurement found. Its JSON form has the names of its fields.
pub trait Report: Serialize {
    /// Writes it for people.
    ///
    /// # Errors
    /// `out` cannot be written to.
    fn text(&self, out: &mut dyn Write) -> io::Result<()>;
}

/// Writes `report` to `out`.
///
/// # Errors
/// `out` cannot be written to.
pub fn write_report(report: &impl Report, json: bool, out: &mut dyn Write) -> io::Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, report)?;
        writeln!(out)?;
    } else {
        report.text(out)?;
    }
    out.flush()
}

/// Microseconds with two decimals.
#[must_use]
pub fn micros(ns: u64) -> String {
    format!("{}.{:02}", ns / 1000, ns % 1000 / 10)
}

/// A table. Columns in `numbers` are flush right, all others left; each is as wide
/// as its widest cell.
pub(super) fn table<const N: usize>(
    titles: [&str; N],
    numbers: RangeInclusive<usize>,
    rows: impl IntoIterator<Item = [String; N]>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).add_row(titles);
    table.add_rows(rows);
    for (number, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if numbers.contains(&number) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
        .lines()
        .try_for_each(|line| writeln!(out, "{}", line.trim_end()))
}

/// Both percentiles in microseconds.
pub(super) fn pair(times: Percentiles) -> String {
    format!("{} / {}", micros(times.p50_ns), micros(times.p99_ns))
}

/// Milliseconds with three decimals.
pub(super) fn millis(ns: u64) -> String {
    format!("{}.{:03}", ns / 1_000_000, ns / 1000 % 1000)
}

/// A ratio against its target.
pub(super) fn verdict(met: Option<bool>) -> &'static str {
    match met {
        Some(true) => "met",
        Some(false) => "missed",
        None => "",
    }
}

/// "processor, guest CPL 0 native".
pub(super) fn where_it_ran(processor: Option<&str>, slow_cpl0: bool) -> String {
    let kernel_code = if slow_cpl0 { "emulated" } else { "native" };
    let processor = processor.unwrap_or("unknown processor");
    format!("{processor}, guest CPL 0 {kernel_code}")
}
