//! Answers that say that somebody has a counter which another's event may be on still: they are
//! sent when that is stopped, and what is said to the same connection later stands behind them.
//! Pure.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use arbiter_host::LeaseId;

use crate::service::{Answer, ConnectionId};

/// Who has an answer to come is heard no more meanwhile, but so many times if it renews a lease:
/// that may not wait.
const MOST: usize = 16;

#[derive(Debug, Default)]
pub(super) struct HeldBack {
    answers: VecDeque<Answer>,
    /// So many of its demands a lease holds, for all that its holder may know.
    told: BTreeMap<LeaseId, usize>,
    /// Those that hold more by now: by which steps, the least first.
    grows: BTreeMap<LeaseId, Vec<Growth>>,
}

/// A lease holds so many, which its holder is to be told.
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
    /// After a restart: what these leases held was told by the arbiter before.
    pub(super) fn restored(leases: impl Iterator<Item = (LeaseId, usize)>) -> Self {
        HeldBack {
            told: leases.collect(),
            ..HeldBack::default()
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    /// Whether so much is held back that a connection is to be told that it is not heard.
    pub(super) fn is_full(&self, id: ConnectionId, renews: bool) -> bool {
        let of_it = self.answers.iter().filter(|answer| answer.to == id);
        of_it.count() >= if renews { MOST } else { 1 }
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
            let steps = self.grows.entry(lease).or_default();
            // What it has lost of that is no step any more.
            let kept = steps.iter().take_while(|step| step.to < holds).count();
            let rest = steps.get(kept).map_or(order, |step| step.order);
            steps.truncate(kept);
            steps.push(Growth {
                lease,
                to: holds,
                order: rest,
            });
        }
    }

    /// Takes out, in their order, those that may be sent. `waits`: whether something that a lease
    /// has got is not free yet.
    pub(super) fn take(&mut self, waits: impl Fn(Growth) -> bool) -> Vec<Answer> {
        let told = &mut self.told;
        self.grows.retain(|lease, steps| {
            let free = steps.iter().take_while(|step| !waits(**step)).count();
            if let Some(last) = steps.drain(..free).next_back() {
                told.insert(*lease, last.to);
            }
            !steps.is_empty()
        });
        let mut behind: BTreeSet<ConnectionId> = BTreeSet::new();
        let mut free = Vec::new();
        for answer in std::mem::take(&mut self.answers) {
            let tells = answer.tells_of();
            let waits = tells.is_some_and(|(lease, holds)| self.waits(lease, holds));
            if waits || behind.contains(&answer.to) {
                behind.insert(answer.to);
                self.answers.push_back(answer);
            } else {
                free.push(answer);
            }
        }
        free
    }

    /// Whether nobody is to be told yet that a lease holds so many.
    fn waits(&self, lease: LeaseId, holds: usize) -> bool {
        let told = self.told.get(&lease);
        self.grows.contains_key(&lease) && told.is_some_and(|told| holds > *told)
    }
}

#[cfg(test)]
mod tests {
    use varlink::Reply;

    use super::*;

