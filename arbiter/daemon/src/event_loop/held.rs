//! Answers that say that somebody has a counter which another's event may be on still: they are
//! sent when that is stopped, and what is said to the same connection later stands behind them.
//! Pure.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use arbiter_host::LeaseId;

use crate::service::{Answer, ConnectionId};

/// Who has so many answers to come is not heard meanwhile: they would be more and more.
const MOST: usize = 16;

#[derive(Debug, Default)]
pub(super) struct HeldBack {
    answers: VecDeque<Answer>,
    /// So many of its demands a lease holds, for all that its holder knows.
    told: BTreeMap<LeaseId, usize>,
    /// Those that hold more by now.
    grows: BTreeMap<LeaseId, Growth>,
}

/// A lease holds so much, which its holder is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Growth {
    pub(super) lease: LeaseId,
    to: usize,
    /// The number of the last order to stop something that was given before.
    pub(super) order: u64,
}

/// What a lease holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holding {
    pub(super) holds: usize,
    /// So much of that is left when it has lost what was announced.
    pub(super) keeps: usize,
}

impl HeldBack {
    /// After a restart: what these leases hold was told by the arbiter before, or is going to be
    /// when what was given an order up to this one is stopped.
    pub(super) fn restored(leases: impl Iterator<Item = (LeaseId, usize)>, order: u64) -> Self {
        let mut held = HeldBack::default();
        for (lease, to) in leases {
            held.told.insert(lease, to);
            held.grows.insert(lease, Growth { lease, to, order });
        }
        held
    }

    pub(super) fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    /// Whether so much is held back that a connection is to be told that it is not heard.
    pub(super) fn is_full(&self, id: ConnectionId) -> bool {
        let of_it = self.answers.iter().filter(|answer| answer.to == id);
        of_it.count() >= MOST
    }

    /// Adds what was said. `changed`: what some leases hold by now; `None`: they have ended.
    /// `order`: the last that was given to stop something.
    pub(super) fn add(
        &mut self,
        answers: Vec<Answer>,
        changed: BTreeMap<LeaseId, Option<Holding>>,
        order: u64,
    ) {
        self.answers.extend(answers);
        for (lease, now) in changed {
            let Some(Holding { holds, keeps }) = now else {
                self.told.remove(&lease);
                self.grows.remove(&lease);
                continue;
            };
            let told = self.told.entry(lease).or_default();
            // Whoever uses what it loses has to hear so, whatever else it hears by that.
            if keeps < *told || holds <= *told {
                *told = holds;
                self.grows.remove(&lease);
                continue;
            }
            let to = holds;
            let new = Growth { lease, to, order };
            let grows = self.grows.entry(lease).or_insert(new);
            *grows = if grows.to < to {
                new
            } else {
                Growth { to, ..*grows }
            };
        }
    }

