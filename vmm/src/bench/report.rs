//! The report of a measurement.

use std::io::{self, Write};

use super::neighbour::{NeighbourReport, TARGET};
use super::stats::Percentiles;
use super::traps::{TrapReport, TrapRow};

/// Writes `report` to `out`.
///
/// # Errors
/// `out` cannot be written to.
pub fn write_report(report: &TrapReport, json: bool, out: &mut dyn Write) -> io::Result<()> {
    match json {
        true => {
            serde_json::to_writer_pretty(&mut *out, report)?;
            writeln!(out)?;
        }
        false => text(report, out)?,
    }
    out.flush()
}

fn text(report: &TrapReport, out: &mut dyn Write) -> io::Result<()> {
    let processor = report.processor.as_deref().unwrap_or("unknown processor");
    let kernel_code = match report.slow_cpl0 {
        true => "emulated",
        false => "native",
    };
    writeln!(
        out,
        "Round trips of trapped PMU accesses, timed in the guest ({} of each kind)",
        report.iterations
    )?;
    writeln!(
        out,
        "{processor}, guest CPL 0 {kernel_code}, TSC {} MHz, model {}, backend {}\n",
        report.tsc_khz / 1000,
        report.model,
        report.backend
    )?;
    writeln!(
        out,
        "{:<20} {:>22} {:>22} {:>7} {:>7} {:>20}",
        "", "umpire p50 / p99 [us]", "bare p50 / p99 [us]", "ratio", "target", "no breakpoint [us]"
    )?;
    for row in &report.rows {
        write_row(row, out)?;
    }
    writeln!(
        out,
        "\nbare: the same exit with the same breakpoint in place, and a handler that only answers\n\
         (MSR) or returns from the #GP (RDPMC); no breakpoint: its p50 where none is in place"
    )
}

fn write_row(row: &TrapRow, out: &mut dyn Write) -> io::Result<()> {
    let pair = |p50: u64, p99: u64| format!("{} / {}", micros(p50), micros(p99));
    writeln!(
        out,
        "{:<20} {:>22} {:>22} {:>7.3} {:>7.2} {:>20}  {}",
        row.access.name(),
        pair(row.umpire.p50_ns, row.umpire.p99_ns),
        pair(row.bare.p50_ns, row.bare.p99_ns),
        row.ratio_p50,
        row.target,
        row.bare_unarmed
            .map_or_else(String::new, |bare| micros(bare.p50_ns)),
        if row.met { "met" } else { "missed" }
    )
}

/// Writes the report of a measurement beside neighbours to `out`.
///
/// # Errors
/// `out` cannot be written to.
pub fn write_neighbours(
    report: &NeighbourReport,
    json: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, report)?;
        writeln!(out)?;
        return out.flush();
    }
    let [subject, neighbour] = report.cpus;
    writeln!(
        out,
        "Round trips of trapped PMU accesses beside another VM ({} of each kind)\n\
         {}, subject on CPU {subject}, neighbour on CPU {neighbour}\n",
        report.iterations,
        report.processor.as_deref().unwrap_or("unknown processor"),
    )?;
    writeln!(
        out,
        "{:<20} {:>22} {:>22} {:>9} {:>9}",
        "", "quiet p50 / p99 [us]", "hostile p50 / p99 [us]", "ratio p50", "ratio p99"
    )?;
    for row in &report.rows {
        let pair = |p: Percentiles| format!("{} / {}", micros(p.p50_ns), micros(p.p99_ns));
        writeln!(
            out,
            "{:<20} {:>22} {:>22} {:>9.3} {:>9.3}  {}",
            row.access.name(),
            pair(row.quiet),
            pair(row.hostile),
            row.ratio_p50,
            row.ratio_p99,
            if row.met { "met" } else { "missed" }
        )?;
    }
    writeln!(
        out,
        "\nwanted: ratio p99 <= {TARGET:.2}; the hostile neighbour went round {} times",
        report.storms
    )?;
    out.flush()
}

/// Microseconds with two decimals.
pub(crate) fn micros(ns: u64) -> String {
    format!("{}.{:02}", ns / 1000, ns % 1000 / 10)
}