    /// To these connections something is said: what a lease holds, or something else.
    fn answers(all: &[(u64, Option<(u64, usize)>)]) -> Vec<Answer> {
        let answer = |(to, tells): &(u64, Option<(u64, usize)>)| {
            let tells = tells.map(|(lease, holds)| (LeaseId(lease), holds));
            Answer::of(ConnectionId(*to), Reply::default(), tells)
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
        let all = [
            (1, Some((5, 2))),
            (2, Some((6, 2))),
            (3, Some((7, 1))),
            (4, None),
        ];
        held.add(answers(&all), holds(&[(6, 2), (7, 1)]), 3);
        assert_eq!(take(&mut held, &[5, 6]), [1, 3, 4]);
        // What comes later to the same stands behind, and nothing else does.
        held.add(answers(&[(2, None), (1, None)]), holds(&[(7, 0)]), 4);
        assert_eq!(take(&mut held, &[6]), [1]);
        // Who claims it from elsewhere meanwhile knows no more.
        let all = [(8, Some((6, 2))), (9, Some((5, 2)))];
        held.add(answers(&all), holds(&[]), 5);
        assert_eq!(take(&mut held, &[6]), [9]);
        assert!(!held.is_empty());
        assert_eq!(take(&mut held, &[]), [2, 2, 8]);
        assert!(held.is_empty());
        // Each waits for what was to be stopped when it was said.
        held.add(answers(&[(2, Some((6, 3)))]), holds(&[(6, 3)]), 5);
        held.add(answers(&[(3, Some((7, 2)))]), holds(&[(7, 2)]), 6);
        let sent = held.take(|growth| growth.order >= 6);
        assert_eq!(sent.iter().map(|one| one.to.0).collect::<Vec<_>>(), [2]);
    }

    /// A lease's holder knows of two, and waits to be told of two more.
    fn grown() -> HeldBack {
        let mut held = HeldBack::default();
        held.add(answers(&[(3, Some((7, 2)))]), holds(&[(7, 2)]), 1);
        assert_eq!(take(&mut held, &[]), [3]);
        held.add(answers(&[(3, Some((7, 4)))]), holds(&[(7, 4)]), 2);
        assert!(take(&mut held, &[7]).is_empty());
        held
    }

    #[test]
    fn a_loss_of_what_is_in_use_does_not_wait() {
        let news = |holds, keeps| {
            let mut held = grown();
            let holding = BTreeMap::from([(LeaseId(7), Some(Holding { holds, keeps }))]);
            held.add(answers(&[(3, Some((7, holds)))]), holding, 3);
            take(&mut held, &[7])
        };
        // Of what it was not told yet something is lost again, or is going to be.
        assert!(news(3, 3).is_empty() && news(4, 3).is_empty() && news(4, 2).is_empty());
        // It knows of all that is left, of more, or of more than will be left.
        for (holds, keeps) in [(2, 2), (1, 1), (4, 1), (3, 0)] {
            assert_eq!(news(holds, keeps), [3, 3], "{holds} {keeps}");
        }
        let mut held = grown();
        let ended = BTreeMap::from([(LeaseId(7), None)]);
        held.add(answers(&[(3, None)]), ended, 3);
        assert_eq!(take(&mut held, &[7]), [3, 3]);
        assert!(held.told.is_empty() && held.grows.is_empty());
    }

    /// What has become free is told, whatever else came since; and what was lost and has come
    /// again waits for what was to be stopped since.
    #[test]
    fn each_step_waits_for_what_came_before_it() {
        let steps = |held: &HeldBack| -> Vec<(usize, u64)> {
            let steps = held.grows.values().flatten();
            steps.map(|step| (step.to, step.order)).collect()
        };
        let mut held = HeldBack::default();
        for (holding, order) in [(1, 5), (2, 9), (4, 12)] {
            held.add(
                answers(&[(3, Some((7, holding)))]),
                holds(&[(7, holding)]),
                order,
            );
        }
        assert_eq!(steps(&held), [(1, 5), (2, 9), (4, 12)]);
        // A part of a step is that step.
        held.add(vec![], holds(&[(7, 3)]), 13);
        assert_eq!(steps(&held), [(1, 5), (2, 9), (3, 12)]);
        held.add(vec![], holds(&[(7, 1)]), 14);
        assert_eq!(steps(&held), [(1, 5)]);
        held.add(vec![], holds(&[(7, 2)]), 15);
        held.add(vec![], holds(&[(7, 2)]), 16);
        assert_eq!(steps(&held), [(1, 5), (2, 15)]);
        assert_eq!(held.take(|growth| growth.order > 5).len(), 1);
        assert_eq!((steps(&held), held.answers.len()), (vec![(2, 15)], 2));
        assert_eq!((held.take(|_| false).len(), steps(&held)), (2, vec![]));
    }

    #[test]
    fn after_a_restart_what_was_granted_since_is_not_known() {
        let leases = [(LeaseId(7), 4), (LeaseId(8), 0)];
        let mut held = HeldBack::restored(leases.into_iter());
        let all = [(1, Some((7, 4))), (2, Some((8, 1)))];
        held.add(answers(&all), holds(&[(8, 1)]), 6);
        assert_eq!(take(&mut held, &[7, 8]), [1]);
        held.add(answers(&[(1, Some((7, 3)))]), holds(&[(7, 3)]), 6);
        assert_eq!(take(&mut held, &[7, 8]), [1]);
    }

    #[test]
    fn who_waits_for_an_answer_is_heard_if_it_renews() {
        let mut held = grown();
        let (holder, other) = (ConnectionId(3), ConnectionId(4));
        assert_eq!(
            [false, true].map(|renews| held.is_full(holder, renews)),
            [true, false]
        );
        assert!(!held.is_full(other, false));
        for _ in 1..MOST {
            assert!(!held.is_full(holder, true));
            held.add(answers(&[(3, None)]), holds(&[]), 3);
        }
        assert!(held.is_full(holder, true));
    }
}
