//! What a core keeps for reserved counters: which slots can count for each of them.

use arbiter::{CounterId, NamedEvent};
use pmu_model::{Constraint, CountRequest, EventCode, EventFamily, FixedFunction};

use super::CorePmu;
use super::claims::NOBODY;
use crate::admission::{ContextDemand, most_of};

impl CorePmu {
    /// What the core keeps for the reserved counters of whichever vCPU comes: one of
    /// these. None of them has more than `most` programmable ones.
    pub(super) fn reserved(&self, most: usize) -> Vec<Vec<Constraint>> {
        let Some(guest) = &self.host.guest else {
            return Vec::new();
        };
        let Some(holdings) = &guest.holdings else {
            return Vec::new();
        };
        let any = self.any_event(&guest.events);
        let (programmable, fixed) = holdings.largest();
        let fixed = fixed
            .iter()
            .filter_map(|counter| self.promise(counter, None, any));
        let many = any.map(|any| vec![any; programmable.min(most)]);
        let plain = many.into_iter().flatten().chain(fixed).collect();
        let named = holdings.named().into_iter().map(|(_, mut held)| {
            // Which of them an owner gives up is not known. Those that are hard to place
            // count as kept.
            held.sort_by_key(|(counter, event)| {
                (matches!(counter, CounterId::Fixed(_)), event.is_none())
            });
            let is_programmable =
                |held: &&(CounterId, _)| held.0.is_like(CounterId::Programmable(0));
            let programmable = held.iter().take_while(is_programmable).count();
            let kept = programmable.min(most);
            held.drain(kept..programmable);
            self.promises(&held, any)
        });
        let all: Vec<Vec<Constraint>> = std::iter::once(plain).chain(named).collect();
        // Of too many different ones the most that any of them wants of each kind.
        ContextDemand::maximal(all.clone()).unwrap_or_else(|| vec![most_of(&all)])
    }

    /// What has to count for each of the counters that a vCPU holds.
    fn promises(
        &self,
        held: &[(CounterId, Option<NamedEvent>)],
        any: Option<Constraint>,
    ) -> Vec<Constraint> {
        let family = self.host.guest.as_ref().and_then(|guest| guest.family);
        let promise = |(counter, event): &(CounterId, Option<NamedEvent>)| {
            self.promise(*counter, family.zip(*event), any)
        };
        held.iter().filter_map(promise).collect()
    }

    /// What has to count for a counter that is reserved, for the event that was named:
    /// that, its own, or most of those that the guest may ask for (`any`).
    pub(crate) fn promise(
        &self,
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

    /// The vCPUs of the VM, by bit, for whose named events the core's own contexts leave no
    /// room.
    #[must_use]
    pub fn refuses(&self) -> u64 {
        let guest = self.host.guest.as_ref();
        let named = guest.and_then(|guest| Some((guest, guest.holdings.as_ref()?.named())));
        let Some((guest, named)) = named.filter(|(_, named)| !named.is_empty()) else {
            return 0;
        };
        let any = self.any_event(&guest.events);
        let firm = self.firm_beside(NOBODY);
        let refused = named.iter().filter(|(_, held)| {
            let promises = self.promises(held, any);
            !firm.leave_room_for(&promises)
        });
        refused.fold(0, |bits, (vcpu, _)| bits | 1 << vcpu.0)
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
