//! Traces for programs: one JSON object a line.

use std::io::{self, Write};

use arbiter::{CounterSet, Event, Outcome};
use arbiter_lab::script::{End, Script, What};
use serde::Serialize;

use super::{Play, format};

/// One line. What does not apply is left out.
#[derive(Debug, Default, Serialize)]
struct JsonLine<'a> {
    scheme: &'a str,
    event: &'a str,
    /// Of the script, for `step` and `outcome`.
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ms: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    layer: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    counter: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    counters: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    action: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    number: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    wanted_by: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    to: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_ms: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    in_ms: Option<u32>,
}

/// Writes each trace, then how each step ended, then who holds what.
pub(super) fn write(script: &Script, plays: &[Play], out: &mut dyn Write) -> io::Result<()> {
    for play in plays {
        let scheme = play.scheme.name();
        for row in &play.trace.rows {
            let mut line = JsonLine {
                scheme,
                ms: Some(row.at_ms),
                layer: row.layer.map(format::layer),
                counter: row.counter.map(|counter| counter.to_string()),
                ..JsonLine::default()
            };
            describe(row.what, &mut line);
            put(&line, out)?;
        }
        for (step, end) in script.steps().iter().zip(&play.trace.ends) {
            let mut line = JsonLine {
                scheme,
                event: "outcome",
                line: Some(step.line),
                ms: Some(step.at_ms),
                layer: step.layer.map(format::layer),
                action: Some(format::action(step.action)),
                ..JsonLine::default()
            };
            match *end {
                End::Done => line.state = Some("done"),
                End::NotAsked => line.state = Some("not-asked"),
                End::Faulted(reason) => {
                    line.state = Some("faulted");
                    line.reason = Some(reason.name());
                }
                End::Answered { outcome, at_ms } => {
                    line.ms = Some(at_ms);
                    answer(outcome, &mut line);
                }
            }
            put(&line, out)?;
        }
        for (counter, owner) in &play.trace.owners {
            put(
                &JsonLine {
                    scheme,
                    event: "holds",
                    layer: Some(owner.map_or("nobody", format::layer)),
                    counter: Some(counter.to_string()),
                    ..JsonLine::default()
                },
                out,
            )?;
        }
    }
    Ok(())
}

fn put(line: &JsonLine<'_>, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer(&mut *out, line)?;
    writeln!(out)
}

fn describe(what: What, line: &mut JsonLine<'_>) {
    match what {
        What::Does(action) => {
            line.event = "step";
            line.action = Some(format::action(action));
        }
        What::Answered(one) => {
            line.event = "answer";
            line.number = Some(one.number);
            answer(one.outcome, line);
        }
        What::Faulted(reason) => {
            line.event = "general-protection";
            line.reason = Some(reason.name());
        }
        What::NotAsked => line.event = "not-asked",
        What::Decided(event) => {
            line.event = event.name();
            line.reason = event.reason().map(|reason| reason.name());
            match event {
                Event::Reserved { lease_ms } => line.lease_ms = lease_ms,
                Event::HandedOver { from } => line.from = Some(format::layer(from)),
                Event::Yielded { to } => line.to = Some(format::layer(to)),
                Event::Asked { wanted_by } | Event::Declined { wanted_by, .. } => {
                    line.wanted_by = Some(format::layer(wanted_by));
                }
                Event::Revoking {
                    wanted_by, in_ms, ..
                } => {
                    line.wanted_by = Some(format::layer(wanted_by));
                    line.in_ms = Some(in_ms);
                }
                _ => {}
            }
        }
    }
}

fn answer(outcome: Outcome, line: &mut JsonLine<'_>) {
    let names = |set: CounterSet| set.iter().map(|counter| counter.to_string()).collect();
    line.state = Some(match outcome {
        Outcome::Nothing => "none",
        Outcome::Granted(set) => {
            line.counters = Some(names(set));
            "granted"
        }
        Outcome::Refused(reason) => {
            line.reason = Some(reason.name());
            "refused"
        }
        Outcome::Pending => "pending",
    });
}
