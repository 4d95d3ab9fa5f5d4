//! What must hold in a state of the walk, and of a step to it.

use super::{GRACE, Move, State};
use crate::message::Outcome;
use crate::time::Ticks;
use crate::time::Tsc;
use crate::{CounterId, CounterSet, Event, Layer, Policy, Reason, Record, Scheme};

impl State {
    fn held(&self, layer: Layer) -> u32 {
        self.unit.bank().held_by(layer).len()
    }

    /// Checks what must hold in every state.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        let (bank, policy) = (self.unit.bank(), self.unit.policy());
        let shares = Policy::LAYERS.map(|layer| (layer, policy.share(layer).unwrap()));
        let all: u32 = shares.iter().map(|(layer, _)| self.held(*layer)).sum();
        ensure(
            all + bank.free().len() == bank.counters().len(),
            "a counter leaked",
        )?;
        let mut owed = 0;
        for (layer, share) in shares {
            let within = self.held(layer) <= u32::from(share.max.programmable);
            ensure(within, "more than the maximum")?;
            owed += u32::from(share.min.programmable).saturating_sub(self.held(layer));
        }
        ensure(bank.free().len() >= owed, "a minimum was given away")?;
        // Until its notice is over, the host backs what it is to take as well.
        let (staying, _) = self
            .unit
            .bank()
            .staying_and_leaving(CounterId::Programmable(0), Tsc(u64::MAX));
        let backed = u32::from(self.unit.backed().programmable);
        ensure(
            staying.len() <= backed,
            "a counter is held that has no physical one",
        )?;
        let mut taken = CounterSet::EMPTY;
        for layer in Policy::LAYERS {
            let Some(pending) = self.pending(layer) else {
                continue;
            };
            let outcome = self.unit.answer(layer).outcome;
            ensure(outcome == Outcome::Pending, "the answer is wrong")?;
            let lost = pending.got & !bank.held_by(layer);
            ensure(lost.is_empty(), "what it had come by is lost")?;
            let mut under_way = self.marked_for(layer);
            ensure(
                (under_way & bank.held_by(layer)).is_empty(),
                "it revokes its own",
            )?;
            if let Some(question) = pending.question {
                let owner = bank.reservation(question.counter).map(|held| held.owner);
                ensure(owner == Some(question.holder), "the wrong one is asked")?;
                under_way.insert(question.counter);
            }
            let waits = !under_way.is_empty() || pending.move_by.is_some();
            ensure(waits, "it waits for nothing")?;
            let all = under_way | pending.got;
            ensure((all & taken).is_empty(), "one counter, two requests")?;
            taken = taken | all;
            let in_time = self.now + Ticks(1)..=self.now + Ticks(GRACE.into());
            let deadline = self.unit.deadline();
            ensure(
                deadline.is_some_and(|at| in_time.contains(&at)),
                "nothing is going to end its waiting",
            )?;
        }
        let marked = Policy::LAYERS.map(|layer| self.marked_for(layer));
        let waits = Policy::LAYERS.map(|layer| self.pending(layer).is_some());
        let idle = marked
            .iter()
            .zip(waits)
            .any(|(marked, waits)| !marked.is_empty() && !waits);
        ensure(!idle, "a revocation for nobody")
    }

    fn marked_for(&self, layer: Layer) -> CounterSet {
        self.unit.bank().announced_for(layer)
    }

    /// Checks what must hold of the last step, from a state and with these records.
    pub(super) fn check_step(
        &self,
        before: &State,
        records: &[Record],
    ) -> Result<(), &'static str> {
        let policy = before.unit.policy();
        let share = |layer| policy.share(layer).unwrap();
        for record in records {
            let its = share(record.layer);
            let scheme = self.unit.scheme();
            match record.event {
                Event::Revoking {
                    reason: Reason::Administrator | Reason::Budget,
                    ..
                } => {}
                Event::Revoking { wanted_by, .. } => {
                    ensure(scheme != Scheme::Independent, "not under this scheme")?;
                    let by = share(wanted_by).priority;
                    ensure(by > its.priority, "announced without priority")?;
                }
                Event::Revoked(Reason::Expired | Reason::Administrator) => {}
                Event::Revoked(Reason::Budget) => {
                    // Nobody loses what the budget leaves.
                    let (staying, _) = self
                        .unit
                        .bank()
                        .staying_and_leaving(CounterId::Programmable(0), self.now);
                    let (before, _) = before
                        .unit
                        .bank()
                        .staying_and_leaving(CounterId::Programmable(0), self.now);
                    let most = u32::from(self.unit.arbitration.books().rules.budget().programmable);
                    ensure(staying.len().max(before.len()) >= most, "revoked in vain")?;
                }
                Event::Revoked(reason) => {
                    let held = before.unit.bank().reservation(record.counter.unwrap());
                    let least = u32::from(its.min.programmable);
                    ensure(
                        self.held(record.layer) >= least,
                        "revoked below the minimum",
                    )?;
                    match (reason, held) {
                        (Reason::Lent, Some(_)) => {}
                        (Reason::Priority, Some(held)) => {
                            let by = held.revocation.and_then(|one| one.wanted_by);
                            let by = by.map(|by| share(by).priority);
                            ensure(by > Some(its.priority), "revoked without priority")?;
                        }
                        _ => return Err("revoked for no reason"),
                    }
                }
                Event::Asked { .. } => {
                    ensure(scheme == Scheme::Interacting, "asked under this scheme")?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks that every request has its answer in the end if no layer does anything:
    /// each counter can be asked for once and revoked once.
    pub(super) fn check_answers_come(&self) -> Result<(), &'static str> {
        let mut state = self.fork();
        for _ in 0..2 * GRACE * self.unit.bank().counters().len() {
            state.perform(Move::Tick);
        }
        let waits = |layer: &Layer| state.pending(*layer).is_some();
        ensure(
            !Policy::LAYERS.iter().any(waits),
            "a request waits for ever",
        )
    }
}

fn ensure(holds: bool, otherwise: &'static str) -> Result<(), &'static str> {
    if holds { Ok(()) } else { Err(otherwise) }
}
