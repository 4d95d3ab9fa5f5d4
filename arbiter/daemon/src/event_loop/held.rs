//! Answers that say that somebody has a counter which another's event may be on still: they are
//! sent when that is stopped, and what is said to the same connection later stands behind them.
//! Pure.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use arbiter_host::LeaseId;

use crate::service::{Answer, ConnectionId};

/// Who has an answer to come is heard no more meanwhile, but so many times if it renews a lease:
/// that may not wait.
const MOST: usize = 16;

/// Answers, each with what it says that a lease holds.
#[derive(Debug, Default)]
pub(super) struct HeldBack {
    answers: VecDeque<(Answer, Option<(LeaseId, usize)>)>,
    leases: BTreeMap<LeaseId, Known>,
    /// Those that hold more than was told: few of them all.
    growing: BTreeSet<LeaseId>,
}

/// What a lease's holder knows of it.
#[derive(Debug, Default)]
struct Known {
    /// So many of its demands it holds, as far as it may be told.
    told: usize,
    /// So many its holder may use: before a restart it was told more, for all that is known.
    uses: usize,
    /// So many are left when it has lost what was announced.
    keeps: usize,
    /// By which steps it has come to hold more, the least first.
    grows: Vec<Growth>,
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
    /// After a restart: so many these leases held, which was told, or was to be when what was lost
    /// for it is stopped. That is stopped anew by orders up to this one.
    pub(super) fn restored(leases: BTreeMap<LeaseId, usize>, order: u64) -> Self {
        let known = |(lease, to): (LeaseId, usize)| {
            let known = Known {
                told: 0,
                uses: to,
                keeps: to,
                grows: vec![Growth { lease, to, order }],
            };
            (lease, known)
        };
        HeldBack {
            growing: leases.keys().copied().collect(),
            leases: leases.into_iter().map(known).collect(),
            ..HeldBack::default()
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    /// Whether a connection is to be told so much that is held back that it is not heard for now.
    pub(super) fn is_full(&self, id: ConnectionId, renews: bool) -> bool {
        let of_it = self.answers.iter().filter(|(answer, _)| answer.to == id);
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
        let answers = answers.into_iter();
        self.answers.extend(answers.map(|answer| {
            let says = answer.tells_of();
            (answer, says)
        }));
        // What is not so any more is no reason to wait.
        for (lease, says) in self
            .answers
            .iter_mut()
            .filter_map(|(_, says)| says.as_mut())
        {
            if let Some(now) = changed.get(lease) {
                *says = now.map_or(0, |now| now.holds.min(*says));
            }
        }
        for (lease, now) in changed {
            match now {
                Some(now) => {
                    let known = self.leases.entry(lease).or_default();
                    known.hear(lease, now, order);
                    self.growing.insert(lease);
                }
                None => _ = self.leases.remove(&lease),
            }
        }
    }

    /// Takes out, in their order, those that may be sent. `waits`: whether something that a lease
    /// has got is not free yet.
    pub(super) fn take(&mut self, waits: impl Fn(Growth) -> bool) -> Vec<Answer> {
        self.growing.retain(|lease| {
            let known = self.leases.get_mut(lease);
            known.is_some_and(|known| known.tell(&waits))
        });
        let mut behind: BTreeSet<ConnectionId> = BTreeSet::new();
        let mut free = Vec::new();
        for (answer, says) in std::mem::take(&mut self.answers) {
            let known = says.and_then(|(lease, holds)| Some((self.leases.get(&lease)?, holds)));
            let waits = known.is_some_and(|(known, holds)| known.waits_to_say(holds));
            if waits || behind.contains(&answer.to) {
                behind.insert(answer.to);
                self.answers.push_back((answer, says));
            } else {
                free.push(answer);
            }
        }
        free
    }
}

impl Known {
    /// What the lease holds by now.
    fn hear(&mut self, lease: LeaseId, now: Holding, order: u64) {
        self.keeps = now.keeps;
        if now.holds <= self.told {
            (self.told, self.uses) = (now.holds, now.holds);
            self.grows.clear();
            return;
        }
        // What it has lost of that is no step any more.
        let kept = self.grows.iter().take_while(|step| step.to < now.holds);
        let kept = kept.count();
        let order = self.grows.get(kept).map_or(order, |step| step.order);
        self.grows.truncate(kept);
        self.grows.push(Growth {
            lease,
            to: now.holds,
            order,
        });
        self.tell_of_loss();
    }

    /// Takes the steps that are free. Whether there are others.
    fn tell(&mut self, waits: impl Fn(Growth) -> bool) -> bool {
        let free = self.grows.iter().take_while(|step| !waits(**step));
        let free = free.count();
        if let Some(last) = self.grows.drain(..free).next_back() {
            self.told = last.to;
            self.uses = self.uses.max(last.to);
        }
        self.tell_of_loss();
        !self.grows.is_empty()
    }

    /// Whoever uses what it loses has to hear so, whatever else it hears by that.
    fn tell_of_loss(&mut self) {
        if self.keeps < self.uses
            && let Some(last) = self.grows.pop()
        {
            (self.told, self.uses) = (last.to, last.to);
            self.grows.clear();
        }
    }

    fn waits_to_say(&self, holds: usize) -> bool {
        !self.grows.is_empty() && holds > self.told
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
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
        assert!(held.leases.is_empty() && held.growing.is_empty());
    }

    /// What has become free is told, whatever else came since; and what was lost and has come
    /// again waits for what was to be stopped since.
    #[test]
    fn each_step_waits_for_what_came_before_it() {
        let steps = |held: &HeldBack| -> Vec<(usize, u64)> {
            let steps = held.leases.values().flat_map(|known| &known.grows);
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
        held.add(answers(&[(3, Some((7, 2)))]), holds(&[]), 17);
        // What was said of more is not so any more, and keeps nobody waiting.
        assert_eq!(held.take(|growth| growth.order > 5).len(), 3);
        assert_eq!((steps(&held), held.answers.len()), (vec![(2, 15)], 1));
        assert_eq!((held.take(|_| false).len(), steps(&held)), (1, vec![]));
    }

    /// Something is announced to be lost of what its holder is told of after that.
    #[test]
    fn an_announced_loss_is_told_with_what_it_is_of() {
        let mut held = HeldBack::default();
        for (holding, order) in [(1, 1), (3, 9), (4, 12)] {
            let said = answers(&[(3, Some((7, holding)))]);
            held.add(said, holds(&[(7, holding)]), order);
        }
        let leaves = Some(Holding { holds: 4, keeps: 2 });
        let said = answers(&[(3, Some((7, 4)))]);
        held.add(said, BTreeMap::from([(LeaseId(7), leaves)]), 13);
        assert_eq!(held.take(|growth| growth.order > 1).len(), 1);
        assert_eq!(held.take(|growth| growth.order > 9).len(), 3);
        assert!(held.is_empty());
    }

    #[test]
    fn after_a_restart_what_was_granted_since_is_not_known() {
        let leases = BTreeMap::from([(LeaseId(7), 4), (LeaseId(8), 0)]);
        let mut held = HeldBack::restored(leases, 5);
        let all = [(1, Some((7, 4))), (2, Some((8, 1)))];
        held.add(answers(&all), holds(&[(7, 4), (8, 1)]), 6);
        // What was to be stopped then may be on still.
        assert!(held.take(|growth| growth.order >= 5).is_empty());
        assert_eq!(held.take(|growth| growth.order > 5).len(), 1);
        assert_eq!(take(&mut held, &[]), [2]);
        // It may use what it had, and hears of a loss.
        let leases = BTreeMap::from([(LeaseId(7), 4)]);
        let mut held = HeldBack::restored(leases, 5);
        held.add(answers(&[(1, Some((7, 3)))]), holds(&[(7, 3)]), 6);
        assert_eq!(take(&mut held, &[7]), [1]);
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

    /// What happens to a lease, or to whoever hears of it.
    #[derive(Clone, Debug)]
    enum Step {
        /// It held so many for a moment, and holds so many now and keeps so many of them: its
        /// connection is told of both.
        Holds(u64, usize, usize, usize),
        Ends(u64),
        /// Another connection asks for its state.
        Claimed(u64),
        /// Something is given an order to be stopped.
        Order,
        /// So many orders more are answered.
        Answered(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let lease = || 0u64..3;
        prop_oneof![
            4 => (lease(), 0usize..6, 0usize..6, 0usize..6).prop_map(
                |(lease, held, holds, keeps)| Step::Holds(lease, held, holds, keeps.min(holds))
            ),
            1 => lease().prop_map(Step::Ends),
            1 => lease().prop_map(Step::Claimed),
            3 => Just(Step::Order),
            2 => (1u64..3).prop_map(Step::Answered),
        ]
    }

    /// The order before which each counter of a lease was given, and how many its holder knows of.
    #[derive(Clone, Default)]
    struct Naive {
        given: Vec<u64>,
        told: usize,
        keeps: usize,
    }

    impl Naive {
        /// Whoever loses what it knows of is told of all.
        fn tell_of_loss(&mut self) {
            if self.keeps < self.told {
                self.told = self.given.len();
            }
        }
    }

    proptest! {
        /// Counter by counter: who may be told of how many, and what is sent to whom.
        #[test]
        fn it_does_as_whoever_looks_at_each_counter(steps in prop::collection::vec(step(), 1..60)) {
            let mut held = HeldBack::default();
            let (mut last, mut answered) = (0, 0);
            let mut leases: BTreeMap<u64, Naive> = BTreeMap::new();
            let mut queue: Vec<(u64, u64, usize)> = Vec::new();
            for step in steps {
                let mut said = Vec::new();
                let mut changed = BTreeMap::new();
                match step {
                    Step::Holds(id, before, holds, keeps) => {
                        let lease = leases.entry(id).or_default();
                        lease.given.resize(holds, last);
                        lease.keeps = keeps;
                        lease.tell_of_loss();
                        changed.insert(LeaseId(id), Some(Holding { holds, keeps }));
                        said.extend([(id, id, holds.min(before)), (id, id, holds)]);
                        for (_, _, says) in queue.iter_mut().filter(|(_, of, _)| *of == id) {
                            *says = holds.min(*says);
                        }
                    }
                    Step::Ends(id) => {
                        leases.remove(&id);
                        changed.insert(LeaseId(id), None);
                        for (_, _, says) in queue.iter_mut().filter(|(_, of, _)| *of == id) {
                            *says = 0;
                        }
                    }
                    Step::Claimed(id) => {
                        let holds = leases.get(&id).map_or(0, |lease| lease.given.len());
                        said.push((10 + id, id, holds));
                    }
                    Step::Order => last += 1,
                    Step::Answered(more) => answered = last.min(answered + more),
                }
                let all = said.iter().map(|(to, of, holds)| (*to, Some((*of, *holds))));
                let mut all: Vec<_> = all.collect();
                if let Step::Holds(_, before, ..) = step {
                    all[0].1 = all[0].1.map(|(of, _)| (of, before));
                }
                held.add(answers(&all), changed, last);
                queue.extend(said);
                for lease in leases.values_mut() {
                    let free = lease.given.iter().take_while(|order| **order <= answered);
                    lease.told = lease.told.max(free.count());
                    lease.tell_of_loss();
                }
                let mut behind = BTreeSet::new();
                let sent = queue.extract_if(.., |(to, of, says)| {
                    let told = leases.get(of).map_or(0, |lease| lease.told);
                    let goes = *says <= told && !behind.contains(to);
                    if !goes {
                        behind.insert(*to);
                    }
                    goes
                });
                let sent: Vec<u64> = sent.map(|(to, ..)| to).collect();
                let took = held.take(|growth| growth.order > answered);
                let took: Vec<u64> = took.iter().map(|answer| answer.to.0).collect();
                prop_assert_eq!(took, sent);
                prop_assert_eq!(held.is_empty(), queue.is_empty());
            }
        }
    }
}
