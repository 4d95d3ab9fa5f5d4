//! Slots for the guest's counters and those of host contexts, all at once; and
//! timeslices for more counters than there are slots.

use std::num::NonZeroU64;

use arbiter::CounterId;
use perfmon::ContextId;
use pmu_model::{Constraint, SlotIndex, SlotSet, Ticks, UnavailableReason};

use super::{Here, Logical, VcpuPmu, index_of};
use crate::assign::{Demand, Placement, assign};
use crate::attached::{AttachedContext, HostEvent};
use crate::core_pmu::CorePmu;
use crate::placement::{self, Claim, Claims, ContextClaims, CoreSlots, Placed, Shortage};
use crate::slot_bank::{Claimant, SlotBank};

impl VcpuPmu {
    /// Brings slots in line with what host contexts want, and the guest's with
    /// what they leave. Counts were settled before.
    pub(super) fn arrange(&mut self, here: &mut Here<'_>) {
        self.each_host(here, AttachedContext::reconcile);
        self.give_places(here);
        self.refresh_needs(here.as_deref());
    }

    /// Gives host contexts the places that they miss.
    pub(super) fn give_places(&mut self, here: &mut Here<'_>) {
        let mut short = false;
        self.each_host(here, |hosted, bank| {
            hosted.place_missing(bank);
            short |= hosted.is_short(bank);
        });
        if short {
            self.distribute(here);
        }
        self.each_host(here, |hosted, _| hosted.miss_the_rest());
    }

    /// Gives slots to all that is to be counted here: the guest's counters and
    /// those of host contexts. A context that may be preempted and does not find
    /// all that it wants is. Where not all of the guest's counters find one, they
    /// take turns, or the ones that have none are refused.
    pub(super) fn distribute(&mut self, here: &mut Here<'_>) {
        loop {
            let Some(core) = here else { return };
            let slots = CoreSlots {
                all: core.bank.slots(),
                unclaimed: core.bank.unclaimed(),
            };
            let (mut reserved, mut guest) = self.guest_claims(core);
            let unpromised = self.keep_promises(core, &mut reserved);
            let beyond = self.keep_to_budget(&reserved, &mut guest);
            let take_turns = |(_, reason)| reason == UnavailableReason::Waiting;
            let budget_turns = beyond.iter().copied().any(take_turns);
            let mut claims = self.claims(core, reserved, guest);
            let placed = placement::place(&claims, slots);
            let (placement, otherwise) = match placed {
                Placed::All(placement) => {
                    if !budget_turns {
                        self.multiplexer.end();
                    }
                    (placement, UnavailableReason::Waiting)
                }
                Placed::Preempts(context) => {
                    self.with_host(here, context, |hosted, bank| hosted.preempt(bank));
                    continue;
                }
                Placed::Some(placement, None) => (placement, UnavailableReason::Waiting),
                Placed::Some(placement, Some(shortage)) => {
                    let backend = core.backend().name();
                    let reason = match shortage {
                        Shortage::Conflict(conflict) => UnavailableReason::Conflict(conflict),
                        Shortage::Hosts => UnavailableReason::Busy { backend },
                    };
                    // A timeslice that begins here says who comes first.
                    let otherwise = self.answer_shortage(reason);
                    match self.multiplexer.rotation() {
                        // The budget has put them in their order already.
                        Some(_) if budget_turns => (claims.rotated(slots, 0), otherwise),
                        Some(first) => (claims.rotated(slots, first), otherwise),
                        None => (placement, otherwise),
                    }
                }
            };
            for (counter, reason) in beyond.into_iter().chain(unpromised) {
                self.release_slot(here, counter);
                self.guest_comes(here, counter, None, reason);
            }
            self.move_to(here, &claims, &placement, otherwise);
            return;
        }
    }

    /// Why counters of the guest have no slot now: they wait for their turn, or
    /// are refused.
    pub(super) fn answer_shortage(&mut self, reason: UnavailableReason) -> UnavailableReason {
        if !self.multiplexer.is_allowed() {
            return reason;
        }
        if self.multiplexer.start(self.ran) {
            log::info!("{}: counters take turns, because {reason}", self.owner);
        }
        UnavailableReason::Waiting
    }

