//! What a sequence has brought about, so that tests can tell what they test.

use std::collections::BTreeSet;

use perfmon_abi::wire::Call;

use super::super::model::format::Format;
use super::super::model::{Model, State};
use super::Step;

/// Names of what came about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) names: BTreeSet<&'static str>,
    before: Before,
}

/// What there was before the last step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Before {
    active: u16,
    runs: u64,
    masked: bool,
    filled: u64,
}

impl Seen {
    /// After a step.
    pub(super) fn look(&mut self, step: &Step, model: &Model) {
        let (format, filled) = model.filled();
        let now = Before {
            active: model.active,
            runs: model.runs(),
            masked: model.state == State::Masked,
            filled,
        };
        let switched = now.active != self.before.active && now.runs > self.before.runs;
        let account = &model.account;
        let restarted = matches!(step, Step::Call(Call::Restart));
        let by_overflow = matches!(step, Step::Overflow(_));
        let full = match format {
            "default" => "a full buffer",
            "double" => "a full half",
            _ => "a full block",
        };
        let seen = [
            (true, format),
            (now.masked && by_overflow, "a mask"),
            (self.before.masked && !now.masked && restarted, "a restart"),
            (now.masked && restarted, "a restart that masks"),
            (model.blocked, "a vCPU that is blocked"),
            (switched && by_overflow, "a switch by overflow"),
            (switched && restarted, "a switch that waited"),
            (switched && matches!(step, Step::Expire), "a switch by time"),
            (now.runs > self.before.runs + 3, "switches in a row"),
            (filled > self.before.filled, full),
            (model.has_both_halves(), "both halves full"),
            (model.has_lost(), "samples lost"),
            (account.spurious > 0, "a spurious overflow"),
            (account.dropped > 0, "a message dropped"),
            (account.throttled > 0, "a limit exceeded"),
            (account.preempted > 0, "a preemption"),
            (account.blind.0 > 0, "a blind spot to be told"),
            (model.generation > 1, "a second load"),
        ];
        let names = seen.into_iter().filter(|&(is, _)| is).map(|(_, name)| name);
        self.names.extend(names);
        self.before = now;
    }
}

impl Model {
    /// What format it has, and how often its buffer, a half or a block was full.
    fn filled(&self) -> (&'static str, u64) {
        match &self.format {
            None => ("no format", 0),
            Some(Format::Puppet(..)) => ("a puppet", 0),
            Some(Format::Default(bytes)) => ("default", bytes[16].into()),
            Some(Format::Double(double)) => ("double", double.overflows),
            Some(Format::Compact(compact)) => ("compact", compact.blocks - 1),
        }
    }

    fn has_both_halves(&self) -> bool {
        matches!(&self.format, Some(Format::Double(double)) if double.active.is_none())
    }

    fn has_lost(&self) -> bool {
        matches!(&self.format, Some(Format::Double(double)) if double.lost > 0)
    }
}
