//! What happened, in words.

use arbiter::{CounterSet, Event, Layer, Outcome, Reason, Wanted};
use arbiter_lab::script::{Action, End, What};

/// The layer as scripts write it.
pub(super) fn layer(layer: Layer) -> &'static str {
    match layer {
        Layer::Firmware => "firmware",
        Layer::Hypervisor | Layer::HostTool => "hypervisor",
        Layer::GuestKernel => "kernel",
        Layer::GuestUser => "user",
    }
}

pub(super) fn counters(set: CounterSet) -> String {
    let names: Vec<String> = set.iter().map(|counter| counter.to_string()).collect();
    names.join(" ")
}

/// An action as scripts write it.
pub(super) fn action(action: Action) -> String {
    match action {
        Action::Reserve {
            wanted,
            lease_ms,
            event,
        } => {
            let wanted = match wanted {
                Wanted::Any(count) => count.to_string(),
                Wanted::Held(count) => format!("held:{count}"),
                Wanted::This(counter) => counter.to_string(),
            };
            let lease = lease_ms.map(|ms| format!(" lease {ms}"));
            let event = event.map(|event| format!(" event {:#x}", event.select()));
            let [lease, event] = [lease, event].map(Option::unwrap_or_default);
            format!("reserve {wanted}{lease}{event}")
        }
        Action::Claim(counter) => format!("claim {counter}"),
        Action::Renew(counter) => format!("renew {counter}"),
        Action::Release(Some(counter)) => format!("release {counter}"),
        Action::Release(None) => "release all".to_owned(),
        Action::Lend(counter, true) => format!("lend {counter}"),
        Action::Lend(counter, false) => format!("keep {counter}"),
        Action::Reply { yields, counter } => {
            let word = if yields { "yield" } else { "refuse" };
            match counter {
                Some(counter) => format!("reply {word} {counter}"),
                None => format!("reply {word}"),
            }
        }
        Action::Withdraw => "withdraw".to_owned(),
        Action::EndPhase => "end-phase".to_owned(),
        Action::Tick => "tick".to_owned(),
    }
}

pub(super) fn what(what: What) -> String {
    match what {
        What::Does(one) => format!("> {}", action(one)),
        What::Decided(event) => decided(event),
        What::Answered(answer) => format!("answer {}: {}", answer.number, outcome(answer.outcome)),
        What::Faulted(reason) => format!("#GP, as {reason}"),
        What::NotAsked => "was not asked, and says nothing".to_owned(),
    }
}

fn decided(event: Event) -> String {
    match event {
        Event::Reserved { lease_ms: None } => "is its own".to_owned(),
        Event::Reserved { lease_ms: Some(ms) } => format!("is its own for {ms} ms"),
        Event::Renewed => "lease renewed".to_owned(),
        Event::HandedOver { from } => format!("taken over from the {}", layer(from)),
        Event::Released => "given back".to_owned(),
        Event::Yielded { to } => format!("yielded to the {}", layer(to)),
        Event::Gathered => "kept for its request".to_owned(),
        Event::Returned => "free again".to_owned(),
        Event::AccessSet { private: true } => "closed to legacy accesses".to_owned(),
        Event::AccessSet { private: false } => "open to legacy accesses".to_owned(),
        Event::ControlSet(control) if control.lends() => "is on loan".to_owned(),
        Event::ControlSet(_) => "is not on loan".to_owned(),
        Event::Refused(reason) => format!("refused: {reason}"),
        Event::Asked { wanted_by } => format!("asked to yield it to the {}", layer(wanted_by)),
        Event::Declined {
            wanted_by,
            reason: Reason::NoAnswer,
        } => format!("did not answer the {} in time", layer(wanted_by)),
        Event::Declined { wanted_by, .. } => {
            format!("refuses to yield it to the {}", layer(wanted_by))
        }
        Event::Revoking {
            wanted_by,
            reason,
            in_ms,
        } => {
            let by = layer(wanted_by);
            format!("told that the {by} gets it in {in_ms} ms: {reason}")
        }
        Event::Spared => "keeps it after all".to_owned(),
        Event::Taken => "has no physical counter for it: the host's kernel took that".to_owned(),
        Event::Back => "has a physical counter for it again".to_owned(),
        Event::Revoked(reason) => format!("revoked: {reason}"),
        Event::LockedOut { ms } => format!("kept off its core for {ms} ms"),
        Event::Deaf { ms } => format!("cookies of programs are not compared for {ms} ms"),
        Event::PhaseEnded => "the firmware's phase is over".to_owned(),
        Event::LayerBarred(of) => format!("the {} may reserve nothing", layer(of)),
        Event::LayerUnbarred(of) => format!("the {} may reserve again", layer(of)),
        Event::PolicySet { of, .. } => format!("the {} has another share", layer(of)),
        Event::SchemeSet(scheme) => format!("the scheme is {scheme} from now on"),
        Event::BudgetSet(most) => format!("the guest's budget is {most} from now on"),
        Event::DropValueSet(_)
        | Event::DroppedRead(_)
        | Event::DroppedWrite(_)
        | Event::Faulted(_) => event.name().to_owned(),
    }
}

fn outcome(outcome: Outcome) -> String {
    match outcome {
        Outcome::Nothing => "none".to_owned(),
        Outcome::Granted(set) => format!("granted {}", counters(set)),
        Outcome::Refused(reason) => format!("refused, as {reason}"),
        Outcome::Pending => "pending".to_owned(),
    }
}

/// How a step at `at_ms` ended, in few words.
pub(super) fn end(end: End, at_ms: u32) -> String {
    match end {
        End::Done => "done".to_owned(),
        End::NotAsked => "not asked".to_owned(),
        End::Faulted(reason) => format!("#GP: {}", reason.name()),
        End::Answered {
            outcome,
            at_ms: when,
        } => {
            let answer = match outcome {
                Outcome::Nothing => "done".to_owned(),
                Outcome::Granted(set) => counters(set),
                Outcome::Refused(reason) => format!("refused: {}", reason.name()),
                Outcome::Pending => "pending".to_owned(),
            };
            if when == at_ms {
                answer
            } else {
                format!("{answer}, at {when}")
            }
        }
    }
}
