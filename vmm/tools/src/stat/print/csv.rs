//! The fields of `perf stat -x`.

use std::io::{self, Write};

use crate::stat::{Row, Value, in_unit, missing, stamp};
use crate::targets::Target;

/// Writes a line for each row: under `-I` the end of the interval, with
/// `--per-vcpu` whose it is; then value, unit, event, with `runs` (`-r`) the
/// variance, running time in nanoseconds, percent running, metric, metric's unit,
/// and provenance.
pub(super) fn write_rows(
    rows: &[Row],
    end_ns: Option<u64>,
    runs: bool,
    separator: &str,
    out: &mut dyn Write,
) -> io::Result<()> {
    for row in rows {
        let fields = fields(row, end_ns, runs);
        let quoted: Vec<String> = fields.iter().map(|one| quoted(one, separator)).collect();
        writeln!(out, "{}", quoted.join(separator))?;
    }
    Ok(())
}

fn fields(row: &Row, end_ns: Option<u64>, runs: bool) -> Vec<String> {
    let mut fields: Vec<String> = end_ns.map(stamp).into_iter().collect();
    fields.extend(row.whose.map(|whose| match whose {
        Target::Vcpu(vcpu) => format!("vCPU{vcpu}"),
        Target::Core(core) => format!("core{core}"),
    }));
    fields.push(match row.value {
        Value::Counted(count) if row.unit.scale == 1.0 => count.to_string(),
        Value::Counted(count) => format!("{:.2}", in_unit(count, row.unit)),
        other => missing(other).unwrap_or_default().to_owned(),
    });
    fields.push(row.unit.name.to_owned());
    fields.push(row.event.clone());
    if runs {
        let variance = row.variance();
        fields.push(variance.map_or(String::new(), |percent| format!("{percent:.2}%")));
    }
    fields.push(row.running_ns.to_string());
    fields.push(format!("{:.2}", row.percent_running()));
    let (value, unit) = row.metric().map_or(Default::default(), |metric| {
        let digits = usize::from(metric.digits);
        (format!("{:.digits$}", metric.value), metric.unit.clone())
    });
    fields.extend([value, unit]);
    fields.push(
        row.provenance()
            .map_or(String::new(), |one| one.to_string()),
    );
    fields
}

/// A field that has the separator in it, in quotation marks (RFC 4180).
fn quoted(field: &str, separator: &str) -> String {
    let apart = !separator.is_empty() && field.contains(separator);
    if apart || field.contains(['"', '\n']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}
