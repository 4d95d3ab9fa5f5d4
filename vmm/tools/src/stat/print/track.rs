//! The lines of `cputrack`: one for each vCPU at each interval, with what it has counted
//! there; at the end one for each with all that it has counted, and one for all of them.

use std::collections::BTreeSet;
use std::io::{self, Write};

use super::{Interval, Whole};
use crate::stat::{Row, Value, missing};
use crate::targets::Target;

/// Room for a count, and for what stands where there is none.
const COUNT: usize = 15;

pub(super) fn write_interval(
    interval: &Interval<'_>,
    header: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    let groups = groups(interval.rows);
    if interval.first && header {
        heading(interval.rows, out)?;
    }
    for rows in groups {
        line(interval.end_ns, &whose(rows), "tick", rows, out)?;
    }
    Ok(())
}

/// `shown`: intervals came before, with their heading.
pub(super) fn write_whole(
    whole: &Whole<'_>,
    (header, shown): (bool, bool),
    out: &mut dyn Write,
) -> io::Result<()> {
    let groups = groups(whole.rows);
    if header && !shown {
        heading(whole.rows, out)?;
    }
    // The run's length, in nanoseconds: no run is as long as 2^53 of them.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "shown to a millisecond"
    )]
    let end_ns = (whole.elapsed.mean().unwrap_or(0.0) * 1e9) as u64;
    for rows in &groups {
        line(end_ns, &whose(rows), "exit", rows, out)?;
    }
    if groups.len() > 1 {
        let total = total(&groups);
        line(end_ns, "-", "total", &total, out)?;
    }
    if header {
        provenance(whole.rows, out)?;
    }
    Ok(())
}

/// The rows of each vCPU or core.
fn groups(rows: &[Row]) -> Vec<&[Row]> {
    rows.chunk_by(|one, next| one.whose == next.whose).collect()
}

fn whose(rows: &[Row]) -> String {
    match rows.first().and_then(|row| row.whose) {
        Some(Target::Vcpu(vcpu)) => vcpu.to_string(),
        Some(Target::Core(core)) => format!("core{core}"),
        None => "-".to_owned(),
    }
}

fn width(event: &str) -> usize {
    event.chars().count().max(COUNT)
}

fn heading(rows: &[Row], out: &mut dyn Write) -> io::Result<()> {
    let first = groups(rows).first().copied().unwrap_or_default();
    write!(out, "{:>10} {:>6} {:>6}", "time", "vcpu", "event")?;
    for row in first {
        write!(out, " {:>1$}", row.event, width(&row.event))?;
    }
    writeln!(out)
}

fn line(end_ns: u64, whose: &str, what: &str, rows: &[Row], out: &mut dyn Write) -> io::Result<()> {
    let ms = end_ns / 1_000_000;
    write!(out, "{:6}.{:03} {whose:>6} {what:>6}", ms / 1000, ms % 1000)?;
    for row in rows {
        let value = match row.value {
            Value::Counted(count) => count.to_string(),
            other => missing(other).unwrap_or_default().to_owned(),
        };
        write!(out, " {value:>0$}", width(&row.event))?;
    }
    writeln!(out)
}

/// What all have counted together; nothing where one has no count.
fn total(groups: &[&[Row]]) -> Vec<Row> {
    let mut total = groups.first().copied().unwrap_or_default().to_vec();
    for rows in groups.iter().skip(1) {
        for (sum, row) in total.iter_mut().zip(*rows) {
            sum.value = match (sum.value, row.value) {
                (Value::Counted(sum), Value::Counted(more)) => {
                    Value::Counted(sum.saturating_add(more))
                }
                (Value::NotSupported, _) | (_, Value::NotSupported) => Value::NotSupported,
                _ => Value::NotCounted,
            };
        }
    }
    total
}

/// How counts were obtained, in a comment.
fn provenance(rows: &[Row], out: &mut dyn Write) -> io::Result<()> {
    let how = |row: &Row| Some(format!("{} {}", row.event, row.provenance()?));
    let all: BTreeSet<String> = rows.iter().filter_map(how).collect();
    if all.is_empty() {
        return Ok(());
    }
    let all: Vec<String> = all.into_iter().collect();
    writeln!(out, "# {}", all.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stat::print::{Form, write_interval, write_whole};
    use crate::stat::{Runs, Unit};
    use pmu_model::Provenance;

    fn row(vcpu: u32, event: &str, value: Value) -> Row {
        Row {
            event: event.to_owned(),
            unit: Unit::EVENTS,
            value,
            provenance: Some(Provenance::Exact),
            enabled_ns: 1,
            running_ns: 1,
            variance: None,
            whose: Some(Target::Vcpu(vcpu)),
            metric: None,
        }
    }

    fn rows() -> Vec<Row> {
        vec![
            row(0, "cycles", Value::Counted(765_308)),
            row(0, "instructions:u", Value::Counted(219_233)),
            row(1, "cycles", Value::Counted(2)),
            row(1, "instructions:u", Value::NotCounted),
        ]
    }

    #[test]
    fn lines_are_those_of_cputrack() {
        let rows = rows();
        let mut out = Vec::new();
        let form = Form::Track {
            header: true,
            shown: true,
        };
        for (end_ns, first) in [(1_007_000_000, true), (2_007_999_999, false)] {
            let interval = Interval {
                end_ns,
                rows: &rows[..2],
                first,
            };
            write_interval(&interval, &form, &mut out).unwrap();
        }
        let mut elapsed = Runs::default();
        elapsed.add(10.017);
        let whole = Whole {
            title: "VM 7",
            rows: &rows,
            elapsed: &elapsed,
            virtual_time: false,
            repeated: false,
            summary: false,
        };
        write_whole(&whole, &form, &mut out).unwrap();
        let expected = "      time   vcpu  event          cycles  instructions:u
     1.007      0   tick          765308          219233
     2.007      0   tick          765308          219233
    10.017      0   exit          765308          219233
    10.017      1   exit               2   <not counted>
    10.017      -  total          765310   <not counted>
# cycles exact, instructions:u exact
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn without_a_heading_every_line_is_a_count() {
        let rows = rows();
        let mut out = Vec::new();
        let form = Form::Track {
            header: false,
            shown: false,
        };
        let whole = Whole {
            title: "",
            rows: &rows[..2],
            elapsed: &Runs::default(),
            virtual_time: false,
            repeated: false,
            summary: false,
        };
        write_whole(&whole, &form, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains("exit"));
    }
}
