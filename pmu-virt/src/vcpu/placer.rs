//! Slots for the guest's counters and those of host contexts, all at once; and
//! timeslices for more counters than there are slots.

use std::cell::Cell;
use std::num::NonZeroU64;

use arbiter::{CounterId, CounterSet, PerKind};
use pmu_model::{Constraint, ContextId, OwnerId, PmuModel, SlotSet, Ticks, UnavailableReason};

use super::terms::Terms;
use crate::assign::{Demand, assign};
use crate::core_pmu::CorePmu;
use crate::placement::{self, Claim, CoreSlots, HostClaims, PlaceClaims, Placed, Shortage};
use crate::slot_bank::Claimant;

/// What to do for a vCPU that wants more counters than its core has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Oversubscribe {
    /// The counter that finds no place is unavailable.
    #[default]
    Refuse,
    /// Counters take turns; counts are scaled to the time in which they were
    /// to count, and labelled so.
    Multiplex {
        /// Length of a timeslice in TSC ticks that the guest runs.
        timeslice: NonZeroU64,
    },
}

/// What of a vCPU and of its core wants slots, and on which terms.
#[derive(Clone, Copy)]
pub(super) struct Ground<'a> {
    pub(super) owner: OwnerId,
    pub(super) model: &'a PmuModel,
    pub(super) terms: &'a Terms,
    pub(super) core: &'a CorePmu,
}

/// Who is to be where.
#[derive(Debug)]
pub(super) struct Moves {
    /// Contexts that make room.
    pub(super) preempts: Vec<ContextId>,
    /// Counters of the guest that have no place, whatever room there is.
    pub(super) refused: Vec<(CounterId, UnavailableReason)>,
    /// Who moves: first all of them leave, then all come that have slots.
    pub(super) moves: Vec<(Claimant, Option<SlotSet>)>,
    /// Why one of the guest's has none.
    pub(super) otherwise: UnavailableReason,
}

/// Who is placed first, and whose timeslice it is.
#[derive(Debug, Default)]
pub(super) struct Placer {
    answer: Oversubscribe,
    /// How long the guest will have run when the timeslice is over.
    over: Option<Ticks>,
    /// The same, kept while the guest has stopped counters for a moment.
    due: Option<Ticks>,
    /// The log knows that turns are taken.
    reported: bool,
    /// The demand that is placed first.
    first: usize,
    /// What can count most events of the guest's on the core where it was last; none
    /// before that was needed.
    any: Cell<Option<Constraint>>,
}

impl Placer {
    pub(super) fn new(answer: Oversubscribe) -> Self {
        Placer {
            answer,
            ..Placer::default()
        }
    }

    /// Forgets whose timeslice it was.
    pub(super) fn reset(&mut self) {
        *self = Placer {
            any: Cell::new(self.any.get()),
            ..Placer::new(self.answer)
        };
    }

    /// The vCPU has come to another core.
    pub(super) fn forget_core(&mut self) {
        self.any.set(None);
    }

