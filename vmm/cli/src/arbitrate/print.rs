//! Traces for people.

use std::io::{self, Write};

use arbiter::{Event, Outcome, Policy, Scheme};
use arbiter_lab::script::{Row, Script, Trace, What};
use umpire_tools::table::lines;

use super::{Play, format};

/// Writes each trace, and if there are several how they differ.
pub(super) fn write(script: &Script, plays: &[Play], out: &mut dyn Write) -> io::Result<()> {
    for play in plays {
        writeln!(out, "{}", title(play.scheme))?;
        write_trace(&play.trace, out)?;
        writeln!(out)?;
    }
    match plays {
        [play] => {
            writeln!(out, "At the end")?;
            write_holders(&play.trace, out)
        }
        _ => {
            compare_steps(script, plays, out)?;
            writeln!(out)?;
            compare_holders(plays, out)
        }
    }
}

fn title(scheme: Scheme) -> &'static str {
    match scheme {
        Scheme::SingleMaster => "Single master: the hypervisor manages every counter",
        Scheme::Independent => "Independent: first come, first served",
        Scheme::Interacting => "Interacting: a layer that is short has the others asked",
    }
}

fn write_trace(trace: &Trace, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{:>8}  {:<10}  {:<7}  what", "ms", "layer", "counter")?;
    let next = trace.rows.iter().skip(1).map(Some).chain([None]);
    for (row, next) in trace.rows.iter().zip(next) {
        if is_said_again(row, next) {
            continue;
        }
        let layer = row.layer.map_or("", format::layer);
        let counter = row
            .counter
            .map_or(String::new(), |counter| counter.to_string());
        let what = format::what(row.what);
        writeln!(out, "{:>8}  {layer:<10}  {counter:<7}  {what}", row.at_ms)?;
    }
    Ok(())
}

/// A refusal, if the next row is the answer that says so.
fn is_said_again(row: &Row, next: Option<&Row>) -> bool {
    let (What::Decided(Event::Refused(reason)), Some(next)) = (row.what, next) else {
        return false;
    };
    let is_same = match next.what {
        What::Faulted(said) => said == reason,
        What::Answered(answer) => answer.outcome == Outcome::Refused(reason),
        _ => false,
    };
    is_same && next.layer == row.layer
}

fn write_holders(trace: &Trace, out: &mut dyn Write) -> io::Result<()> {
    let holders = Policy::LAYERS.into_iter().map(Some).chain([None]);
    for holder in holders {
        let its = trace.owners.iter().filter(|(_, owner)| *owner == holder);
        let its: Vec<String> = its.map(|(counter, _)| counter.to_string()).collect();
        let name = holder.map_or("free", format::layer);
        let its = if its.is_empty() {
            "-".to_owned()
        } else {
            its.join(" ")
        };
        writeln!(out, "  {name:<10}  {its}")?;
    }
    Ok(())
}

fn compare_steps(script: &Script, plays: &[Play], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "What came of each step")?;
    let mut table = vec![head(&["ms", "layer", "step"], plays)];
    for (index, step) in script.steps().iter().enumerate() {
        let Some(layer) = step.layer else {
            continue;
        };
        let mut row = vec![
            step.at_ms.to_string(),
            format::layer(layer).to_owned(),
            format::action(step.action),
        ];
        let ends = plays.iter().filter_map(|play| play.trace.ends.get(index));
        row.extend(ends.map(|end| format::end(*end, step.at_ms)));
        table.push(row);
    }
    write_table(table, out)
}

fn compare_holders(plays: &[Play], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "Who holds what at the end")?;
    let mut table = vec![head(&["counter"], plays)];
    let counters = plays.first().map_or(&[][..], |play| &play.trace.owners);
    for (index, (counter, _)) in counters.iter().enumerate() {
        let mut row = vec![counter.to_string()];
        let owners = plays.iter().filter_map(|play| play.trace.owners.get(index));
        row.extend(owners.map(|(_, owner)| owner.map_or("-", format::layer).to_owned()));
        table.push(row);
    }
    write_table(table, out)
}

fn head(columns: &[&str], plays: &[Play]) -> Vec<String> {
    let columns = columns.iter().map(|column| (*column).to_owned());
    let schemes = plays.iter().map(|play| play.scheme.name().to_owned());
    columns.chain(schemes).collect()
}

/// Numbers to the right, words to the left.
fn write_table(table: Vec<Vec<String>>, out: &mut dyn Write) -> io::Result<()> {
    lines(table, |_, cell| cell.parse::<u32>().is_ok())
        .try_for_each(|line| writeln!(out, "  {line}"))
}
