//! Answers that say that somebody has a counter which another's event may be on still: they are
//! sent when that is stopped, and what is said to the same connection later stands behind them.
//! Pure.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use arbiter_host::LeaseId;

use crate::service::{Answer, ConnectionId};

#[derive(Debug, Default)]
pub(super) struct HeldBack {
    answers: VecDeque<(Answer, Option<Promise>)>,
}

/// That a lease holds so many of its demands, which is new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Promise {
    pub(super) lease: LeaseId,
    holds: usize,
    /// The number of the last order to stop something that was given before.
    pub(super) order: u64,
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

    /// Adds what was said. `changed`: these leases hold so much by now, which is news. `order`: the
    /// last that was given to stop something.
    pub(super) fn add(
        &mut self,
        answers: Vec<Answer>,
        changed: &BTreeMap<LeaseId, usize>,
        order: u64,
    ) {
        for (_, promise) in &mut self.answers {
            // It holds less by now: who uses what it has lost has to hear so.
            let holds = |promise: &mut Promise| changed.get(&promise.lease).copied();
            promise.take_if(|promise| holds(promise).is_some_and(|holds| holds < promise.holds));
        }
        let added = answers.into_iter().map(|answer| {
            let lease = answer.says_holds();
            let told = lease.and_then(|lease| changed.get_key_value(&lease));
            let promise = told.map(|(&lease, &holds)| Promise {
                lease,
                holds,
                order,
            });
            (answer, promise)
        });
        self.answers.extend(added);
    }

    /// Takes out, in their order, those that may be sent. `waits`: whether something that was
    /// promised is not free yet.
    pub(super) fn take(&mut self, waits: impl Fn(Promise) -> bool) -> Vec<Answer> {
        let mut behind: BTreeSet<ConnectionId> = BTreeSet::new();
        let mut free = Vec::new();
        for (answer, promise) in std::mem::take(&mut self.answers) {
            if behind.contains(&answer.to) || promise.is_some_and(&waits) {
                behind.insert(answer.to);
                self.answers.push_back((answer, promise));
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
            let sent = held.take(|promise| waiting.contains(&promise.lease.0));
            sent.iter().map(|answer| answer.to.0).collect()
        };
        // Lease 5 was renewed; 6 and 7 are new.
        let said = answers(&[(1, Some(5)), (2, Some(6)), (3, Some(7)), (4, None)]);
        let holds = |all: &[(u64, usize)]| -> BTreeMap<LeaseId, usize> {
            let all = all.iter();
            all.map(|(id, holds)| (LeaseId(*id), *holds)).collect()
        };
        held.add(said, &holds(&[(6, 2), (7, 1)]), 3);
        assert_eq!(take(&mut held, &[5, 6]), [1, 3, 4]);
        assert_eq!([1, 2].map(|id| held.has(ConnectionId(id))), [false, true]);
        // What comes later to the same stands behind, and nothing else does.
        held.add(answers(&[(2, None), (1, None)]), &holds(&[(7, 0)]), 4);
        assert_eq!(take(&mut held, &[6]), [1]);
        assert!(!held.is_empty());
        assert_eq!(take(&mut held, &[]), [2, 2]);
        assert!(held.is_empty() && !held.has(ConnectionId(2)));

        // Each waits for what was to be stopped when it was said.
        held.add(answers(&[(2, Some(6))]), &holds(&[(6, 2)]), 5);
        held.add(answers(&[(3, Some(7))]), &holds(&[(7, 2)]), 6);
        let sent = held.take(|promise| promise.order >= 6);
        assert_eq!(sent.iter().map(|one| one.to.0).collect::<Vec<_>>(), [2]);
        // Of what has grown since the whole is told when all of it is free.
        held.add(answers(&[(3, Some(7))]), &holds(&[(7, 4)]), 7);
        assert!(take(&mut held, &[7]).is_empty());
        // Some of that is lost again, of which nothing was told.
        held.add(answers(&[(3, None)]), &holds(&[(7, 3)]), 8);
        assert!(take(&mut held, &[7]).is_empty());
        // Who may use what it has lost hears of the loss.
        held.add(vec![], &holds(&[(7, 1)]), 9);
        assert_eq!(take(&mut held, &[7]), [3, 3, 3]);
    }
}