    /// Whether counters take turns at present.
    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.over.is_some()
    }

    /// Whether counters may take turns at all.
    pub(super) fn is_allowed(&self) -> bool {
        matches!(self.answer, Oversubscribe::Multiplex { .. })
    }

    #[inline]
    pub(super) fn is_over(&self, now: Ticks) -> bool {
        self.over.is_some_and(|over| now >= over)
    }

    /// What is left of this timeslice.
    pub(super) fn rest(&self, now: Ticks) -> Option<Ticks> {
        self.over.map(|over| over - now)
    }

    /// The next counters come first.
    pub(super) fn advance(&mut self) {
        self.first = self.first.wrapping_add(1);
        self.over = None;
        self.due = None;
    }

    /// Counters take turns from now on. A timeslice that was cut short goes on: a
    /// guest that stops its counters again and again, as drivers do in each
    /// interrupt, would else never leave the first one.
    fn begin(&mut self, now: Ticks) {
        let Oversubscribe::Multiplex { timeslice } = self.answer else {
            return;
        };
        if self.due.is_some_and(|due| due <= now) {
            self.advance();
        }
        let due = *self.due.get_or_insert(now + Ticks(timeslice.get()));
        self.over = Some(due);
    }

    /// The counter that is placed first, modulo their number; none where counters
    /// may not take turns.
    fn rotation(&self) -> Option<usize> {
        self.is_allowed().then_some(self.first)
    }

    /// Why counters of the guest have no slot now: they wait for their turn, or
    /// are refused.
    fn answer_shortage(
        &mut self,
        owner: OwnerId,
        now: Ticks,
        reason: UnavailableReason,
    ) -> UnavailableReason {
        if !self.is_allowed() {
            return reason;
        }
        if !self.is_active() {
            self.begin(now);
        }
        if !std::mem::replace(&mut self.reported, true) {
            log::info!("{owner}: counters take turns, because {reason}");
        }
        UnavailableReason::Waiting
    }

    /// Gives slots to all that is to be counted on a core: the guest's counters (`demands`)
    /// and those of host contexts. A context that may be preempted and does not find
    /// all that it wants is, and the others are placed anew. Where not all of the guest's
    /// counters find one, they take turns, or the ones that have none are refused.
    pub(super) fn place(
        &mut self,
        ground: Ground<'_>,
        demands: Vec<Demand>,
        hosts: HostClaims,
        now: Ticks,
    ) -> Moves {
        let slots = CoreSlots {
            all: ground.core.bank().slots(),
            unclaimed: ground.core.bank().unclaimed(),
        };
        let (mut reserved, mut guest) = ground.claims(demands);
        let unpromised = self.keep_promises(ground, &mut reserved);
        let beyond = self.keep_to_budget(ground, now, &reserved, &mut guest);
        let take_turns = |(_, reason)| reason == UnavailableReason::Waiting;
        let budget_turns = beyond.iter().copied().any(take_turns);
        let mut claims = PlaceClaims::new(reserved, guest, hosts);
        let mut preempts = Vec::new();
        let (placement, shortage) = loop {
            match placement::place(&claims, slots) {
                Placed::Preempts(context) => {
                    claims.leave_out(context);
                    preempts.push(context);
                }
                Placed::All(placement) => {
                    if !budget_turns {
                        self.over = None;
                    }
                    break (placement, None);
                }
                Placed::Some(placement, shortage) => break (placement, shortage),
            }
        };
        let (placement, otherwise) = match shortage {
            None => (placement, UnavailableReason::Waiting),
            Some(shortage) => {
                let reason = match shortage {
                    Shortage::Conflict(conflict) => UnavailableReason::Conflict(conflict),
                    Shortage::Hosts => UnavailableReason::Busy {
                        backend: ground.core.backend().name(),
                    },
                };
                // A timeslice that begins here says who comes first.
                let otherwise = self.answer_shortage(ground.owner, now, reason);
                let placement = match self.rotation() {
                    // The budget has put them in their order already.
                    Some(_) if budget_turns => claims.rotated(slots, 0),
                    Some(first) => claims.rotated(slots, first),
                    None => placement,
                };
                (placement, otherwise)
            }
        };
        Moves {
            preempts,
            refused: beyond.into_iter().chain(unpromised).collect(),
            moves: claims.moves(&placement).collect(),
            otherwise,
        }
    }

    /// Whether contexts that were preempted would find room: what is claimed now, but for
    /// them.
    pub(super) fn without_turns(
        &self,
        ground: Ground<'_>,
        demands: Vec<Demand>,
        hosts: HostClaims,
    ) -> PlaceClaims {
        let (mut reserved, mut guest) = ground.claims(demands);
        self.keep_promises(ground, &mut reserved);
        let most = ground.terms.grant.budget.most();
        placement::keep_to(most, &reserved, &mut guest);
        PlaceClaims::new(reserved, guest, hosts)
    }

    /// Whether what a reserved counter selects may take room that others were promised: it
    /// wants another place than it was promised itself.
    pub(super) fn is_judged(
        &self,
        ground: Ground<'_>,
        counter: CounterId,
        constraint: &Constraint,
    ) -> bool {
        let Ground {
            model, terms, core, ..
        } = ground;
        if !terms.held_by_guest.contains(counter) {
            return false;
        }
        let any = self.any.get().or_else(|| {
            self.any.set(terms.any_event(model, core));
            self.any.get()
        });
        let promise = terms.promise(model, core.planner(), counter, any);
        let is_within = |promise: Constraint| {
            let alike = !constraint.paired && constraint.exclusive.is_none();
            promise == *constraint || alike && promise.slots.difference(constraint.slots).is_empty()
        };
        !promise.is_some_and(is_within)
    }

    /// Takes out of the claims of reserved counters those of events for which there is no
    /// room beside what the others were promised, with the reason.
    fn keep_promises(
        &self,
        ground: Ground<'_>,
        reserved: &mut Vec<Claim>,
    ) -> Vec<(CounterId, UnavailableReason)> {
        let Ground { model, core, .. } = ground;
        let judged =
            |(_, demand): &Claim| self.is_judged(ground, demand.counter, &demand.constraint);
        if !reserved.iter().any(judged) {
            return Vec::new();
        }
        let planner = core.planner();
        let firm = core.book().firm_beside(planner, ground.owner);
        let any = ground.terms.any_event(model, core);
        let promised = ground.terms.promised(model, planner, any).into_iter();
        let promised = promised.map(|(counter, constraint)| Demand {
            counter,
            constraint,
            held: None,
        });
        let promised: Vec<Demand> = promised.collect();
        // What else is counted instead of what was promised.
        let mut accepted = promised.clone();
        // What counts already goes on.
        reserved.sort_by_key(|(_, demand)| demand.held.is_none());
        let mut refused = Vec::new();
        reserved.retain(|(_, demand)| {
            let Some(own) = promised
                .iter()
                .position(|one| one.counter == demand.counter)
            else {
                return true;
            };
            if promised[own].constraint == demand.constraint {
                return true;
            }
            let with = |others: &[Demand]| {
                let mut all = others.to_vec();
                all[own].constraint = demand.constraint;
                assign(&all, core.bank().slots())
                    .map_err(UnavailableReason::Conflict)
                    .map(|_| all)
            };
            // Whether the others count what they were promised already or not.
            let fits = with(&promised).and_then(|_| with(&accepted));
            let beside_contexts = |all: &Vec<Demand>| {
                let wanted: Vec<Constraint> = all.iter().map(|one| one.constraint).collect();
                firm.leave_room_for(&wanted)
            };
            let reason = match fits {
                Ok(all) if beside_contexts(&all) => {
                    accepted = all;
                    return true;
                }
                Ok(_) => UnavailableReason::Busy {
                    backend: core.backend().name(),
                },
                Err(conflict) => conflict,
            };
            refused.push((demand.counter, reason));
            false
        });
        refused
    }

    /// Takes out of `guest` what the budget does not leave it beside what is reserved:
    /// it takes turns, or is refused, for this reason.
    fn keep_to_budget(
        &mut self,
        ground: Ground<'_>,
        now: Ticks,
        reserved: &[Claim],
        guest: &mut Vec<Claim>,
    ) -> Vec<(CounterId, UnavailableReason)> {
        let most = ground.terms.grant.budget.most();
        let lacking = placement::beyond(most, reserved, guest);
        if lacking.is_empty() {
            return Vec::new();
        }
        let reason = |counter| UnavailableReason::Budget {
            most: most.of(counter),
        };
        // Where what is reserved takes the whole budget there are no turns to be taken.
        let held: CounterSet = reserved.iter().map(|(_, demand)| demand.counter).collect();
        let has_turns = |counter| PerKind::count(held).of(counter) < most.of(counter);
        // A timeslice that begins here says who comes first.
        let waits = lacking
            .into_iter()
            .find(|counter| has_turns(*counter))
            .is_some_and(|one| {
                let answer = self.answer_shortage(ground.owner, now, reason(one));
                answer == UnavailableReason::Waiting
            });
        if let (true, Some(first)) = (waits, self.rotation()) {
            // Each kind by itself, so that all of one have as many turns.
            let fixed =
                guest.partition_point(|(_, demand)| !matches!(demand.counter, CounterId::Fixed(_)));
            let (programmable, fixed) = guest.split_at_mut(fixed);
            for kind in [programmable, fixed] {
                kind.rotate_left(first % kind.len().max(1));
            }
        }
        let beyond = placement::keep_to(most, reserved, guest).into_iter();
        let reasons = beyond.map(|counter| {
            let waiting = (waits && has_turns(counter)).then_some(UnavailableReason::Waiting);
            (counter, waiting.unwrap_or(reason(counter)))
        });
        reasons.collect()
    }
}

impl Ground<'_> {
    /// What the guest wants: what it has reserved, and the rest.
    fn claims(self, demands: Vec<Demand>) -> (Vec<Claim>, Vec<Claim>) {
        let vcpu = self.owner;
        let guest = demands.into_iter().map(|demand| {
            let counter = demand.counter;
            (Claimant::Guest { vcpu, counter }, demand)
        });
        let held = self.terms.held_by_guest;
        guest.partition(|(_, demand)| held.contains(demand.counter))
    }
}
