//! The report for people, in the form of `perf report --stdio`.

use std::io::{self, Write};

use super::Report;
use crate::profile::facts::{Facts, began, event_name, how_often, scaled};
use crate::profile::reader::Ending;
use crate::profile::record::Ring;
use crate::profile::symbols::SymbolTable;
use crate::profile::tally::{SampleRow, SampleTally, SortKey};
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
        Ending::Whole(ns) => format!(" for {:.3} s", scaled(ns, 1_000_000_000)),
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
    let (kernel, unknown) = tally.without_symbol();
    let all = tally.all();
    let part = if facts.filter.is_part() {
        " on the chosen vCPUs and cores"
    } else {
        ""
    };
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
    if let Some(hint) = facts.hint(kernel, unknown) {
        writeln!(out, "# Hint: {hint}")?;
    }
    writeln!(out, "#")?;
    write_rows(report, facts.symbols, tally, out)
}

fn write_rows(
    report: &Report<'_>,
    symbols: &SymbolTable,
    tally: &SampleTally,
    out: &mut dyn Write,
) -> io::Result<()> {
    let rows = tally.rows();
    // Rows descend.
    let shown = rows.partition_point(|row| row.percent >= report.least_percent);
    let keys = report.keys.keys();
    let mut table = vec![vec!["Overhead".to_owned(), "Samples".to_owned()]];
    table[0].extend(keys.iter().map(|key| title(*key).to_owned()));
    for row in &rows[..shown] {
        let mut line = vec![format!("{:.2}%", row.percent), row.sum.samples.to_string()];
        line.extend(keys.iter().map(|key| cell(*key, row, symbols)));
        table.push(line);
    }
    let width = |column: usize| {
        let cells = table.iter().map(|line| line[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let dots = (0..table[0].len()).map(|column| ".".repeat(width(column)));
    table.insert(1, dots.collect());
    // The two numbers to the right, the rest to the left.
    for (number, line) in lines(table, |column, _| column < 2).enumerate() {
        match number {
            0 => writeln!(out, "# {line}")?,
            1 => writeln!(out, "# {line}\n#")?,
            _ => writeln!(out, "  {line}")?,
        }
    }
    match rows.len() - shown {
        0 => Ok(()),
        more => writeln!(
            out,
            "# {more} more rows have less than {} % each",
            report.least_percent
        ),
    }
}

fn title(key: SortKey) -> &'static str {
    match key {
        SortKey::Symbol => "Symbol",
        SortKey::Vcpu => "VM/vCPU",
        SortKey::Core => "Core",
        SortKey::Ring => "Ring",
        SortKey::Cr3 => "CR3",
    }
}

fn cell(key: SortKey, row: &SampleRow, symbols: &SymbolTable) -> String {
    const NOT_SAMPLED: &str = "not sampled";
    let key_of = &row.key;
    let text = match key {
        SortKey::Symbol => key_of.location.map(|location| location.name(symbols)),
        SortKey::Vcpu => key_of.vcpu.map(|(vm, vcpu)| format!("{vm}/{vcpu}")),
        SortKey::Core => key_of.core.map(|core| core.to_string()),
        SortKey::Ring => key_of
            .ring
            .map(|ring| ring.map_or(NOT_SAMPLED, Ring::name).to_owned()),
        SortKey::Cr3 => key_of
            .cr3
            .map(|cr3| cr3.map_or(NOT_SAMPLED.to_owned(), |cr3| format!("{cr3:#x}"))),
    };
    text.unwrap_or_default()
}
