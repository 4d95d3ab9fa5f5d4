//! Which slots of a core can count an event: of a guest's, of a context's, and for each
//! counter that is reserved.

use arbiter::{CounterId, NamedEvent};
use pmu_model::{
    Constraint, CountRequest, EventCode, EventFamily, FixedFunction, SlotSet, Unavailable,
};

use crate::backend::CountPlan;
use crate::filter::EventFilter;
use crate::slot_bank::SlotBank;

/// What a core can count, and for which of its guests' events.
#[derive(Clone, Copy)]
pub(crate) struct Planner<'a> {
    pub(super) bank: &'a SlotBank,
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

    /// What can count most of the events that the guest may ask for: what is held for
    /// a counter that is reserved and has no event yet.
    pub(crate) fn any_event(self, events: &[CountRequest]) -> Option<Constraint> {
        let plan = |request| Some(self.plan_for_guest(request).ok()?.constraint);
        let all: Vec<Constraint> = events.iter().filter_map(plan).collect();
        let served = |one: &&Constraint| all.iter().filter(|other| other == one).count();
        // Of those alike the first.
        all.iter().rev().max_by_key(served).copied()
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
