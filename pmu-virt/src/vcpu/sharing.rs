//! More logical counters than physical ones: turns, or a refusal.

use std::num::NonZeroU64;

use arbiter::CounterId;
use pmu_model::{SlotIndex, SlotSet, UnavailableReason};

use super::{Here, Logical, VcpuPmu, index_of};
use crate::assign::{Demand, Placement, assign, assign_most};
use crate::core_pmu::CorePmu;

/// What to do for a vCPU that wants more counters than its core has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Oversubscribe {
    /// The counter that finds no place is unavailable.
    #[default]
    Refuse,
    /// Counters take turns; counts are scaled to the time in which they were
    /// to count, and labelled so.
    Multiplex {
        /// Length of a turn in TSC ticks that the guest runs.
        turn: NonZeroU64,
    },
}

/// Whose turn it is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turns {
    answer: Oversubscribe,
    /// Ticks that the guest will have run when the turn is over.
    over: Option<u64>,
    /// The same, kept while the guest has stopped counters for a moment.
    due: Option<u64>,
    /// The log knows that turns are taken.
    told: bool,
    /// The demand that is placed first.
    first: usize,
}

impl Turns {
    pub(super) fn new(answer: Oversubscribe) -> Self {
        Turns {
            answer,
            ..Turns::default()
        }
    }

    /// Whether counters take turns at present.
    pub(super) fn are_taken(&self) -> bool {
        self.over.is_some()
    }

    /// Whether counters may take turns at all.
    pub(super) fn are_allowed(&self) -> bool {
        matches!(self.answer, Oversubscribe::Multiplex { .. })
    }

    #[inline]
    pub(super) fn is_over(&self, now: u64) -> bool {
        self.over.is_some_and(|over| now >= over)
    }

    /// Ticks that are left of this turn.
    pub(super) fn rest(&self, now: u64) -> Option<u64> {
        self.over.map(|over| over.saturating_sub(now))
    }

    pub(super) fn end(&mut self) {
        self.over = None;
    }

    /// Takes turns from now on, if it did not. True the first time ever.
    pub(super) fn start(&mut self, now: u64) -> bool {
        if !self.are_taken() {
            self.begin(now);
        }
        !std::mem::replace(&mut self.told, true)
    }

    /// The demand that is placed first, modulo their number.
    pub(super) fn first(&self) -> usize {
        self.first
    }

    /// Forgets whose turn it was.
    pub(super) fn reset(&mut self) {
        *self = Turns::new(self.answer);
    }

    /// The next counters come first.
    fn advance(&mut self) {
        self.first = self.first.wrapping_add(1);
        self.over = None;
        self.due = None;
    }

    /// Counters take turns from now on. A turn that was cut short goes on: a
    /// guest that stops its counters again and again, as drivers do in each
    /// interrupt, would else never leave the first one.
    fn begin(&mut self, now: u64) {
        let Oversubscribe::Multiplex { turn } = self.answer else {
            return;
        };
        if self.due.is_some_and(|due| due <= now) {
            self.advance();
        }
        let due = *self.due.get_or_insert(now.saturating_add(turn.get()));
        self.over = Some(due);
    }
}

impl VcpuPmu {
    /// The next counters get the places.
    pub(super) fn next_turn(&mut self, here: &mut Here<'_>) {
        self.turns.advance();
        self.distribute(here);
        self.refresh_needs(here.as_deref());
    }

