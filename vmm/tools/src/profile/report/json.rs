//! The report for programs: one JSON object.

use std::io::{self, Write};

use serde::Serialize;

use super::Report;
use super::graph::Graph;
use super::tree::{Branch, Tree};
use crate::profile::facts::{Facts, event_name};
use crate::profile::location::CodeLocation;
use crate::profile::names::WordId;
use crate::profile::reader::Ending;
use crate::profile::record::{Header, Ring, SampledEvent, Totals};
use crate::profile::tally::{SampleRow, SampleTally};

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct JsonReport<'a> {
    header: &'a Header,
    totals: Totals,
    /// The trailer was there and agreed.
    complete: bool,
    /// How long the recording took, in nanoseconds; not there in a profile that was cut short.
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_ns: Option<u64>,
    /// What is wrong with the profile, a sentence each.
    warnings: Vec<String>,
    /// The events that samples were taken of, each with its rows.
    events: Vec<OfEvent<'a>>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("allOf" = [{"anyOf": [{"$ref": "#/$defs/SampledHow"}, {}]}])))]
struct OfEvent<'a> {
    /// The event's name.
    event: String,
    #[serde(flatten)]
    #[cfg_attr(test, schemars(skip))]
    how: Option<SampledHow<'a>>,
    /// Number of samples.
    samples: u64,
    /// Events that the samples stand for.
    events: u128,
    /// The events that overheads are parts of, where filters of tasks, files or symbols show less
    /// (--percentage absolute).
    #[serde(skip_serializing_if = "Option::is_none")]
    of_events: Option<u128>,
    /// What would tell more, a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'static str>,
    /// Rows in order of their share.
    rows: Vec<ReportLine>,
    /// Rows below the limit, which are left out.
    rows_left_out: usize,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct SampledHow<'a> {
    sampling: &'a crate::profile::record::Sampling,
    /// How counts of the event came about.
    #[serde(skip_serializing_if = "Option::is_none")]
    provenance: Option<String>,
}

/// A row. What was not sorted by is left out; what was not sampled is null.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct ReportLine {
    /// Share of the event's samples, or events, in percent.
    overhead: f64,
    /// Number of samples.
    samples: u64,
    /// Events that the samples stand for.
    events: u128,
    /// With what is called from there.
    #[serde(skip_serializing_if = "Option::is_none")]
    children: Option<f64>,
    /// Name of the program (its `comm`).
    #[serde(skip_serializing_if = "Option::is_none")]
    comm: Option<String>,
    /// Process id in the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(extend("x-null" = true)))]
    pid: Option<Option<u32>>,
    /// Thread id in the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(extend("x-null" = true)))]
    tid: Option<Option<u32>>,
    /// File, or part of the kernel, that has the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    dso: Option<String>,
    /// Name of the symbol, or why there is none in brackets.
    #[serde(skip_serializing_if = "Option::is_none")]
    symbol: Option<String>,
    /// Module of the guest's kernel that has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    module: Option<String>,
    /// The address in hexadecimal, where no symbol has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    /// The VM: process id of its VMM.
    #[serde(skip_serializing_if = "Option::is_none")]
    vm: Option<u32>,
    /// The vCPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    vcpu: Option<u32>,
    /// The core.
    #[serde(skip_serializing_if = "Option::is_none")]
    core: Option<u32>,
    /// `kernel` (CPL 0) or `user` (CPL 1 to 3); null where it was not sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(extend("x-null" = true)))]
    ring: Option<Option<Ring>>,
    /// CR3 in hexadecimal: whose address space; null where it was not sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(test, schemars(extend("x-null" = true)))]
    cr3: Option<Option<String>>,
    /// The tree of callers.
    #[serde(skip_serializing_if = "Option::is_none")]
    chains: Option<Vec<Branch>>,
}

/// Writes the report as one JSON object.
///
/// # Errors
/// `out` cannot be written to.
pub fn write_json(report: &Report<'_>, facts: &Facts<'_>, out: &mut dyn Write) -> io::Result<()> {
    let whole = JsonReport {
        header: facts.header,
        totals: facts.totals,
        complete: matches!(facts.ending, Ending::Whole(_)),
        duration_ns: match facts.ending {
            Ending::Whole(ns) => Some(ns),
            _ => None,
        },
        warnings: facts.warnings(),
        events: report
            .events()
            .map(|(event, tally)| of_event(report, facts, event, tally))
            .collect(),
    };
    serde_json::to_writer(&mut *out, &whole)?;
    writeln!(out)?;
    out.flush()
}

fn of_event<'a>(
    report: &Report<'_>,
    facts: &Facts<'a>,
    event: u16,
    tally: &SampleTally,
) -> OfEvent<'a> {
    let (rows, rows_left_out) = report.rows(tally);
    let whole = report.whole(tally);
    let how = |event: &'a SampledEvent| SampledHow {
        sampling: &event.sampling,
        provenance: event.provenance.map(|one| one.to_string()),
    };
    OfEvent {
        event: event_name(facts.header, event),
        how: facts.header.events.get(usize::from(event)).map(how),
        samples: tally.all().samples,
        events: tally.all().events,
        of_events: (whole != tally.all()).then_some(whole.events),
        hint: facts.hint(tally.without_symbol()),
        rows: rows.iter().map(|row| line(report, tally, row)).collect(),
        rows_left_out,
    }
}

fn line(report: &Report<'_>, tally: &SampleTally, row: &SampleRow) -> ReportLine {
    let (key, names) = (&row.key, report.paths().names());
    let (symbol, module, address) = match key.location {
        None => (None, None, None),
        Some(CodeLocation::Symbol(index)) => {
            let module = names.kernel.module(index).map(str::to_owned);
            (Some(names.kernel.name(index).to_owned()), module, None)
        }
        Some(CodeLocation::Unknown(ip)) => {
            (Some("[unknown]".to_owned()), None, Some(format!("{ip:#x}")))
        }
        Some(program) => (Some(program.symbol(names)), None, None),
    };
    let id = |task: Option<(u32, WordId)>| task.map(|(id, _)| id);
    let word = |word| names.text(word).to_owned();
    let chains = |graph: Graph| Tree::of(report, tally, row, graph).branches();
    ReportLine {
        overhead: row.own.percent(report.whole(tally)),
        samples: row.own.samples,
        events: row.own.events,
        children: report
            .looks()
            .children
            .then(|| row.total.percent(report.whole(tally))),
        comm: key.comm.map(word),
        pid: key.pid.map(id),
        tid: key.tid.map(id),
        dso: key.dso.map(word),
        symbol,
        module,
        address,
        vm: key.vcpu.map(|(vm, _)| vm),
        vcpu: key.vcpu.map(|(_, vcpu)| vcpu),
        core: key.core,
        ring: key.ring,
        cr3: key.cr3.map(|cr3| cr3.map(|cr3| format!("{cr3:#x}"))),
        chains: report.looks().graph.map(chains),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_are_of_the_structures() {
        crate::schema::check::<JsonReport<'_>>("report");
        crate::schema::check::<SampledHow<'_>>("report");
    }
}
