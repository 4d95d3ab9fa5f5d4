//! The table of `perf stat`.

use std::io::{self, Write};

use pmu_model::Provenance;
use umpire_events::grouped;

use super::{Interval, Whole};
use crate::stat::{Metric, Row, Runs, Unit, Value, in_unit, missing, stamp};
use crate::targets::Target;

/// Columns of perf 6.1: value, event with our mark, metric.
const VALUE: usize = 18;
const EVENT: usize = 30;
const METRIC: usize = 35;

/// Every provenance with its mark and what it means.
const MARKS: [(Provenance, char, &str); 5] = [
    (Provenance::Exact, '=', "every event was seen"),
    (Provenance::Hardware, 'h', "by a physical counter"),
    (Provenance::Derived, 'd', "computed from another quantity"),
    (Provenance::Scaled, '~', "extrapolated from a part"),
    (
        Provenance::Simulated,
        's',
        "made up, by a declared rate or as ticks of virtual time",
    ),
];

pub(super) fn write_title(whole: &Whole<'_>, out: &mut dyn Write) -> io::Result<()> {
    let runs = match whole.elapsed.count() {
        0 | 1 => String::new(),
        count => format!(" ({count} runs)"),
    };
    let title = umpire_events::one_line(whole.title);
    writeln!(out, "\n Performance counter stats for '{title}'{runs}:\n")
}

pub(super) fn write_elapsed(whole: &Whole<'_>, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out)?;
    match elapsed(whole.elapsed) {
        Some(line) if whole.virtual_time => {
            writeln!(out, "{line} (the host's; the guest's time is virtual)\n")
        }
        Some(line) => writeln!(out, "{line}\n"),
        None => Ok(()),
    }
}

pub(super) fn write_whole(whole: &Whole<'_>, grouped: bool, out: &mut dyn Write) -> io::Result<()> {
    write_title(whole, out)?;
    write_rows(whole.rows, "", grouped, out)?;
    write_elapsed(whole, out)?;
    let present = |one| whole.rows.iter().any(|row| row.provenance() == Some(one));
    if MARKS.iter().any(|(one, ..)| present(*one)) {
        writeln!(out, "{}\n", legend(present))
    } else {
        Ok(())
    }
}

pub(super) fn write_interval(
    interval: &Interval<'_>,
    grouped: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    if interval.first {
        // Later intervals may have marks that this one lacks.
        writeln!(out, "#{}", legend(|_| true))?;
        writeln!(out, "#           time             counts unit   events")?;
    }
    let stamp = format!("{} ", stamp(interval.end_ns));
    write_rows(interval.rows, &stamp, grouped, out)
}

fn write_rows(rows: &[Row], stamp: &str, grouped: bool, out: &mut dyn Write) -> io::Result<()> {
    let units = rows.iter().map(|row| row.unit.name.len());
    // perf leaves room for "msec".
    let unit_width = units.max().unwrap_or(0).max(4);
    for row in rows {
        writeln!(out, "{stamp}{}", line(row, unit_width, grouped))?;
    }
    Ok(())
}

fn line(row: &Row, unit_width: usize, grouped: bool) -> String {
    let whose = row.whose.map_or(String::new(), |whose| match whose {
        Target::Vcpu(vcpu) => format!("{:<11}", format!("vCPU{vcpu}")),
        Target::Core(core) => format!("{:<11}", format!("core{core}")),
    });
    let value = match row.value {
        Value::Counted(count) => number(count, row.unit, grouped),
        other => missing(other).unwrap_or_default().to_owned(),
    };
    let mark = row.provenance().map_or(' ', mark);
    let unit = row.unit.name;
    let event = &row.event;
    let metric = match row.metric() {
        Some(metric) => metric_column(metric),
        None => String::new(),
    };
    let mut line = format!(
        "{whose}{value:>VALUE$} {unit:<unit_width$} {mark} {event:<EVENT$}{metric:<METRIC$}"
    );
    if let Some(variance) = row.variance() {
        line.push_str(&noise(variance));
    }
    // Nothing is said of what cannot be counted at all.
    if row.running_ns < row.enabled_ns && row.value != Value::NotSupported {
        line.push_str(&format!("  ({:.2}%)", row.percent_running()));
    }
    line.trim_end().to_owned()
}

/// ` #    0.346 CPUs utilized`; the points of all metrics are in one column.
fn metric_column(metric: &Metric) -> String {
    let number = format!("{:.*}", usize::from(metric.digits), metric.value);
    let point = number.find('.').unwrap_or(number.len());
    let (whole, part) = number.split_at(point);
    format!(" # {whole:>4}{part:<4} {}", metric.unit)
}

/// A count, with commas between thousands if they are `apart`; two digits behind the
/// point if it has a unit of its own.
fn number(count: u64, unit: Unit, apart: bool) -> String {
    let text = if unit.scale == 1.0 {
        count.to_string()
    } else {
        format!("{:.2}", in_unit(count, unit))
    };
    match text.split_once('.') {
        _ if !apart => text,
        Some((whole, part)) => format!("{}.{part}", grouped(whole)),
        None => grouped(&text),
    }
}

fn noise(percent: f64) -> String {
    format!("  ( +-{percent:6.2}% )")
}

/// `       1.001603849 seconds time elapsed`; the mean and its error, with two
/// digits of the error, after several runs.
fn elapsed(runs: &Runs) -> Option<String> {
    let mean = runs.mean()?;
    let (Some(error), Some(percent)) = (runs.error(), runs.percent()) else {
        return Some(format!("{mean:>VALUE$.9} seconds time elapsed"));
    };
    let digits = if error > 0.0 && error < 1.0 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the logarithm of a positive double is between 0 and 324 here"
        )]
        let zeros = (-error.log10()).ceil() as usize;
        zeros + 2
    } else {
        2
    };
    let digits = digits.min(9);
    let noise = noise(percent);
    Some(format!(
        "{mean:>VALUE$.digits$} +- {error:.digits$} seconds time elapsed{noise}"
    ))
}

fn mark(provenance: Provenance) -> char {
    let known = MARKS.iter().find(|(one, ..)| *one == provenance);
    known.map_or('?', |(_, mark, _)| *mark)
}

/// What the marks of the provenances mean that are `wanted`.
fn legend(wanted: impl Fn(Provenance) -> bool) -> String {
    let parts: Vec<String> = MARKS
        .iter()
        .filter(|(provenance, ..)| wanted(*provenance))
        .map(|(provenance, mark, means)| format!("{mark} {provenance} ({means})"))
        .collect();
    format!(" Counts: {}", parts.join("; "))
}
