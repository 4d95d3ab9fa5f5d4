//! What of a vCPU's reservations has physical counters, and what could have.

use arbiter::{Backing, CounterId, CounterSet, Layer, PerKind};
use pmu_model::Constraint;

use super::{Here, VcpuPmu, index_of};
use crate::core_pmu::{CorePmu, fixed_request};

impl VcpuPmu {
    /// How many physical counters are promised to this vCPU, which is on `core` or was
    /// parked there: another core has to have room for them if it is to go on there.
    #[must_use]
    pub fn relies_on(&self, core: &CorePmu) -> usize {
        core.relied_on(self.owner, self.guests_holding())
    }

    /// What the layers of the guest have reserved.
    pub(super) fn guests_holding(&self) -> CounterSet {
        self.held_by(Layer::Firmware) | self.held_by(Layer::GuestKernel)
    }

    /// What the layers of the guest can hold so that each counter has a slot of its own
    /// on `core`, beside what contexts rely on there.
    pub(super) fn backing(&self, core: &CorePmu) -> Backing {
        let any = core.any_event(&self.wish().events);
        let constraint = |counter: CounterId| {
            let request = self.counters[index_of(counter)].request;
            let request = request.or_else(|| fixed_request(counter));
            let plan = request.and_then(|request| core.backend().plan(&request).ok());
            let of_any = any.filter(|_| matches!(counter, CounterId::Programmable(_)));
            plan.map(|plan| plan.constraint).or(of_any)
        };
        let held = self.guests_holding();
        let firm = core.firm_beside(self.owner);
        let mut wanted: Vec<Constraint> = held.iter().filter_map(constraint).collect();
        let fixed = self.model.counters().filter(|counter| {
            let more = constraint(*counter).filter(|_| !held.contains(*counter));
            let all = more.map(|more| [wanted.as_slice(), &[more]].concat());
            matches!(counter, CounterId::Fixed(_))
                && all.map_or(held.contains(*counter), |all| firm.leave_room_for(&all))
        });
        let fixed = fixed.collect();
        let mut programmable = PerKind::count(held).programmable;
        while let (Some(any), true) = (any, programmable < self.model.counts().programmable) {
            wanted.push(any);
            if !firm.leave_room_for(&wanted) {
                break;
            }
            programmable += 1;
        }
        let most = self.grant.budget.most;
        let spare = PerKind::count(held).fixed < most.fixed;
        Backing {
            programmable: programmable.min(most.programmable),
            fixed: if spare { fixed } else { fixed & held },
        }
    }

    /// Tells the reservations what can be backed. Off its core, what they were told
    /// last holds.
    pub(super) fn look_for_room(&mut self, here: &Here<'_>) {
        let Some(core) = here else { return };
        let backing = self.backing(core);
        if let Some(reservations) = &mut self.reservations {
            let (unit, mut context) = reservations.parts(self.left);
            unit.back(backing, &mut context);
        }
    }

    /// Tells the VM what this vCPU holds.
    pub(super) fn note_holdings(&self) {
        if let Some(reservations) = &self.reservations {
            let held = self.guests_holding();
            reservations.holdings.note(self.owner, held);
        }
    }
}
