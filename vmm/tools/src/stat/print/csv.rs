//! The fields of `perf stat -x`.

use std::io::{self, Write};

use super::Form;
use crate::stat::{Row, Value, in_unit, missing};
use crate::targets::Target;

/// Writes a line for each row: `first`, which is the end of the interval under `-I`, with
/// `--per-vcpu` whose it is; then value, unit, event, with `runs` (`-r`) the
/// variance, running time in nanoseconds, percent running, metric, metric's unit,
/// and the provenance if it is asked for.
pub(super) fn write_rows(
    rows: &[Row],
    first: Option<&str>,
    runs: bool,
    form: &Form,
    out: &mut dyn Write,
) -> io::Result<()> {
    let Form::Csv {
        separator,
        provenance,
    } = form
    else {
        return Ok(());
    };
    for row in rows {
        let mut fields = fields(row, first, runs);
        if *provenance {
            let how = row.provenance();
            fields.push(how.map_or(String::new(), |one| one.to_string()));
        }
        let quoted: Vec<String> = fields.iter().map(|one| quoted(one, separator)).collect();
        writeln!(out, "{}", quoted.join(separator))?;
    }
    Ok(())
}

fn fields(row: &Row, first: Option<&str>, runs: bool) -> Vec<String> {
    let mut fields: Vec<String> = first.map(str::to_owned).into_iter().collect();
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
