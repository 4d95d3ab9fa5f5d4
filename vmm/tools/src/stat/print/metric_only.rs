//! `--metric-only`: a line for all, or for each vCPU or core, with nothing but what follows
//! from the counts.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;

use super::{Form, Moment};
use crate::stat::{Metric, Row, Value, stamp};
use crate::targets::Target;

/// Columns are as wide as perf's at least.
const NARROWEST: usize = 13;
/// What stands where the counts for a number are missing, and where there can be none.
const MISSING: &str = "<not counted>";
const IMPOSSIBLE: &str = "<not supported>";

/// A number that may follow from the count of an event.
struct MetricColumn<'a> {
    event: &'a str,
    /// What it is, the same in every line.
    label: String,
}

impl MetricColumn<'_> {
    /// The number, with the digits that it has. A rate is one of single events: thousands
    /// and millions of them would have other labels.
    fn value(&self, metric: &Metric) -> (f64, usize) {
        let factor = match metric.unit.as_str() {
            "K/sec" => 1e3,
            "M/sec" => 1e6,
            "G/sec" => 1e9,
            _ => 1.0,
        };
        (metric.value * factor, usize::from(metric.digits))
    }
}

/// What follows from the counts of all, of a vCPU or of a core.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct MetricLine<'a> {
    /// When the interval ended, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    interval: Option<f64>,
    /// The vCPU that the row is of, with `-A` or where vCPUs were chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    vcpu: Option<u32>,
    /// The core that the row is of, where cores were chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    core: Option<u32>,
    /// By label; what there are no counts for is not there.
    metrics: BTreeMap<&'a str, f64>,
}

/// Writes the metrics of `rows`, with a heading if it is the `first` time.
pub(super) fn write(
    rows: &[Row],
    moment: &Moment,
    first: bool,
    form: &Form,
    out: &mut dyn Write,
) -> io::Result<()> {
    let (end_ns, time) = match moment {
        Moment::None => (None, None),
        Moment::Summary(word) => (None, Some(word.clone())),
        Moment::Ended(ns) => (Some(*ns), Some(stamp(*ns))),
    };
    let columns = columns(rows);
    let mut whose: Vec<Option<Target>> = rows.iter().map(|row| row.whose).collect();
    whose.dedup();
    if first && *form != Form::Json {
        let labels = columns.iter().map(|column| column.label.clone());
        let heads = [
            time.as_ref().map(|_| "time"),
            whose.first().copied().flatten().map(|_| "of"),
        ];
        let heads = heads.into_iter().flatten().map(str::to_owned).collect();
        line(heads, labels.collect(), form, out)?;
    }
    for whose in whose {
        let of = |column: &MetricColumn<'_>| {
            let mut own = rows.iter().filter(|row| row.whose == whose);
            let row = own.find(|row| row.event == column.event).ok_or(MISSING)?;
            match (row.metric(), row.value) {
                (Some(metric), _) => Ok(column.value(metric)),
                (None, Value::NotSupported) => Err(IMPOSSIBLE),
                (None, _) => Err(MISSING),
            }
        };
        let found: Vec<Result<(f64, usize), &str>> = columns.iter().map(of).collect();
        if *form == Form::Json {
            let metrics = columns.iter().zip(&found);
            let (vcpu, core) = match whose {
                None => (None, None),
                Some(Target::Vcpu(vcpu)) => (Some(vcpu), None),
                Some(Target::Core(core)) => (None, Some(core)),
            };
            let line = MetricLine {
                #[expect(clippy::cast_precision_loss, reason = "exact for a hundred days")]
                interval: end_ns.map(|ns| ns as f64 / 1e9),
                vcpu,
                core,
                metrics: metrics
                    .filter_map(|(column, found)| Some((column.label.as_str(), found.ok()?.0)))
                    .collect(),
            };
            serde_json::to_writer(&mut *out, &line)?;
            writeln!(out)?;
            continue;
        }
        let cell = |found: &Result<(f64, usize), &str>| match *found {
            Ok((value, digits)) => format!("{value:.digits$}"),
            Err(word) => word.to_owned(),
        };
        let heads = [time.clone(), whose.map(|whose| whose.to_string())];
        let heads = heads.into_iter().flatten().collect();
        let widths: Vec<usize> = columns.iter().map(|column| column.label.len()).collect();
        let cells = found.iter().zip(widths).map(|(found, width)| match form {
            Form::Table { .. } => format!("{:>width$}", cell(found)),
            _ => cell(found),
        });
        line(heads, cells.collect(), form, out)?;
    }
    Ok(())
}

/// Every event that something may follow from, counted or not, in the order of the rows.
fn columns(rows: &[Row]) -> Vec<MetricColumn<'_>> {
    let mut columns: Vec<MetricColumn<'_>> = Vec::new();
    for row in rows {
        let Some(metric) = &row.metric else { continue };
        let event = row.event.as_str();
        if columns.iter().any(|column| column.event == event) {
            continue;
        }
        let unit = metric.unit.as_str();
        let is_rate = unit.ends_with("/sec");
        let label = match columns.iter().any(|column| column.label == unit) {
            _ if is_rate => format!("{event} /sec"),
            true => format!("{event} {unit}"),
            false => unit.to_owned(),
        };
        columns.push(MetricColumn { event, label });
    }
    columns
}

fn line(
    heads: Vec<String>,
    cells: Vec<String>,
    form: &Form,
    out: &mut dyn Write,
) -> io::Result<()> {
    match form {
        Form::Csv { separator, .. } => {
            let all: Vec<String> = heads.into_iter().chain(cells).collect();
            writeln!(out, "{}", all.join(separator))
        }
        _ => {
            let heads = heads.iter().map(|head| format!("{head:<16} "));
            let cells = cells.iter().map(|cell| format!(" {cell:>NARROWEST$} "));
            let text: String = heads.chain(cells).collect();
            writeln!(out, "{}", text.trim_end())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_are_of_the_structures() {
        crate::schema::check::<MetricLine<'_>>("stat");
    }
}
