//! What is to be done after some calls: written to the journal and the audit, and sent.

use arbiter_host::{LeaseId, Reason};
use serde_json::Value;
use umpire_lease as wire;
use varlink::Reply;

use super::ConnectionId;
use super::said::{Denial, Now, Said};
use crate::audit::Record;
use crate::journal::Entry;

/// A reply for a connection.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) to: ConnectionId,
    pub(crate) reply: Reply,
    /// It says that a lease is held, or lasts: it must not be sent unless that is in the
    /// journal.
    pub(super) rests_on: Option<LeaseId>,
    /// It says to the holder of this lease how much that holds.
    tells_of: Option<(LeaseId, usize)>,
    /// It says that something is in the audit.
    audited: bool,
}

impl Answer {
    /// The lease to whose holder it says how much that holds.
    pub(crate) fn tells_of(&self) -> Option<(LeaseId, usize)> {
        self.tells_of
    }

    #[cfg(test)]
    pub(crate) fn of(to: ConnectionId, reply: Reply, tells_of: Option<(LeaseId, usize)>) -> Self {
        Answer {
            to,
            reply,
            rests_on: None,
            tells_of,
            audited: false,
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Output {
    entries: Vec<Entry>,
    answers: Vec<Answer>,
    /// For the audit.
    records: Vec<Record>,
    /// Leases that hold more or less than before, or are going to hold less, or are not any more.
    changed: Vec<LeaseId>,
    /// So long are the answers, about.
    bytes: usize,
}

impl Output {
    /// Adds what came after it.
    pub(crate) fn add(&mut self, more: Output) {
        self.entries.extend(more.entries);
        self.answers.extend(more.answers);
        self.records.extend(more.records);
        self.changed.extend(more.changed);
        self.bytes += more.bytes;
    }

    /// Whether there is nothing to be done.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.answers.is_empty() && self.records.is_empty()
    }

    /// For the journal.
    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(super) fn write(&mut self, entry: Entry) {
        self.entries.push(entry);
    }

    /// The journal has them by another way.
    pub(crate) fn forget_entries(&mut self) {
        self.entries.clear();
    }

    /// To be sent when the rest is done.
    pub(crate) fn answers(&self) -> &[Answer] {
        &self.answers
    }

    /// Takes what is to be sent.
    pub(crate) fn take_answers(&mut self) -> Vec<Answer> {
        std::mem::take(&mut self.answers)
    }

    /// Only those of the answers are sent that `may`, as it leaves them.
    pub(super) fn retain_answers(&mut self, may: impl FnMut(&mut Answer) -> bool) {
        self.answers.retain_mut(may);
    }

    pub(super) fn record(&mut self, record: Record) {
        self.records.push(record);
    }

    #[cfg(test)]
    pub(super) fn records(&self) -> &[Record] {
        &self.records
    }

    /// Takes what the audit is to have.
    pub(crate) fn take_records(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.records)
    }

    /// Leases that hold more or less than before, or are going to hold less, or are not any more.
    pub(crate) fn changed(&self) -> &[LeaseId] {
        &self.changed
    }

    pub(super) fn note_change(&mut self, lease: LeaseId) {
        self.changed.push(lease);
    }

    /// How long the answers are, about.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn say(&mut self, to: ConnectionId, said: Said, goes_on: bool) {
        self.answer(
            to,
            Now {
                goes_on,
                ..said.into()
            },
        );
    }

    pub(super) fn answer(&mut self, to: ConnectionId, now: Now) {
        self.push(Answer {
            to,
            reply: now.said.reply(now.goes_on),
            rests_on: now.rests_on,
            tells_of: now.said.holds(),
            audited: now.audited,
        });
    }

    pub(super) fn deny(&mut self, to: ConnectionId, denial: &Denial) {
        self.push(Answer {
            to,
            reply: denial.reply(),
            rests_on: None,
            tells_of: None,
            audited: false,
        });
    }

    fn push(&mut self, answer: Answer) {
        self.bytes += answer.reply.parameters.as_ref().map_or(0, length);
        self.answers.push(answer);
    }

    /// Takes out the answers for a connection that came behind the first `before`.
    pub(super) fn silence(&mut self, to: ConnectionId, before: usize) {
        let answers = self.answers.split_off(before);
        let others = answers.into_iter().filter(|answer| answer.to != to);
        self.answers.extend(others);
    }

    /// The audit could not be written: whoever relies on it is told.
    pub(crate) fn unaudited(&mut self) {
        let what = "the arbiter cannot write its audit; see that its disk has room, and try again";
        let denial = Denial::Refused(wire::Refusal::of(Reason::AuditFailed, what));
        for answer in self.answers.iter_mut().filter(|answer| answer.audited) {
            answer.reply = denial.reply();
        }
    }
}

/// How long a value is, about.
fn length(value: &Value) -> usize {
    const SHORT: usize = 16;
    match value {
        Value::String(text) => SHORT + text.len(),
        Value::Array(all) => SHORT + all.iter().map(length).sum::<usize>(),
        Value::Object(all) => {
            let fields = all.iter().map(|(name, value)| name.len() + length(value));
            SHORT + fields.sum::<usize>()
        }
        _ => SHORT,
    }
}
