//! The forms of `umpire stat`: a table, CSV and JSON; and that of `umpire track`.
//!
//! Each follows `perf stat`: the columns of its table, the order of its CSV
//! fields, the names of its JSON keys. What perf does not have, the provenance
//! of a count, is a mark before the event in the table and a key of its own in
//! JSON; a CSV line has as many fields as perf's, which readers count, and one
//! more at its end for who asks for it.

mod csv;
mod json;
mod metric_only;
mod table;
mod track;

use std::io::{self, Write};

use super::runs::Runs;
use super::{Row, stamp};

/// The form of the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// For people.
    Table {
        /// With commas between thousands.
        grouped: bool,
    },
    /// Fields (`-x`).
    Csv {
        /// What stands between them.
        separator: String,
        /// How counts were obtained is a field more.
        provenance: bool,
    },
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

impl Form {
    /// Programs read it line by line.
    pub(super) fn is_read_by_programs(&self) -> bool {
        match self {
            Self::Csv { .. } | Self::Json => true,
            Self::MetricOnly(form) => form.is_read_by_programs(),
            Self::Table { .. } | Self::Track { .. } => false,
        }
    }
}

/// Counts of the whole time.
#[derive(Clone, Copy, Debug)]
pub struct Whole<'a> {
    /// Whose counts they are, as in `VM 7 (web)`.
    pub title: &'a str,
    pub rows: &'a [Row],
    /// The time that passed in each run, in seconds.
    pub elapsed: &'a Runs,
    /// The VM's own time is virtual: it is said that this one is the host's.
    pub virtual_time: bool,
    /// Several runs were asked for.
    pub repeated: bool,
    /// It comes below intervals, so that fields say so where those have their time.
    pub summary: bool,
}

/// Counts of an interval (`-I`).
#[derive(Clone, Copy, Debug)]
pub struct Interval<'a> {
    /// When it ended, in nanoseconds since counting began.
    pub end_ns: u64,
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
        Form::Table { .. } | Form::Csv { .. } => {
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
    let first = whole.summary.then(|| format!("{:>16}", "summary"));
    match form {
        Form::Table { grouped } => table::write_whole(whole, *grouped, out)?,
        Form::Csv { .. } => {
            csv::write_rows(whole.rows, first.as_deref(), whole.repeated, form, out)?;
        }
        Form::Json => json::write_rows(whole.rows, None, out)?,
        Form::MetricOnly(form) => {
            let is_table = matches!(**form, Form::Table { .. });
            if is_table {
                table::write_title(whole, out)?;
            }
            let moment = match first {
                Some(text) if !is_table => Moment::Summary(text),
                _ => Moment::None,
            };
            metric_only::write(whole.rows, &moment, !whole.summary || is_table, form, out)?;
            if is_table {
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
    let end = interval.end_ns;
    match form {
        Form::Table { grouped } => table::write_interval(interval, *grouped, out)?,
        Form::Csv { .. } => {
            csv::write_rows(interval.rows, Some(&stamp(end)), false, form, out)?;
        }
        Form::Json => json::write_rows(interval.rows, Some(end), out)?,
        Form::MetricOnly(form) => {
            let moment = Moment::Ended(end);
            metric_only::write(interval.rows, &moment, interval.first, form, out)?;
        }
        Form::Track { header, .. } => track::write_interval(interval, *header, out)?,
    }
    out.flush()
}

/// What a line of metrics is of.
enum Moment {
    /// The whole time.
    None,
    /// The whole time, below intervals: the word for it.
    Summary(String),
    /// The interval that ended then.
    Ended(u64),
}
