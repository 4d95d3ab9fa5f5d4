//! What of a vCPU's reservations has physical counters, and what could have.

use std::fmt;
use std::sync::Arc;

use arbiter::{
    AskedEvents, Backing, CounterId, CounterSet, EventRoom, IbsKind, NamedEvent, PcrUnit, PerKind,
};
use pmu_model::Constraint;

use super::{Here, VcpuPmu, index_of};
use crate::core_pmu::{CorePmu, FirmDemands};

/// The other cores of a VM, as its scheduler knows them.
pub trait OtherCores: fmt::Debug + Send + Sync {
    /// For how many promised counters the one with the most room has room
    /// ([`CorePmu::room`]). It is asked at each request of a guest's layer.
    fn most_room(&self) -> usize;
}

impl VcpuPmu {
    /// How many physical counters are promised to this vCPU, which is on `core` or was
    /// parked there: another core has to have room for them if it is to go on there.
    #[must_use]
    pub fn relies_on(&self, core: &CorePmu) -> usize {
        core.book().relied_on(self.owner, self.guests_holding())
    }

    /// What the layers of the guest have reserved.
    pub(super) fn guests_holding(&self) -> CounterSet {
        self.reservations()
            .map_or(CounterSet::EMPTY, |unit| unit.bank().held_by_guest())
    }

    /// What the layers of the guest can hold so that each counter has a slot of its own
    /// on `core`, beside what contexts rely on there.
    /// `asked`: what each layer asks for, as [`PcrUnit::asked_events`] has it.
    fn backing(&self, core: &CorePmu, asked: AskedEvents) -> Backing {
        let any = self.any_event(core);
        let held = self.guests_holding();
        let kept = self.kept(core, any);
        let fixed = self.model.counters().filter(|counter| {
            let more = core.planner().promise(*counter, None, any);
            let more = more.filter(|_| !held.contains(*counter));
            matches!(counter, CounterId::Fixed(_))
                && more.map_or(held.contains(*counter), |more| {
                    kept.leaves_room_for(&[more])
                })
        });
        let fixed = fixed.collect();
        let most = self.there().programmable;
        let of_held = PerKind::count(held).programmable;
        let more = any.map_or(0, |any| kept.room_for(any, most.saturating_sub(of_held)));
        let programmable = of_held + more;
        let elsewhere = self.backed_elsewhere(core, any);
        let rooms = asked.map(|asked| {
            let event = asked?;
            if event.is_none() && !kept.differs(any) {
                return None;
            }
            let named = event.map(|event| (self.model.events(), event));
            let constraint = core
                .planner()
                .promise(CounterId::Programmable(0), named, any);
            let more = self.grant.budget.most().programmable.min(most);
            Some(kept.room(event, constraint, more.saturating_sub(of_held)))
        });
        let most = self.grant.budget.most();
        let spare = PerKind::count(held).fixed < most.fixed;
        Backing {
            programmable: programmable.min(most.programmable),
            fixed: if spare { fixed } else { fixed & held },
            elsewhere: if elsewhere > programmable {
                elsewhere.min(most.programmable)
            } else {
                0
            },
            rooms: Some(rooms),
        }
    }

    /// The samplers that there are.
    pub(super) fn samplers(&self) -> impl Iterator<Item = CounterId> + use<> {
        let has_ibs = self.model.ibs() != 0;
        let all = IbsKind::ALL.into_iter().map(CounterId::Ibs);
        all.filter(move |_| has_ibs)
    }

    /// As many counters as there are; samplers are programmable ones here.
    #[must_use]
    pub fn there(&self) -> PerKind {
        PerKind::count(self.model.counters().chain(self.samplers()).collect())
    }

    /// The samplers that count now.
    #[must_use]
    pub fn sampling(&self) -> CounterSet {
        let counts = |one: &CounterId| self.counters[index_of(*one)].is_running();
        self.samplers().filter(counts).collect()
    }

