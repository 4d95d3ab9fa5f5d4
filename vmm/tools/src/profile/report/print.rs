//! The report for people, in the form of `perf report --stdio`.

use std::io::{self, Write};

use super::Report;
use super::cells::cell;
use super::columns::Column;
use super::hierarchy::write_hierarchy;
use super::tree::Tree;
use crate::profile::facts::{Facts, began, event_name, how_often, of_time, scaled};
use crate::profile::reader::Ending;
use crate::profile::tally::{SampleRow, SampleTally};
use crate::table::lines;

/// Writes the report. Lines about it begin with `#`.
///
/// # Errors
/// `out` cannot be written to.
pub fn write_text(report: &Report<'_>, facts: &Facts<'_>, out: &mut dyn Write) -> io::Result<()> {
    write_facts(facts, out)?;
    for (event, tally) in report.events() {
        write_event(report, facts, (event, tally), out)?;
    }
    out.flush()
}

/// What is known of the file, as comments.
pub(in crate::profile) fn write_facts(facts: &Facts<'_>, out: &mut dyn Write) -> io::Result<()> {
    let header = facts.header;
    let name = match header.vm_name.as_str() {
        "" => String::new(),
        name => format!(" ({name})"),
    };
    let lasted = match facts.ending {
        Ending::Whole(ns) => format!(" for {:.3} s{}", scaled(ns, 1_000_000_000), of_time(header)),
        _ => String::new(),
    };
    writeln!(
        out,
        "# VM {}{name}: {} vCPUs on {} cores; recorded {}{lasted} by umpire {}",
        header.vm,
        header.vcpus,
        header.cores,
        began(header),
        header.umpire,
    )?;
    if !header.host.is_empty() {
        writeln!(out, "# Host: {}", header.host)?;
    }
    let totals = facts.totals;
    writeln!(
        out,
        "# Samples lost for want of room: {}; throttled: {} times; time without a counter: {:.3} ms",
        totals.lost,
        totals.throttled,
        scaled(totals.blind_ns, 1_000_000),
    )?;
    if let Some(chosen) = facts.whose() {
        writeln!(out, "# Only {chosen}")?;
    }
    for warning in facts.warnings() {
        writeln!(out, "# Warning: {warning}")?;
    }
    Ok(())
}

fn write_event(
    report: &Report<'_>,
    facts: &Facts<'_>,
    (event, tally): (u16, &SampleTally),
    out: &mut dyn Write,
) -> io::Result<()> {
    let all = tally.all();
    let part = facts.part();
    writeln!(
        out,
        "#\n# Samples: {} of event '{}'{part}",
        all.samples,
        event_name(facts.header, event)
    )?;
    if let Some(event) = facts.header.events.get(usize::from(event)) {
        writeln!(
            out,
            "# Sampled: {}; {}",
            how_often(event.sampling),
            event.how()
        )?;
    }
    writeln!(out, "# Event count (approx.): {}", all.events)?;
    let whole = report.whole(tally);
    if whole != all {
        writeln!(
            out,
            "# Percentages are parts of all {} samples' events: {}; of those that were chosen \
             with --percentage relative",
            whole.samples, whole.events
        )?;
    }
    if let Some(hint) = facts.hint(tally.without_symbol()) {
        writeln!(out, "# Hint: {hint}")?;
    }
    writeln!(out, "#")?;
    write_rows(report, tally, out)
}

fn write_rows(report: &Report<'_>, tally: &SampleTally, out: &mut dyn Write) -> io::Result<()> {
    let (rows, left_out) = report.rows(tally);
    let looks = report.looks();
    if looks.hierarchy {
        write_hierarchy(report, tally, &rows, out)?;
    } else {
        let columns = &looks.columns;
        let heads = columns.iter().map(|one| one.title(columns).to_owned());
        let mut table = vec![heads.collect::<Vec<String>>()];
        for row in &rows {
            let cells = columns.iter().map(|one| column(*one, row, report, tally));
            table.push(cells.collect());
        }
        let lines: Box<dyn Iterator<Item = String>> = match &looks.separator {
            Some(separator) => Box::new(separated(table, separator)),
            None => Box::new(below_dots(table, |at| columns[at].is_number())),
        };
        let heads = if looks.separator.is_some() { 1 } else { 2 };
        for (number, line) in lines.enumerate() {
            writeln!(out, "{line}")?;
            if let (Some(graph), Some(row)) = (looks.graph, number.checked_sub(heads)) {
                Tree::of(report, tally, &rows[row], graph).write(out)?;
            }
        }
    }
    match left_out {
        0 => Ok(()),
        more => writeln!(
            out,
            "# {more} more rows have less than {} % each",
            looks.least_percent
        ),
    }
}

/// What a row has in a column.
fn column(column: Column, row: &SampleRow, report: &Report<'_>, tally: &SampleTally) -> String {
    match column {
        Column::Children => format!("{:.2}%", row.total.percent(report.whole(tally))),
        Column::Overhead => format!("{:.2}%", row.own.percent(report.whole(tally))),
        Column::Sample => row.own.samples.to_string(),
        Column::Period => row.own.events.to_string(),
        Column::Key(key) => cell(key, row, report),
    }
}

/// The lines of a table with `separator` between columns. As with perf, the words have a dot
/// for it.
fn separated(table: Vec<Vec<String>>, separator: &str) -> impl Iterator<Item = String> {
    let join = |cells: Vec<String>| {
        let cells = cells.iter().map(|cell| cell.replace(separator, "."));
        cells.collect::<Vec<String>>().join(separator)
    };
    let lines = table.into_iter().enumerate().map(move |(number, cells)| {
        let line = join(cells);
        if number == 0 {
            format!("# {line}")
        } else {
            line
        }
    });
    lines.collect::<Vec<String>>().into_iter()
}

/// The lines of a table as perf prints it: dots below the heads, columns with numbers to the
/// right, the rest to the left.
pub(in crate::profile) fn below_dots(
    mut table: Vec<Vec<String>>,
    is_number: impl Fn(usize) -> bool,
) -> impl Iterator<Item = String> {
    let width = |column: usize| {
        let cells = table.iter().map(|line| line[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let dots = (0..table[0].len()).map(|column| ".".repeat(width(column)));
    let dots = dots.collect();
    table.insert(1, dots);
    let lines = lines(table, move |column, _| is_number(column)).enumerate();
    lines.map(|(number, line)| match number {
        0 => format!("# {line}"),
        1 => format!("# {line}\n#"),
        _ => format!("  {line}"),
    })
}
