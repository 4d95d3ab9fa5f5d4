//! `umpire arbitrate --replay`: plays the requests of a real run again, and compares
//! their answers with those of the run.

mod trail;

use std::io::{self, Write};
use std::path::Path;

use arbiter::{Ask, AskResult, Layer, Outcome, Policy, Scheme};
use arbiter_lab::{Recorded, ReplaySetup, Replayed, recorded_results, replay};
use serde::Serialize;
use umpire_tools::table::lines;

use super::{ArbitrateError, format};
use crate::config::parse_policy;
use crate::exit::{self, UserError};
use crate::flags::ArbitrateFlags;
use trail::Trail;
pub(super) use trail::TrailError;

/// One replay.
struct SchemeReplay {
    scheme: Scheme,
    /// It has the scheme and policy of the run.
    is_same: bool,
    results: Vec<Replayed>,
}

/// Replays the audit file at `path` under the schemes and the policy of the flags.
pub(super) fn report(
    flags: &ArbitrateFlags,
    path: &Path,
    out: &mut dyn Write,
) -> Result<(), UserError> {
    let (trail, plays) = prepare(flags, path).map_err(UserError::bad_input)?;
    let requests: Vec<Recorded> = trail.requests.iter().map(|(_, one)| *one).collect();
    let recorded = recorded_results(&requests);
    let written = if flags.json {
        json(&trail, &recorded, &plays, out)
    } else {
        table(&trail, &recorded, &plays, out)
    };
    exit::written(written.and_then(|()| out.flush()))
}

fn prepare(
    flags: &ArbitrateFlags,
    path: &Path,
) -> Result<(Trail, Vec<SchemeReplay>), ArbitrateError> {
    let schemes = super::schemes(&flags.scheme)?;
    let given = parse_policy(&flags.policy)?;
    let trail = Trail::read(path)?;
    let policy = if flags.policy.is_empty() {
        trail.policy
    } else {
        Policy {
            grace_ms: trail.policy.grace_ms,
            ..given
        }
    };
    policy.fits(trail.counters.programmable, trail.counters.fixed)?;
    let requests: Vec<Recorded> = trail.requests.iter().map(|(_, one)| *one).collect();
    let play = |scheme| {
        let is_same = scheme == trail.scheme && policy == trail.policy;
        let setup = ReplaySetup {
            vcpus: trail.vcpus,
            counters: trail.counters,
            policy,
            scheme,
            has_firmware: trail.has_firmware,
            smm: trail.smm,
            hypervisor_yields: !is_same,
            end_ns: trail.end_ns,
        };
        SchemeReplay {
            scheme,
            is_same,
            results: replay(&setup, &requests),
        }
    };
    let plays = schemes.into_iter().map(play).collect();
    Ok((trail, plays))
}

/// The rows of a report: those that ask for something. Answers belong to them.
fn rows(trail: &Trail) -> impl Iterator<Item = (usize, usize, &Recorded)> {
    let rows = trail.requests.iter().enumerate();
    let rows = rows.map(|(index, (line, request))| (index, *line, request));
    rows.filter(|(.., request)| !matches!(request.ask.ask, Ask::Answer | Ask::Backed(_)))
}

/// Whether two results are the same, the number of the answer apart: under another
/// scheme a request can raise #GP, which has none.
fn agree(one: &AskResult, other: &AskResult) -> bool {
    match (one, other) {
        (AskResult::Answered(one), AskResult::Answered(other)) => one.outcome == other.outcome,
        (one, other) => one == other,
    }
}

fn table(
    trail: &Trail,
    recorded: &[Replayed],
    plays: &[SchemeReplay],
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut heading = ["line", "ms", "vcpu", "layer", "request", "recorded"]
        .map(str::to_owned)
        .to_vec();
    heading.extend(plays.iter().map(|play| play.scheme.name().to_owned()));
    let mut cells = vec![heading];
    for (index, line, request) in rows(trail) {
        let mut row = vec![
            line.to_string(),
            (request.at_ns / 1_000_000).to_string(),
            request.vcpu.to_string(),
            layer(request.ask.layer).to_owned(),
            ask(&request.ask.ask),
            shown(request, &recorded[index]),
        ];
        row.extend(
            plays
                .iter()
                .map(|play| shown(request, &play.results[index])),
        );
        cells.push(row);
    }
    for line in lines(cells, |column, _| column < 3) {
        writeln!(out, "{line}")?;
    }
    writeln!(out)?;
    for play in plays {
        let sums = Sums::of(trail, recorded, play);
        let same = if play.is_same { ", as recorded" } else { "" };
        writeln!(
            out,
            "{}{same}: {} requests, {} granted, {} denied, {} pending, {} unlike the run",
            play.scheme, sums.requests, sums.granted, sums.denied, sums.pending, sums.unlike
        )?;
    }
    Ok(())
}