    /// What is kept for the reserved counters of this vCPU.
    fn kept(&self, core: &CorePmu, any: Option<Constraint>) -> Kept {
        let promised = self.promised(core, any);
        let now = promised.iter().map(|(counter, promise)| {
            let logical = &self.counters[index_of(*counter)];
            // What has no place is judged when it wants one.
            let request = logical.request.filter(|_| logical.lease.is_some());
            let plan = request.and_then(|request| core.backend().plan(&request).ok());
            (*counter, plan.map_or(*promise, |plan| plan.constraint))
        });
        Kept {
            now: now.collect(),
            promised,
            firm: core.book().firm_beside(core.planner(), self.owner),
            own: core.book().firm_of(core.planner(), self.owner),
        }
    }

    /// What most events of the guest's can be counted by.
    pub(super) fn any_event(&self, core: &CorePmu) -> Option<Constraint> {
        core.planner().any_event(&self.wish().events)
    }

    /// What has to count for each of the counters that layers of the guest have reserved.
    pub(super) fn promised(
        &self,
        core: &CorePmu,
        any: Option<Constraint>,
    ) -> Vec<(CounterId, Constraint)> {
        let held = self.guests_holding();
        let promise = |counter| Some((counter, self.promise(core, counter, any)?));
        held.iter().filter_map(promise).collect()
    }

    /// What has to count for a reserved counter.
    pub(super) fn promise(
        &self,
        core: &CorePmu,
        counter: CounterId,
        any: Option<Constraint>,
    ) -> Option<Constraint> {
        let event = self.named_event(counter);
        core.planner().promise(
            counter,
            event.map(|event| (self.model.events(), event)),
            any,
        )
    }

    /// The event for which a counter is reserved, if one was named.
    pub(super) fn named_event(&self, counter: CounterId) -> Option<NamedEvent> {
        let reservation = self.reservations()?.bank().reservation(counter)?;
        reservation.event
    }

    /// How many programmable counters the layers of the guest could hold together on the
    /// other core with the most room, to which its contexts would go with the vCPU.
    fn backed_elsewhere(&self, core: &CorePmu, any: Option<Constraint>) -> u8 {
        let room = self.others.as_ref().map_or(0, |others| others.most_room());
        let (Some(any), true) = (any, room > 0) else {
            return 0;
        };
        // The cores of a VM have the same slots.
        let firm = core.book().firm_of(core.planner(), self.owner);
        let most = self.there().programmable;
        let fit = |count: &u8| {
            let counters = usize::from(*count);
            firm.leave_room_for(&vec![any; counters])
                && counters + core.book().relied_on(self.owner, CounterSet::EMPTY) <= room
        };
        (1..=most).take_while(fit).last().unwrap_or(0)
    }

    /// The scheduler moves vCPUs between this core and `others`: a request that this core
    /// cannot back waits for the move ([`VcpuPmu::needs_room`]), if one of the others can.
    pub fn set_other_cores(&mut self, others: Arc<dyn OtherCores>) {
        self.others = Some(others);
    }

    /// Whether a request of the guest waits until the vCPU moves to a core that backs it.
    #[inline]
    #[must_use]
    pub fn waits_for_room(&self) -> bool {
        self.reservations().is_some_and(PcrUnit::waits_for_move)
    }

    /// Room that it needs on another core for that, if it does wait. `core`: as for
    /// [`VcpuPmu::relies_on`].
    #[must_use]
    pub fn needs_room(&self, core: &CorePmu) -> Option<usize> {
        let programmable = self.reservations()?.move_needs()?;
        // Fixed-function counters and its contexts go with it.
        let fixed = self.guests_holding() & CounterSet::first(0, arbiter::MAX_FIXED);
        Some(core.book().relied_on(self.owner, fixed) + usize::from(programmable))
    }

    /// No core has that room: the request is refused.
    pub fn stay(&mut self, core: Option<&mut CorePmu>) {
        let _ = self.arbitrate(core, |unit, cx| ((), unit.stay(cx)));
    }

    /// Tells the reservations what can be backed. Off its core, what they were told
    /// last holds.
    pub(super) fn look_for_room(&mut self, here: &mut Here<'_>) {
        let asked = self.reservations().map(PcrUnit::asked_events);
        self.look_for_room_of(here, asked.unwrap_or_default());
    }

