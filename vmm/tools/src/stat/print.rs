//! The forms of `umpire stat`: a table, CSV and JSON; and that of `umpire track`.
//!
//! Each follows `perf stat`: the columns of its table, the order of its CSV
//! fields, the names of its JSON keys. What perf does not have, the provenance
//! of a count, is a mark before the event in the table, one more field at the
//! end of a CSV line, and a key of its own in JSON.

mod csv;
mod json;
mod metric_only;
mod table;
mod track;

use std::io::{self, Write};

use super::Row;
use super::runs::Runs;

/// The form of the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// For people.
    Table,
    /// Fields with this between (`-x`).
    Csv(String),
    /// One JSON object a line (`-j`).
    Json,
    /// One of the others, with what follows from the counts alone (`--metric-only`).
    MetricOnly(Box<Form>),
    /// A line a vCPU, as `cputrack` has it (`umpire track`).
    Track {
        /// With a heading.
        header: bool,
        /// Intervals are printed, not only what was counted altogether.
        shown: bool,
    },
}

/// Counts of the whole time.
#[derive(Clone, Copy, Debug)]
pub struct Whole<'a> {
    /// Whose counts they are, as in `VM 7 (web)`.
    pub title: &'a str,
    /// The rows.
    pub rows: &'a [Row],
    /// The time that passed in each run, in seconds.
    pub elapsed: &'a Runs,
    /// Several runs were asked for.
    pub repeated: bool,
}

/// Counts of an interval (`-I`).
#[derive(Clone, Copy, Debug)]
pub struct Interval<'a> {
    /// When it ended, in nanoseconds since counting began.
    pub end_ns: u64,
    /// The rows.
    pub rows: &'a [Row],
    /// It is the first one, which in a table comes below a heading.
    pub first: bool,
}

/// Writes the first line of a file (`-o`), as perf does: when counting began. JSON has no
/// comments.
///
/// # Errors
/// `out` cannot be written to.
pub fn write_header(form: &Form, out: &mut dyn Write) -> io::Result<()> {
    match form {
        Form::Json | Form::Track { .. } => Ok(()),
        Form::MetricOnly(form) => write_header(form, out),
        Form::Table | Form::Csv(_) => {
            let now = jiff::Timestamp::now().strftime("%a %b %e %H:%M:%S %Y UTC");
            writeln!(out, "# started on {now}")
        }
    }
}

/// Writes what was counted altogether.
///
/// # Errors
/// `out` cannot be written to.
pub fn write_whole(whole: &Whole<'_>, form: &Form, out: &mut dyn Write) -> io::Result<()> {
    match form {
        Form::Table => table::write_whole(whole, out)?,
        Form::Csv(separator) => csv::write_rows(whole.rows, None, whole.repeated, separator, out)?,
        Form::Json => json::write_rows(whole.rows, None, out)?,
        Form::MetricOnly(form) => {
            if **form == Form::Table {
                table::write_title(whole, out)?;
            }
            metric_only::write(whole.rows, None, true, form, out)?;
            if **form == Form::Table {
                table::write_elapsed(whole, out)?;
            }
        }
        Form::Track { header, shown } => track::write_whole(whole, (*header, *shown), out)?,
    }
    out.flush()
}

/// Writes what was counted in an interval.
///
/// # Errors
/// `out` cannot be written to.
pub fn write_interval(interval: &Interval<'_>, form: &Form, out: &mut dyn Write) -> io::Result<()> {
    let end = Some(interval.end_ns);
    match form {
        Form::Table => table::write_interval(interval, out)?,
        Form::Csv(separator) => csv::write_rows(interval.rows, end, false, separator, out)?,
        Form::Json => json::write_rows(interval.rows, end, out)?,
        Form::MetricOnly(form) => {
            metric_only::write(interval.rows, end, interval.first, form, out)?;
        }
        Form::Track { header, .. } => track::write_interval(interval, *header, out)?,
    }
    out.flush()
}
