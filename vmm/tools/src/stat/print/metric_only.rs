//! `--metric-only`: a line for all, or for each vCPU or core, with nothing but what follows
//! from the counts.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;

use super::Form;
use crate::stat::{Metric, Row, stamp};
use crate::targets::Target;

/// Columns are as wide as perf's at least.
const NARROWEST: usize = 13;
/// What stands where the counts for a number are missing.
const MISSING: &str = "<not counted>";

/// What a column is of: an event, and what follows from its count.
type Column<'a> = (&'a str, &'a str);

#[derive(Serialize)]
struct Line<'a> {
    /// When the interval ended, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    interval: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vcpu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    core: Option<u32>,
    /// By unit; what there are no counts for is not there.
    metrics: BTreeMap<&'a str, f64>,
}

/// Writes the metrics of `rows`, with a heading if it is the `first` time. `end_ns` is the
/// end of the interval, if they are of one.
pub(super) fn write(
    rows: &[Row],
    end_ns: Option<u64>,
    first: bool,
    form: &Form,
    out: &mut dyn Write,
) -> io::Result<()> {
    let columns = columns(rows);
    let mut whose: Vec<Option<Target>> = rows.iter().map(|row| row.whose).collect();
    whose.dedup();
    if first && *form != Form::Json {
        let units = columns.iter().map(|(_, unit)| (*unit).to_owned());
        let heads = [
            end_ns.map(|_| "time"),
            whose.first().copied().flatten().map(|_| "of"),
        ];
        let heads = heads.into_iter().flatten().map(str::to_owned).collect();
        line(heads, units.collect(), form, out)?;
    }
    for whose in whose {
        let of = |column: &Column<'_>| {
            let mut own = rows.iter().filter(|row| row.whose == whose);
            own.find(|row| row.event == column.0).and_then(Row::metric)
        };
        let found: Vec<Option<&Metric>> = columns.iter().map(of).collect();
        if *form == Form::Json {
            let metrics = columns.iter().zip(&found);
            let (vcpu, core) = match whose {
                None => (None, None),
                Some(Target::Vcpu(vcpu)) => (Some(vcpu), None),
                Some(Target::Core(core)) => (None, Some(core)),
            };
            let line = Line {
                #[expect(clippy::cast_precision_loss, reason = "exact for a hundred days")]
                interval: end_ns.map(|ns| ns as f64 / 1e9),
                vcpu,
                core,
                metrics: metrics
                    .filter_map(|((_, unit), metric)| Some((*unit, metric.as_ref()?.value)))
                    .collect(),
            };
            serde_json::to_writer(&mut *out, &line)?;
            writeln!(out)?;
            continue;
        }
        let cell = |metric: &Option<&Metric>| {
            metric.map_or(MISSING.to_owned(), |metric| {
                format!("{:.*}", usize::from(metric.digits), metric.value)
            })
        };
        let heads = [end_ns.map(stamp), whose.map(|whose| whose.to_string())];
        let heads = heads.into_iter().flatten().collect();
        let widths: Vec<usize> = columns.iter().map(|(_, unit)| unit.len()).collect();
        let cells = found.iter().zip(widths).map(|(metric, width)| match form {
            Form::Table => format!("{:>width$}", cell(metric)),
            _ => cell(metric),
        });
        line(heads, cells.collect(), form, out)?;
    }
    Ok(())
}

/// Every event that anything follows from, in the order of the rows.
fn columns(rows: &[Row]) -> Vec<Column<'_>> {
    let mut columns: Vec<Column<'_>> = Vec::new();
    for row in rows {
        let Some(metric) = row.metric() else { continue };
        if columns.iter().all(|(event, _)| *event != row.event) {
            columns.push((&row.event, &metric.unit));
        }
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
        Form::Csv(separator) => {
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