    /// The same before a layer asks: `asked` has its request too.
    pub(super) fn look_for_room_of(&mut self, here: &mut Here<'_>, mut asked: AskedEvents) {
        loop {
            let Some(core) = here else { return };
            let backing = self.backing(core, asked);
            let Some(reservations) = &mut self.reservations else {
                return;
            };
            let (unit, mut context) = reservations.parts(self.left);
            let effects = unit.back(backing, &mut context);
            self.take_away(here, effects);
            // Each time a counter is taken or a request has its answer.
            let unit = self.reservations().filter(|unit| unit.looks_for_room());
            match unit {
                Some(unit) => asked = unit.asked_events(),
                None => return,
            }
        }
    }

    /// Whether it has to get onto its core, because a request waits to know what can be
    /// backed there.
    #[inline]
    #[must_use]
    pub fn waits_for_core(&self) -> bool {
        !self.attached && self.reservations().is_some_and(PcrUnit::looks_for_room)
    }

    /// Looks for room again where requests wait for that.
    pub(super) fn look_again(&mut self, here: &mut Here<'_>) {
        if self.reservations().is_some_and(PcrUnit::looks_for_room) {
            self.look_for_room(here);
        }
    }

    /// Tells the VM what this vCPU holds, and how many counters its guest may want.
    pub(super) fn note_holdings(&self) {
        if let Some(reservations) = &self.reservations {
            let held = self.guests_holding();
            let event = |counter| self.named_event(counter);
            reservations
                .holdings
                .note(self.owner, held, event, self.wished());
        }
    }
}

/// What is kept for the reserved counters of a vCPU.
struct Kept {
    /// What each of them was promised.
    promised: Vec<(CounterId, Constraint)>,
    /// What each of them selects now, if that is counted.
    now: Vec<(CounterId, Constraint)>,
    /// What the contexts beside it rely on.
    firm: FirmDemands,
    /// Those of them that go with the vCPU.
    own: FirmDemands,
}

impl Kept {
    /// Whether all that was promised has room together with `more`, and all that counts now.
    fn leaves_room_for(&self, more: &[Constraint]) -> bool {
        self.leaves_room_without(None, more)
    }

    fn leaves_room_without(&self, without: Option<CounterId>, more: &[Constraint]) -> bool {
        [&self.promised, &self.now].into_iter().all(|kept| {
            let kept = kept.iter().filter(|(counter, _)| Some(*counter) != without);
            let wanted = kept.map(|(_, constraint)| *constraint);
            let wanted: Vec<Constraint> = wanted.chain(more.iter().copied()).collect();
            self.firm.leave_room_for(&wanted)
        })
    }

    /// For how many counters more, up to `most`, there is room.
    fn room_for(&self, constraint: Constraint, most: u8) -> u8 {
        let fit = |count: &u8| self.leaves_room_for(&vec![constraint; usize::from(*count)]);
        (1..=most).take_while(fit).last().unwrap_or(0)
    }

    /// Whether a programmable counter is kept something else than `any`.
    fn differs(&self, any: Option<Constraint>) -> bool {
        let kept = self.promised.iter().chain(&self.now);
        let mut kept = kept.filter(|(counter, _)| !matches!(counter, CounterId::Fixed(_)));
        kept.any(|(_, constraint)| Some(*constraint) != any)
    }

    /// Room for counters of `event`, which `constraint` says what can count.
    fn room(
        &self,
        event: Option<NamedEvent>,
        constraint: Option<Constraint>,
        most: u8,
    ) -> EventRoom {
        let more = constraint.map_or(0, |constraint| self.room_for(constraint, most));
        let there = |count: &u8| {
            let promised = self.promised.iter().map(|(_, promise)| *promise);
            let wanted = constraint
                .into_iter()
                .flat_map(|one| vec![one; (*count).into()]);
            self.own
                .leave_room_for(&promised.chain(wanted).collect::<Vec<_>>())
        };
        let elsewhere = constraint.and_then(|_| (1..=most).take_while(there).last());
        let held = self.promised.iter().map(|(counter, _)| *counter);
        let instead_of = held.filter(|counter| {
            let fits = |one| self.leaves_room_without(Some(*counter), &[one]);
            matches!(counter, CounterId::Programmable(_)) && constraint.is_some_and(fits)
        });
        EventRoom {
            event,
            more,
            elsewhere: elsewhere.unwrap_or(0),
            instead_of: instead_of.collect(),
        }
    }
}