    /// What the guest wants: what it has reserved, and the rest.
    fn guest_claims(&self, core: &CorePmu) -> (Vec<Claim>, Vec<Claim>) {
        let held = self.guests_holding();
        let vcpu = self.owner;
        let guest = self.guest_demands(core).into_iter().map(|demand| {
            let counter = demand.counter;
            (Claimant::Guest { vcpu, counter }, demand)
        });
        guest.partition(|(_, demand)| held.contains(demand.counter))
    }

    /// Whether what a reserved counter selects may take room that others were promised: it
    /// wants another place than it was promised itself.
    pub(super) fn is_judged(
        &self,
        core: &CorePmu,
        counter: CounterId,
        constraint: &Constraint,
    ) -> bool {
        if !self.guests_holding().contains(counter) {
            return false;
        }
        let any = self.any.get().or_else(|| {
            self.any.set(self.any_event(core));
            self.any.get()
        });
        let promise = self.promise(core, counter, any);
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
        core: &CorePmu,
        reserved: &mut Vec<Claim>,
    ) -> Vec<(CounterId, UnavailableReason)> {
        let judged = |(_, demand): &Claim| self.is_judged(core, demand.counter, &demand.constraint);
        if !reserved.iter().any(judged) {
            return Vec::new();
        }
        let firm = core.book().firm_beside(core.planner(), self.owner);
        let promised = self.promised(core, self.any_event(core)).into_iter();
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
                assign(&all, core.bank.slots())
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

    /// Everybody's claims, by precedence.
    fn claims(&self, core: &CorePmu, reserved: Vec<Claim>, guest: Vec<Claim>) -> Claims {
        let hosts = self.hosts(Some(core)).filter(|_| self.hosting);
        let contexts = hosts.map(|hosted| context_claims(hosted, core));
        Claims::new(core.book().policy(), reserved, guest, contexts.collect())
    }

    /// Works with one host context, and records what came of it.
    fn with_host(
        &mut self,
        here: &mut Here<'_>,
        context: ContextId,
        act: impl Fn(&mut AttachedContext, &mut SlotBank) -> Option<HostEvent>,
    ) {
        let mut event = None;
        self.each_host(here, |hosted, bank| {
            if hosted.id() == context {
                event = act(hosted, bank).map(|event| (hosted.vcpu(), event));
            }
        });
        if let (Some((vcpu, event)), Some(core)) = (event, here) {
            core.host.record(context, vcpu, event);
        }
    }

    /// Restores contexts that were preempted and would find all that they want;
    /// they have no places yet.
    pub(super) fn restore_hosts(&mut self, here: &mut Here<'_>) {
        let Some(core) = here else { return };
        let (mut reserved, mut guest) = self.guest_claims(core);
        self.keep_promises(core, &mut reserved);
        placement::keep_to(self.grant.budget.most(), &reserved, &mut guest);
        let claims = self.claims(core, reserved, guest);
        let fits = |hosted: &AttachedContext| {
            let more = hosted.demands_if_restored(&core.bank);
            claims.fit_with(&more, core.bank.slots())
        };
        let preempted = self
            .hosts(Some(core))
            .filter(|hosted| hosted.is_preempted() && !hosted.is_beyond_lease());
        let restored = preempted.filter(|hosted| fits(hosted));
        // One at a time: each takes room.
        let Some(first) = restored.map(AttachedContext::id).next() else {
            return;
        };
        self.with_host(here, first, |hosted, _| hosted.restore());
    }

    /// Brings counters to the slots of `placement`: first all that leave, then
    /// all that come. `otherwise` is why one of the guest's has none.
    fn move_to(
        &mut self,
        here: &mut Here<'_>,
        claims: &Claims,
        placement: &Placement,
        otherwise: UnavailableReason,
    ) {
        for (claimant, _) in claims.moves(placement) {
            match claimant {
                Claimant::Guest { counter, .. } => self.release_slot(here, counter),
                Claimant::Context { context, pmd, .. } => self.each_host(here, |hosted, bank| {
                    if hosted.id() == context {
                        hosted.displace(pmd, bank);
                    }
                }),
            }
        }
        for (claimant, slots) in claims.moves(placement) {
            match (claimant, slots) {
                (Claimant::Guest { counter, .. }, slots) => {
                    self.guest_comes(here, counter, slots, otherwise);
                }
                (Claimant::Context { context, pmd, .. }, Some(slots)) => {
                    self.each_host(here, |hosted, bank| {
                        if hosted.id() == context {
                            hosted.bind_slot(pmd, slots, bank);
                        }
                    });
                }
                // It stays missing, and its context loses it in the end.
                (Claimant::Context { .. }, None) => {}
            }
        }
    }

    /// What all counters that are wanted want.
    fn guest_demands(&self, core: &CorePmu) -> Vec<Demand> {
        let wanted = self.active.iter();
        let mut demands: Vec<Demand> = wanted
            .filter_map(|counter| self.demand(core, counter))
            .collect();
        if !self.multiplexer.is_allowed() {
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
    fn demand(&self, core: &CorePmu, counter: CounterId) -> Option<Demand> {
        let logical = &self.counters[index_of(counter)];
        let (true, Some(request)) = (self.is_wanted(counter), &logical.request) else {
            return None;
        };
        Some(Demand {
            counter,
            constraint: core.plan_for_guest(request).ok()?.constraint,
            held: logical.slot_on(core),
        })
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
        match slots.map(|slots| self.bind_slot(here, counter, slots, &request)) {
            Some(Ok(())) => {}
            Some(Err(reason)) => self.freeze(counter, &request, reason),
            None => self.freeze(counter, &request, otherwise),
        }
    }

    /// Leaves the slot, with the count.
    pub(super) fn release_slot(&mut self, here: &mut Here<'_>, counter: CounterId) {
        let Some(core) = here else { return };
        if let Some(lease) = self.counters[index_of(counter)].lease.take() {
            let (settled, loss) = lease.end(&mut core.bank);
            self.leave_place(here, counter, lease.request(), settled, loss);
        }
    }
}

fn context_claims(hosted: &AttachedContext, core: &CorePmu) -> ContextClaims {
    ContextClaims {
        context: hosted.id(),
        standing: core.book().standing_of(hosted.id()),
        age: core.book().age_of(hosted.id()),
        preemptible: hosted.is_preemptible(),
        claims: hosted.claims(&core.bank),
    }
}

impl Logical {
    /// The slot that it has on `core`.
    fn slot_on(&self, core: &CorePmu) -> Option<SlotIndex> {
        let lease = self.lease.as_ref()?;
        core.bank.holds(lease).then(|| lease.slot())
    }
}

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

/// Whose timeslice it is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Multiplexer {
    answer: Oversubscribe,
    /// How long the guest will have run when the timeslice is over.
    over: Option<Ticks>,
    /// The same, kept while the guest has stopped counters for a moment.
    due: Option<Ticks>,
    /// The log knows that turns are taken.
    reported: bool,
    /// The demand that is placed first.
    first: usize,
}

impl Multiplexer {
    pub(super) fn new(answer: Oversubscribe) -> Self {
        Multiplexer {
            answer,
            ..Multiplexer::default()
        }
    }

    /// Whether counters take turns at present.
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

    pub(super) fn end(&mut self) {
        self.over = None;
    }

    /// Takes turns from now on, if it did not. True the first time ever.
    pub(super) fn start(&mut self, now: Ticks) -> bool {
        if !self.is_active() {
            self.begin(now);
        }
        !std::mem::replace(&mut self.reported, true)
    }

    /// The counter that is placed first, modulo their number; none where counters
    /// may not take turns.
    pub(super) fn rotation(&self) -> Option<usize> {
        self.is_allowed().then_some(self.first)
    }

    /// Forgets whose timeslice it was.
    pub(super) fn reset(&mut self) {
        *self = Multiplexer::new(self.answer);
    }

    /// The next counters come first.
    fn advance(&mut self) {
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
}

impl VcpuPmu {
    /// The next counters get the places.
    pub(super) fn next_timeslice(&mut self, here: &mut Here<'_>) {
        self.multiplexer.advance();
        self.distribute(here);
        self.refresh_needs(here.as_deref());
    }
}
