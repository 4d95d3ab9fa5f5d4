//! Answers that say that somebody has a counter which another's event may be on still: they are
//! sent when that is stopped, and what is said to the same connection later stands behind them.
//! Pure.

use std::collections::{BTreeSet, VecDeque};

use arbiter_host::LeaseId;

use crate::service::{Answer, ConnectionId};

#[derive(Debug, Default)]
pub(super) struct HeldBack {
    /// Each with the lease of which it says so, if it does.
    answers: VecDeque<(Answer, Option<LeaseId>)>,
}

impl HeldBack {
    pub(super) fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    /// Whether something is held back that a connection is to be told. What it calls meanwhile would
    /// pile up behind that.
    pub(super) fn has(&self, id: ConnectionId) -> bool {
        self.answers.iter().any(|(answer, _)| answer.to == id)
    }

    /// Adds what was said. `changed`: of these leases it says something new.
    pub(super) fn add(&mut self, answers: Vec<Answer>, changed: &[LeaseId]) {
        let changed: BTreeSet<LeaseId> = changed.iter().copied().collect();
        let told = |answer: &Answer| answer.says_holds().filter(|id| changed.contains(id));
        let added = answers.into_iter().map(|answer| {
            let lease = told(&answer);
            (answer, lease)
        });
        self.answers.extend(added);
    }

    /// Takes out, in their order, those that may be sent. `waits`: whether a lease has a counter
    /// that is not free yet.
    pub(super) fn take(&mut self, waits: impl Fn(LeaseId) -> bool) -> Vec<Answer> {
        let mut behind: BTreeSet<ConnectionId> = BTreeSet::new();
        let mut free = Vec::new();
        for (answer, lease) in std::mem::take(&mut self.answers) {
            if behind.contains(&answer.to) || lease.is_some_and(&waits) {
                behind.insert(answer.to);
                self.answers.push_back((answer, lease));
            } else {
                free.push(answer);
            }
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use varlink::Reply;

    use super::*;

    /// Answers to connections, some of which say what a lease holds; changed leases; leases that
    /// wait; and to whom is sent what then, by its place.
    #[test]
    fn what_is_not_free_yet_is_not_told() {
        let mut held = HeldBack::default();
        let answers = |all: &[(u64, Option<u64>)]| -> Vec<Answer> {
            let answer = |(to, lease): &(u64, Option<u64>)| {
                Answer::of(ConnectionId(*to), Reply::default(), lease.map(LeaseId))
            };
            all.iter().map(answer).collect()
        };
        let take = |held: &mut HeldBack, waiting: &[u64]| -> Vec<u64> {
            let sent = held.take(|lease| waiting.contains(&lease.0));
            sent.iter().map(|answer| answer.to.0).collect()
        };
        // Lease 5 was renewed; 6 and 7 are new.
        let said = answers(&[(1, Some(5)), (2, Some(6)), (3, Some(7)), (4, None)]);
        held.add(said, &[LeaseId(6), LeaseId(7)]);
        assert_eq!(take(&mut held, &[5, 6]), [1, 3, 4]);
        assert_eq!([1, 2].map(|id| held.has(ConnectionId(id))), [false, true]);
        // What comes later to the same stands behind, and nothing else does.
        held.add(answers(&[(2, None), (1, None)]), &[]);
        assert_eq!(take(&mut held, &[6]), [1]);
        assert!(!held.is_empty());
        assert_eq!(take(&mut held, &[]), [2, 2]);
        assert!(held.is_empty() && !held.has(ConnectionId(2)));
    }
}
