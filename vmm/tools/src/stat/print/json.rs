//! The objects of `perf stat -j`.

use std::io::{self, Write};

use serde::Serialize;

use crate::stat::{Row, Value, in_unit, missing};
use crate::targets::Target;

/// A row with perf's keys. What does not apply is left out: where there is no
/// metric, perf writes 0, which nobody measured.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
struct JsonRow<'a> {
    /// When the interval ended, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    interval: Option<f64>,
    /// The vCPU that the row is of, with `-A` or where vCPUs were chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    vcpu: Option<u32>,
    /// The core that the row is of, where cores were chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    core: Option<u32>,
    /// A number with six digits behind the point, or why there is none.
    counter_value: String,
    /// Unit of `counter-value`: `ns`, `bytes`, a multiple of it, or empty for a number of events.
    unit: &'a str,
    /// The event, as it was named.
    event: &'a str,
    /// Standard deviation of the mean over the repetitions of `-r`, in percent of the mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    variance: Option<f64>,
    /// In nanoseconds.
    event_runtime: u64,
    /// Share of the time for which the event was on a counter, in percent.
    pcnt_running: f64,
    /// The metric that belongs to the row.
    #[serde(skip_serializing_if = "Option::is_none")]
    metric_value: Option<f64>,
    /// What the metric is, with its unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    metric_unit: Option<&'a str>,
    /// How the count came about; not there where there is no count.
    #[serde(skip_serializing_if = "Option::is_none")]
    provenance: Option<String>,
}

/// Writes an object a line.
pub(super) fn write_rows(rows: &[Row], end_ns: Option<u64>, out: &mut dyn Write) -> io::Result<()> {
    for row in rows {
        serde_json::to_writer(&mut *out, &line(row, end_ns))?;
        writeln!(out)?;
    }
    Ok(())
}

fn line(row: &Row, end_ns: Option<u64>) -> JsonRow<'_> {
    let (vcpu, core) = match row.whose {
        None => (None, None),
        Some(Target::Vcpu(vcpu)) => (Some(vcpu), None),
        Some(Target::Core(core)) => (None, Some(core)),
    };
    JsonRow {
        #[expect(clippy::cast_precision_loss, reason = "exact for a hundred days")]
        interval: end_ns.map(|ns| ns as f64 / 1e9),
        vcpu,
        core,
        counter_value: match row.value {
            // Not by way of a double, which cannot hold all of them.
            Value::Counted(count) if row.unit.scale == 1.0 => format!("{count}.000000"),
            Value::Counted(count) => format!("{:.6}", in_unit(count, row.unit)),
            other => missing(other).unwrap_or_default().to_owned(),
        },
        unit: row.unit.name,
        event: &row.event,
        variance: row.variance().map(hundredths),
        event_runtime: row.running_ns,
        pcnt_running: hundredths(row.percent_running()),
        metric_value: row.metric().map(|metric| metric.value),
        metric_unit: row.metric().map(|metric| metric.unit.as_str()),
        provenance: row.provenance().map(|one| one.to_string()),
    }
}

/// Rounded as perf prints it.
fn hundredths(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_are_of_the_structures() {
        crate::schema::check::<JsonRow<'_>>("stat");
    }
}