    /// Takes out, in their order, those that may be sent. `waits`: whether something that a lease
    /// has got is not free yet.
    pub(super) fn take(&mut self, waits: impl Fn(Growth) -> bool) -> Vec<Answer> {
        let told = &mut self.told;
        self.grows.retain(|lease, growth| {
            let stays = waits(*growth);
            if !stays {
                told.insert(*lease, growth.to);
            }
            stays
        });
        let mut behind: BTreeSet<ConnectionId> = BTreeSet::new();
        let mut free = Vec::new();
        for answer in std::mem::take(&mut self.answers) {
            let lease = answer.tells_of();
            let grows = lease.is_some_and(|lease| self.grows.contains_key(&lease));
            if grows || behind.contains(&answer.to) {
                behind.insert(answer.to);
                self.answers.push_back(answer);
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

    /// To these connections something is said, of a lease or of none.
    fn answers(all: &[(u64, Option<u64>)]) -> Vec<Answer> {
        let answer = |(to, lease): &(u64, Option<u64>)| {
            Answer::of(ConnectionId(*to), Reply::default(), lease.map(LeaseId))
        };
        all.iter().map(answer).collect()
    }

    fn holds(all: &[(u64, usize)]) -> BTreeMap<LeaseId, Option<Holding>> {
        let holding = |holds| {
            Some(Holding {
                holds,
                keeps: holds,
            })
        };
        let all = all.iter();
        all.map(|(id, holds)| (LeaseId(*id), holding(*holds)))
            .collect()
    }

    /// To whom is sent what may be, while these leases wait.
    fn take(held: &mut HeldBack, waiting: &[u64]) -> Vec<u64> {
        let sent = held.take(|growth| waiting.contains(&growth.lease.0));
        sent.iter().map(|answer| answer.to.0).collect()
    }

    #[test]
    fn what_is_not_free_yet_is_not_told() {
        let mut held = HeldBack::default();
        held.add(vec![], holds(&[(5, 2)]), 1);
        assert!(take(&mut held, &[]).is_empty());
        // Lease 5 was renewed; 6 and 7 are new.
        let said = answers(&[(1, Some(5)), (2, Some(6)), (3, Some(7)), (4, None)]);
        held.add(said, holds(&[(6, 2), (7, 1)]), 3);
        assert_eq!(take(&mut held, &[5, 6]), [1, 3, 4]);
        // What comes later to the same stands behind, and nothing else does.
        held.add(answers(&[(2, None), (1, None)]), holds(&[(7, 0)]), 4);
        assert_eq!(take(&mut held, &[6]), [1]);
        // Who claims it from elsewhere meanwhile knows no more.
        held.add(answers(&[(8, Some(6)), (9, Some(5))]), holds(&[]), 5);
        assert_eq!(take(&mut held, &[6]), [9]);
        assert!(!held.is_empty());
        assert_eq!(take(&mut held, &[]), [2, 2, 8]);
        assert!(held.is_empty());
        // Each waits for what was to be stopped when it was said.
        held.add(answers(&[(2, Some(6))]), holds(&[(6, 3)]), 5);
        held.add(answers(&[(3, Some(7))]), holds(&[(7, 2)]), 6);
        let sent = held.take(|growth| growth.order >= 6);
        assert_eq!(sent.iter().map(|one| one.to.0).collect::<Vec<_>>(), [2]);
    }

    /// A lease's holder knows of two, and waits to be told of two more.
    fn grown() -> HeldBack {
        let mut held = HeldBack::default();
        held.add(answers(&[(3, Some(7))]), holds(&[(7, 2)]), 1);
        assert_eq!(take(&mut held, &[]), [3]);
        held.add(answers(&[(3, Some(7))]), holds(&[(7, 4)]), 2);
        assert!(take(&mut held, &[7]).is_empty());
        held
    }

    #[test]
    fn a_loss_of_what_is_in_use_does_not_wait() {
        let news = |holds, keeps| {
            let mut held = grown();
            let holding = BTreeMap::from([(LeaseId(7), Some(Holding { holds, keeps }))]);
            held.add(answers(&[(3, Some(7))]), holding, 3);
            take(&mut held, &[7])
        };
        // Of what it was not told yet something is lost again, or is going to be.
        assert!(news(3, 3).is_empty() && news(4, 3).is_empty() && news(4, 2).is_empty());
        // It knows of all that is left, of more, or of more than will be left.
        for (holds, keeps) in [(2, 2), (1, 1), (4, 1), (3, 0)] {
            assert_eq!(news(holds, keeps), [3, 3], "{holds} {keeps}");
        }
        let mut held = grown();
        held.add(
            answers(&[(3, None)]),
            BTreeMap::from([(LeaseId(7), None)]),
            3,
        );
        assert_eq!(take(&mut held, &[7]), [3, 3]);
        assert!(held.told.is_empty() && held.grows.is_empty());
    }

    /// What it has got since waits for what was to be stopped since.
    #[test]
    fn what_grows_again_waits_for_what_came_between() {
        let orders = |held: &HeldBack| -> Vec<u64> {
            let grows = held.grows.values();
            grows.map(|growth| growth.order).collect()
        };
        let mut held = grown();
        held.add(vec![], holds(&[(7, 3)]), 8);
        assert_eq!(orders(&held), [2]);
        held.add(vec![], holds(&[(7, 4)]), 9);
        assert_eq!(orders(&held), [9]);
        held.add(vec![], holds(&[(7, 4)]), 10);
        assert_eq!(orders(&held), [9]);
    }

    #[test]
    fn after_a_restart_what_is_stopped_anew_is_waited_for() {
        let leases = [(LeaseId(7), 4), (LeaseId(8), 1)];
        let mut held = HeldBack::restored(leases.into_iter(), 5);
        held.add(answers(&[(1, Some(7)), (2, Some(8))]), holds(&[]), 6);
        assert_eq!(take(&mut held, &[7]), [2]);
        // It may use them for all that is known.
        held.add(answers(&[(1, Some(7))]), holds(&[(7, 3)]), 6);
        assert_eq!(take(&mut held, &[7]), [1, 1]);
    }

    #[test]
    fn who_calls_on_and_on_is_not_heard() {
        let mut held = grown();
        for _ in 0..MOST - 2 {
            held.add(answers(&[(3, None)]), holds(&[]), 3);
        }
        assert!(!held.is_full(ConnectionId(3)));
        held.add(answers(&[(3, None), (4, None)]), holds(&[]), 3);
        assert_eq!(
            [3, 4].map(|id| held.is_full(ConnectionId(id))),
            [true, false]
        );
    }
}