    /// Gives places to all counters that are wanted. Where not all find one,
    /// they take turns, or the ones that have none are refused.
    pub(super) fn distribute(&mut self, here: &mut Here<'_>) {
        let demands = self.guest_demands(here.as_deref());
        if self.hosting {
            self.distribute_among_hosts(here, demands);
            return;
        }
        let Some(core) = here else { return };
        let (all, unclaimed) = (core.bank.slots(), core.bank.unclaimed());
        // No other vCPU's counter is moved while there is room beside it.
        let assigned = assign(&demands, unclaimed).or_else(|_| assign(&demands, all));
        match (assigned, self.turns.answer) {
            (Ok(placement), _) => {
                self.turns.end();
                self.move_to(here, &demands, &placement, UnavailableReason::Waiting);
            }
            (Err(conflict), Oversubscribe::Refuse) => {
                let placement = assign_most(&demands, all, 0);
                self.move_to(
                    here,
                    &demands,
                    &placement,
                    UnavailableReason::Conflict(conflict),
                );
            }
            (Err(conflict), Oversubscribe::Multiplex { .. }) => {
                if self.turns.start(self.ran) {
                    log::info!("{}: counters take turns, because {conflict}", self.owner);
                }
                let placement = assign_most(&demands, all, self.turns.first);
                self.move_to(here, &demands, &placement, UnavailableReason::Waiting);
            }
        }
    }

    /// What all counters that are wanted want.
    pub(super) fn guest_demands(&self, core: Option<&CorePmu>) -> Vec<Demand> {
        let wanted = self.active.iter();
        let mut demands: Vec<Demand> = wanted
            .filter_map(|counter| self.demand(core, counter))
            .collect();
        if self.turns.answer == Oversubscribe::Refuse {
            // Those that have a place come first, so that they keep one, and
            // then those that were not refused before.
            demands.sort_by_key(|demand| {
                let logical = &self.counters[index_of(demand.counter)];
                (demand.held.is_none(), logical.unavailable.is_some())
            });
        }
        demands
    }

    /// What a counter wants, if it wants anything that can be had.
    fn demand(&self, core: Option<&CorePmu>, counter: CounterId) -> Option<Demand> {
        let logical = &self.counters[index_of(counter)];
        let (true, Some(request), Some(core)) = (self.is_wanted(counter), &logical.request, core)
        else {
            return None;
        };
        Some(Demand {
            counter,
            constraint: core.backend().plan(request).ok()?.constraint,
            held: logical.slot_on(core),
        })
    }

    /// Brings counters to the slots of `placement`: first all that leave, then
    /// all that come. `otherwise` is why a counter has none.
    fn move_to(
        &mut self,
        here: &mut Here<'_>,
        demands: &[Demand],
        placement: &Placement,
        otherwise: UnavailableReason,
    ) {
        let moves = || {
            demands
                .iter()
                .enumerate()
                .map(|(index, demand)| (demand, placement.slot(index)))
                .filter(|(demand, slot)| slot.is_none() || *slot != demand.held)
        };
        for (demand, _) in moves() {
            self.give_up_place(here, demand.counter);
        }
        for (demand, slot) in moves() {
            let slots = slot.map(|slot| demand.constraint.taken_at(slot));
            self.guest_comes(here, demand.counter, slots, otherwise);
        }
    }

    /// Puts a counter on the slots that were found for it. `otherwise` is why
    /// there are none.
    pub(super) fn guest_comes(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        slots: Option<SlotSet>,
        otherwise: UnavailableReason,
    ) {
        let Some(request) = self.counters[index_of(counter)].request else {
            return;
        };
        match slots.map(|slots| self.come_to(here, counter, slots, &request)) {
            Some(Ok(())) => {}
            Some(Err(reason)) => self.freeze(counter, &request, reason),
            None => self.freeze(counter, &request, otherwise),
        }
    }

    /// Leaves the slot, with the count.
    pub(super) fn give_up_place(&mut self, here: &mut Here<'_>, counter: CounterId) {
        let Some(core) = here else { return };
        if let Some(lease) = self.counters[index_of(counter)].lease.take() {
            let (settled, loss) = lease.end(&mut core.bank);
            self.leave_place(here, counter, lease.request(), settled, loss);
        }
    }
}

impl Logical {
    /// The slot that it has on `core`.
    fn slot_on(&self, core: &CorePmu) -> Option<SlotIndex> {
        let lease = self.lease.as_ref()?;
        core.bank.holds(lease).then(|| lease.slot())
    }
}
