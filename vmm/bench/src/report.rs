//! The form of every report.

use std::io::{self, Write};

use serde::Serialize;

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
    match json {
        true => {
            serde_json::to_writer_pretty(&mut *out, report)?;
            writeln!(out)?;
        }
        false => report.text(out)?,
    }
    out.flush()
}

/// Microseconds with two decimals.
#[must_use]
pub fn micros(ns: u64) -> String {
    format!("{}.{:02}", ns / 1000, ns % 1000 / 10)
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
    let kernel_code = match slow_cpl0 {
        true => "emulated",
        false => "native",
    };
    let processor = processor.unwrap_or("unknown processor");
    format!("{processor}, guest CPL 0 {kernel_code}")
}
