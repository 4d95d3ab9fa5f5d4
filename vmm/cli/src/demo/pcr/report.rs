//! The scenario as it was played, for people and for machines.

use std::io::{self, Write};

use arbiter::{CounterId, CounterSet, Event, PcrRegister, Reason, Record, abi};
use serde::Serialize;
use umpire_tools::table::lines;

use super::scenario::{Act, Action, Step};
use super::transcript::{Outcome, Played};

/// Everything that the demo shows. Its JSON form keeps these names.
#[derive(Clone, Debug, Serialize)]
pub(in crate::demo) struct PcrReport {
    /// Always true: a guest ran.
    pub shown: bool,
    /// PMU model of the guest.
    pub model: &'static str,
    /// Where counts came from, as in `--counters`.
    pub backend: String,
    /// The acts, in order.
    pub acts: Vec<ActReport>,
    /// Who holds what at the end.
    pub ownership: Vec<OwnerRow>,
    /// Wrong cookies that were presented.
    pub wrong_cookies: u64,
}

/// Steps under one heading.
#[derive(Clone, Debug, Serialize)]
pub(in crate::demo) struct ActReport {
    /// The heading.
    pub title: &'static str,
    /// What was done.
    pub steps: Vec<StepReport>,
}

/// One step.
#[derive(Clone, Debug, Serialize)]
pub(in crate::demo) struct StepReport {
    /// Who did it.
    pub who: &'static str,
    pub does: String,
    /// What the guest got.
    pub outcome: String,
    /// What the arbiter decided meanwhile.
    pub decisions: Vec<String>,
    /// Microseconds that it took.
    pub micros: u64,
}

/// One counter at the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(in crate::demo) struct OwnerRow {
    /// Its name.
    pub counter: String,
    /// The layer that holds it; none if nobody does.
    pub owner: Option<String>,
    /// Who may use it.
    pub access: &'static str,
    /// What happens to others.
    pub others: &'static str,
    /// What it counts; none if its control was never written.
    pub event: Option<String>,
    /// The count, or the words that stand for none.
    pub count: String,
}

/// The acts with the outcome of each step. Steps that were not reached are left
/// out.
pub(super) fn acts(acts: &[Act], played: &[Played]) -> Vec<ActReport> {
    let mut number = 0;
    acts.iter()
        .map(|act| {
            let steps = act.steps.iter().filter_map(|step| {
                let played = played.iter().find(|played| played.step == number);
                number += 1;
                played.map(|played| describe(step, played))
            });
            ActReport {
                title: act.title,
                steps: steps.collect(),
            }
        })
        .collect()
}

fn describe(step: &Step, played: &Played) -> StepReport {
    let outcome = match played.outcome {
        None => "(the guest ended here)".to_owned(),
        Some(Outcome::Done) if played.notices > 0 => format!("{} notice(s)", played.notices),
        Some(Outcome::Done) => "done".to_owned(),
        Some(Outcome::Fault) => "#GP".to_owned(),
        Some(Outcome::Read(value)) => in_words(&step.action, value),
    };
    StepReport {
        who: step.who,
        does: step.says.clone(),
        outcome,
        decisions: played
            .decisions
            .iter()
            .map(|(record, times)| decision(record, *times))
            .collect(),
        micros: played.micros,
    }
}

/// A decision as one sees it in the audit trail, in a few words.
fn decision(record: &Record, times: u32) -> String {
    let mut text = match record.counter {
        Some(counter) => format!("{counter} "),
        None => String::new(),
    };
    text += &event(record);
    if times > 1 {
        text += &format!(" ({times} times)");
    }
    text
}

fn event(record: &Record) -> String {
    let layer = record.layer;
    let why = |what: &str, reason: Reason| format!("{what}: {reason}");
    match record.event {
        Event::Reserved { lease_ms: None } => format!("is the {layer}'s"),
        Event::Reserved { lease_ms: Some(ms) } => format!("is the {layer}'s for {ms} ms"),
        Event::Renewed => "renewed".to_owned(),
        Event::HandedOver { from } => format!("goes from the {from} to the {layer}"),
        Event::Released => "given back".to_owned(),
        Event::Yielded { to } => format!("the {layer} yields it to the {to}"),
        Event::Gathered => format!("waits with the {layer}'s request"),
        Event::Returned => "free again".to_owned(),
        Event::AccessSet { private: true } => "private".to_owned(),
        Event::AccessSet { private: false } => "open to legacy accesses".to_owned(),
        Event::ControlSet(control) => format!("control {:#x}", control.bits()),
        Event::DropValueSet(value) => format!("drop value {value:#x}"),
        Event::Refused(reason) => why("refused", reason),
        Event::DroppedRead(reason) => why("read dropped", reason),
        Event::DroppedWrite(reason) => why("write dropped", reason),
        Event::Faulted(reason) => why("fault", reason),
        Event::Asked { wanted_by } => format!("the {layer} is asked to yield to the {wanted_by}"),
        Event::Revoking {
            wanted_by,
            reason,
            in_ms,
        } => format!("the {layer} loses it to the {wanted_by} in {in_ms} ms: {reason}"),
        Event::Revoked(reason) => why(&format!("taken from the {layer}"), reason),
        Event::Declined { wanted_by, reason } => {
            format!("the {layer} does not yield to the {wanted_by}: {reason}")
        }
        Event::Spared => format!("stays the {layer}'s"),
        Event::Taken => {
            format!("does not count for the {layer}: the host's kernel took its counter")
        }
        Event::Back => format!("counts for the {layer} again"),
        Event::LockedOut { ms } => format!("the vCPU is kept off its core for {ms} ms"),
        Event::Deaf { ms } => format!("cookies of programs are not compared for {ms} ms"),
        Event::PhaseEnded => "the firmware's phase is over".to_owned(),
        Event::LayerBarred(of) => format!("the {} may reserve nothing", of),
        Event::LayerUnbarred(of) => format!("the {} may reserve again", of),
        Event::PolicySet { of, .. } => format!("the {} has another share", of),
        Event::SchemeSet(scheme) => format!("the scheme is {scheme} from now on"),
        Event::BudgetSet(most) => format!("the guest's budget is {most} from now on"),
    }
}