/// What came of all requests.
#[derive(Debug, Default, Serialize)]
struct Sums {
    requests: usize,
    granted: usize,
    denied: usize,
    pending: usize,
    unlike: usize,
}

impl Sums {
    fn of(trail: &Trail, recorded: &[Replayed], play: &SchemeReplay) -> Self {
        let mut sums = Sums::default();
        for (index, ..) in rows(trail) {
            let result = &play.results[index].result;
            sums.requests += 1;
            match *result {
                AskResult::Done => sums.granted += 1,
                AskResult::Faulted(_) => sums.denied += 1,
                AskResult::Answered(answer) => match answer.outcome {
                    Outcome::Nothing | Outcome::Granted(_) => sums.granted += 1,
                    Outcome::Refused(_) => sums.denied += 1,
                    Outcome::Pending => sums.pending += 1,
                },
            }
            sums.unlike += usize::from(!agree(result, &recorded[index].result));
        }
        sums
    }
}

/// One request under one scheme.
#[derive(Serialize)]
struct JsonRow<'a> {
    event: &'static str,
    scheme: &'a str,
    line: usize,
    time_ns: u64,
    vcpu: u8,
    layer: &'static str,
    request: String,
    recorded: String,
    replayed: String,
    answered_ns: u64,
    agrees: bool,
}

#[derive(Serialize)]
struct JsonSums<'a> {
    event: &'static str,
    scheme: &'a str,
    as_recorded: bool,
    #[serde(flatten)]
    sums: Sums,
}

fn json(
    trail: &Trail,
    recorded: &[Replayed],
    plays: &[SchemeReplay],
    out: &mut dyn Write,
) -> io::Result<()> {
    for play in plays {
        let scheme = play.scheme.name();
        for (index, line, request) in rows(trail) {
            let replayed = &play.results[index];
            let row = JsonRow {
                event: "replayed",
                scheme,
                line,
                time_ns: request.at_ns,
                vcpu: request.vcpu,
                layer: layer(request.ask.layer),
                request: ask(&request.ask.ask),
                recorded: result(&recorded[index].result),
                replayed: result(&replayed.result),
                answered_ns: replayed.at_ns,
                agrees: agree(&recorded[index].result, &replayed.result),
            };
            serde_json::to_writer(&mut *out, &row)?;
            writeln!(out)?;
        }
        let sums = JsonSums {
            event: "sum",
            scheme,
            as_recorded: play.is_same,
            sums: Sums::of(trail, recorded, play),
        };
        serde_json::to_writer(&mut *out, &sums)?;
        writeln!(out)?;
    }
    Ok(())
}

fn layer(layer: Layer) -> &'static str {
    format::layer(layer)
}

fn ask(ask: &Ask) -> String {
    use arbiter_lab::script::Action;
    let action = match *ask {
        Ask::Reserve {
            wanted,
            lease_ms,
            event,
        } => Action::Reserve {
            wanted,
            lease_ms,
            event,
        },
        Ask::Release(counter) => Action::Release(Some(counter)),
        Ask::Withdraw => Action::Withdraw,
        Ask::Reply(reply) => Action::Reply {
            yields: reply.yields,
            counter: Some(reply.counter),
        },
        Ask::Key {
            counter,
            gives_back: false,
        } => Action::Claim(counter),
        Ask::Key { counter, .. } => return format!("give back {counter} by key"),
        Ask::Control(counter, control) => Action::Lend(counter, control.lends()),
        Ask::EndPhase => Action::EndPhase,
        Ask::SetAside(counter) => return format!("set aside {counter}"),
        Ask::Backed(_) | Ask::Administered | Ask::Answer => return String::new(),
    };
    format::action(action)
}

fn result(result: &AskResult) -> String {
    match *result {
        AskResult::Done => "done".to_owned(),
        AskResult::Faulted(reason) => format!("#GP: {}", reason.name()),
        AskResult::Answered(answer) => match answer.outcome {
            Outcome::Nothing => "done".to_owned(),
            Outcome::Granted(counters) => format::counters(counters),
            Outcome::Refused(reason) => format!("refused: {}", reason.name()),
            Outcome::Pending => "pending".to_owned(),
        },
    }
}

/// The result, and after how many milliseconds it came if that is at least one.
fn shown(request: &Recorded, replayed: &Replayed) -> String {
    let text = result(&replayed.result);
    match replayed.at_ns.saturating_sub(request.at_ns) / 1_000_000 {
        0 => text,
        ms => format!("{text}, after {ms} ms"),
    }
}
