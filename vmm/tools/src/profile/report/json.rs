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
struct JsonReport<'a> {
    header: &'a Header,
    totals: Totals,
    /// The trailer was there and agreed.
    complete: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_ns: Option<u64>,
    warnings: Vec<String>,
    events: Vec<OfEvent<'a>>,
}

#[derive(Serialize)]
struct OfEvent<'a> {
    event: String,
    #[serde(flatten)]
    how: Option<SampledHow<'a>>,
    samples: u64,
    events: u128,
    /// What parts are of, where that is more.
    #[serde(skip_serializing_if = "Option::is_none")]
    of_events: Option<u128>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'static str>,
    rows: Vec<ReportLine>,
    /// Rows below the limit, which are left out.
    rows_left_out: usize,
}

#[derive(Serialize)]
struct SampledHow<'a> {
    sampling: &'a crate::profile::record::Sampling,
    #[serde(skip_serializing_if = "Option::is_none")]
    provenance: Option<String>,
}

/// A row. What was not sorted by is left out; what was not sampled is null.
#[derive(Serialize)]
struct ReportLine {
    overhead: f64,
    samples: u64,
    events: u128,
    /// With what is called from there.
    #[serde(skip_serializing_if = "Option::is_none")]
    children: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    comm: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<Option<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<Option<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dso: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    symbol: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    module: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vm: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vcpu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    core: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ring: Option<Option<Ring>>,
    #[serde(skip_serializing_if = "Option::is_none")]
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
