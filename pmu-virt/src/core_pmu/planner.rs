//! Which slots of a core can count an event: of a guest's, of a context's, and for each
//! counter that is reserved.

use arbiter::{CounterId, NamedEvent};
use perfmon::ContextId;
use pmu_model::{
    Constraint, CountRequest, EventCode, EventFamily, FixedFunction, OwnerId, SlotSet, Unavailable,
};

use crate::admission::ContextDemand;
use crate::attached::AttachedContext;
use crate::backend::CountPlan;
use crate::filter::EventFilter;
use crate::policy::Standing;
use crate::slot_bank::SlotBank;

/// What a context may want of a core, before it is known what can count it.
#[derive(Clone, Debug)]
pub(crate) struct ResourceClaim {
    pub(crate) context: ContextId,
    pub(crate) vcpu: Option<OwnerId>,
    pub(crate) preemptible: bool,
    pub(crate) standing: Standing,
    /// It was told that there is no room for all that it demands.
    pub(crate) overdrawn: bool,
    pub(crate) sets: Vec<Vec<CountRequest>>,
}

impl ResourceClaim {
    pub(super) fn of(hosted: &AttachedContext, vcpu: Option<OwnerId>) -> Self {
        let sets = hosted.context().demands().into_iter();
        let requests = |set: Vec<(u16, CountRequest)>| set.into_iter().map(|(_, request)| request);
        ResourceClaim {
            context: hosted.id(),
            vcpu,
            preemptible: hosted.is_preemptible(),
            standing: Standing::Spare,
            overdrawn: false,
            sets: sets.map(|(_, set)| requests(set).collect()).collect(),
        }
    }
}

/// What a core can count, and for which of its guests' events.
#[derive(Clone, Copy)]
pub(crate) struct Planner<'a> {
    bank: &'a SlotBank,
    /// What guests may have counted.
    filter: &'a EventFilter,
}

impl<'a> Planner<'a> {
    pub(super) fn new(bank: &'a SlotBank, filter: &'a EventFilter) -> Self {
        Planner { bank, filter }
    }

    pub(crate) fn slots(self) -> SlotSet {
        self.bank.slots()
    }

    /// How a request of the guest's would be counted.
    ///
    /// # Errors
    /// Why it is not: nobody can, or the event filter denies it.
    pub(crate) fn plan_for_guest(self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        let denied = self.filter.check(request);
        denied.map_err(|reason| Unavailable { reason })?;
        self.bank.backend().plan(request)
    }

    /// What can count a wish's events. What cannot be counted takes no slot.
    pub(super) fn claim_of(self, wish: &ResourceClaim) -> Option<ContextDemand> {
        let sets = wish.sets.iter().map(|set| {
            let constraint = |request| Some(self.bank.backend().plan(request).ok()?.constraint);
            set.iter().filter_map(constraint).collect()
        });
        Some(ContextDemand {
            context: wish.context,
            vcpu: wish.vcpu,
            preemptible: wish.preemptible,
            standing: wish.standing,
            sets: ContextDemand::maximal(sets)?,
        })
    }

    /// What can count most of the events that the guest may ask for: what is held for
    /// a counter that is reserved and has no event yet.
    pub(crate) fn any_event(self, events: &[CountRequest]) -> Option<Constraint> {
        let plan = |request| Some(self.plan_for_guest(request).ok()?.constraint);
        let all: Vec<Constraint> = events.iter().filter_map(plan).collect();
        let served = |one: &&Constraint| all.iter().filter(|other| other == one).count();
        // Of those alike the first.
        all.iter().rev().max_by_key(served).copied()
    }

    /// What the attached vCPU's guest counts.
    pub(super) fn guest_now(self) -> Vec<Constraint> {
        self.bank
            .holders()
            .iter()
            .filter(|report| report.counting && report.holder.is_guest())
            .filter_map(|report| Some(self.bank.backend().plan(&report.request).ok()?.constraint))
            .collect()
    }

    /// What has to count for each of the counters that a vCPU holds.
    pub(super) fn promises(
        self,
        family: Option<EventFamily>,
        held: &[(CounterId, Option<NamedEvent>)],
        any: Option<Constraint>,
    ) -> Vec<Constraint> {
        let promise = |(counter, event): &(CounterId, Option<NamedEvent>)| {
            self.promise(*counter, family.zip(*event), any)
        };
        held.iter().filter_map(promise).collect()
    }

    /// What has to count for a counter that is reserved, for the event that was named:
    /// that, its own, or most of those that the guest may ask for (`any`).
    pub(crate) fn promise(
        self,
        counter: CounterId,
        event: Option<(EventFamily, NamedEvent)>,
        any: Option<Constraint>,
    ) -> Option<Constraint> {
        let request = match (counter, event) {
            (CounterId::Programmable(_), None) | (CounterId::Ibs(_), _) => return any,
            (CounterId::Programmable(_), Some((family, event))) => named_request(family, event),
            (CounterId::Fixed(_), _) => fixed_request(counter),
        };
        Some(self.plan_for_guest(&request?).ok()?.constraint)
    }
}

/// What a request names: in both rings. `None` if the model has no such event.
fn named_request(family: EventFamily, event: NamedEvent) -> Option<CountRequest> {
    let plain = CountRequest::decode(family, event.select());
    let encoded = plain.encode() == Some(event.select());
    encoded.then_some(CountRequest {
        os: true,
        usr: true,
        ..plain
    })
}

/// What a fixed-function counter counts.
pub(crate) fn fixed_request(counter: CounterId) -> Option<CountRequest> {
    let CounterId::Fixed(n) = counter else {
        return None;
    };
    let event = EventCode::Fixed(FixedFunction::of(n)?);
    Some(CountRequest::plain(event, true, true))
}