/// A value that was read, as its register means it.
fn in_words(action: &Action, value: u64) -> String {
    let register = match action {
        Action::Read { msr, .. } => PcrRegister::decode(*msr),
        _ => None,
    };
    match register {
        Some(PcrRegister::Status(_)) => status(value),
        Some(PcrRegister::Answer) => answer(value),
        Some(PcrRegister::Granted) => {
            let names = CounterSet::from_bits(value).iter();
            let names: Vec<_> = names.map(|counter| counter.to_string()).collect();
            names.join(", ")
        }
        Some(PcrRegister::Notice) => notice(value),
        Some(PcrRegister::Select(_)) => format!("{value:#x}"),
        _ => value.to_string(),
    }
}

fn layer_name(code: u64) -> &'static str {
    match code {
        abi::LAYER_FIRMWARE => "firmware",
        abi::LAYER_HYPERVISOR => "hypervisor",
        abi::LAYER_KERNEL => "kernel",
        _ => "user",
    }
}

fn reason_name(code: u64) -> String {
    let reason = Reason::ALL.into_iter().find(|one| one.code() == code);
    reason.map_or_else(|| format!("reason {code}"), |reason| reason.to_string())
}

fn status(value: u64) -> String {
    if value & abi::STATUS_RESERVED == 0 {
        return "unreserved".to_owned();
    }
    let owner = layer_name(value >> abi::STATUS_OWNER_SHIFT & abi::STATUS_OWNER_MASK);
    let private = match value & abi::STATUS_PRIVATE {
        0 => "open",
        _ => "private",
    };
    format!("{owner}'s, {private}")
}

fn answer(value: u64) -> String {
    let reason = value >> abi::ANSWER_REASON_SHIFT & 0xff;
    match value & abi::ANSWER_STATE_MASK {
        abi::ANSWER_GRANTED => "granted".to_owned(),
        abi::ANSWER_REFUSED => format!("refused: {}", reason_name(reason)),
        abi::ANSWER_PENDING => "pending".to_owned(),
        _ => "nothing asked".to_owned(),
    }
}

fn notice(value: u64) -> String {
    let position = u8::try_from(value >> abi::NOTICE_POSITION_SHIFT & 0xff).unwrap_or(u8::MAX);
    let counter = match CounterId::at_position(position) {
        Some(counter) => counter.to_string(),
        None => "?".to_owned(),
    };
    match value & abi::NOTICE_KIND_MASK {
        abi::NOTICE_ASKED => format!("asked to yield {counter}"),
        abi::NOTICE_REVOKING => format!("{counter} will be revoked"),
        abi::NOTICE_REVOKED => format!("{counter} was revoked"),
        abi::NOTICE_EXPIRED => format!("the lease of {counter} has ended"),
        abi::NOTICE_GRANTED => "the request was granted".to_owned(),
        abi::NOTICE_REFUSED => "the request was refused".to_owned(),
        _ => "none".to_owned(),
    }
}

/// Writes `report` to `out`.
///
/// # Errors
/// `out` cannot be written to.
pub(in crate::demo) fn write_report(
    report: &PcrReport,
    json: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, report)?;
        writeln!(out)?;
    } else {
        text(report, out)?;
    }
    out.flush()
}

fn text(report: &PcrReport, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "Counter reservation in a guest with the virtual PMU {}, counted by {}.\n\
         Each line is an instruction that this run's guest executed, what it got, and what the\n\
         arbiter decided.",
        report.model, report.backend
    )?;
    let steps = report.acts.iter().flat_map(|act| &act.steps);
    let step = |step: &StepReport| {
        vec![
            step.who.to_owned(),
            step.does.clone(),
            step.outcome.clone(),
            step.decisions.join("; "),
        ]
    };
    // All acts have the same columns.
    let mut steps = lines(steps.map(step).collect(), |_, _| false);
    for (number, act) in (1..).zip(&report.acts) {
        writeln!(out, "\n{number}. {}", act.title)?;
        for line in steps.by_ref().take(act.steps.len()) {
            writeln!(out, "   {line}")?;
        }
    }
    writeln!(out, "\nWho holds what at the end")?;
    let rows = report.ownership.iter().map(|row| {
        [
            row.counter.clone(),
            row.owner.clone().unwrap_or_else(|| "-".to_owned()),
            row.access.to_owned(),
            row.others.to_owned(),
            row.event.clone().unwrap_or_else(|| "-".to_owned()),
            row.count.clone(),
        ]
    });
    let titles = ["counter", "holder", "access", "others", "event", "count"];
    super::super::report::table(titles, rows, &[5], out)?;
    writeln!(out, "Wrong cookies presented: {}", report.wrong_cookies)
}
