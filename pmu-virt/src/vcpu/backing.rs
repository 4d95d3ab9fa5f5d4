//! What of a vCPU's reservations has physical counters, and what could have.

use arbiter::{Backing, CounterId, CounterSet, Layer, PcrUnit, PerKind};
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
        let elsewhere = self.backed_elsewhere(core, any);
        let most = self.grant.budget.most;
        let spare = PerKind::count(held).fixed < most.fixed;
        Backing {
            programmable: programmable.min(most.programmable),
            fixed: if spare { fixed } else { fixed & held },
            elsewhere: if elsewhere > programmable {
                elsewhere.min(most.programmable)
            } else {
                0
            },
        }
    }

    /// How many programmable counters the layers of the guest could hold together on the
    /// other core with the most room, to which its contexts would go with the vCPU.
    fn backed_elsewhere(&self, core: &CorePmu, any: Option<Constraint>) -> u8 {
        let (Some(any), true) = (any, self.room_elsewhere > 0) else {
            return 0;
        };
        // The cores of a VM have the same slots.
        let firm = core.firm_of(self.owner);
        let most = self.model.counts().programmable;
        let fit = |count: &u8| {
            let counters = usize::from(*count);
            firm.leave_room_for(&vec![any; counters])
                && counters + core.relied_on(self.owner, CounterSet::EMPTY) <= self.room_elsewhere
        };
        (1..=most).take_while(fit).last().unwrap_or(0)
    }

    /// Another core of the VM has room for so many promised counters
    /// ([`CorePmu::room`]), and the scheduler moves vCPUs: a request that this core
    /// cannot back waits for the move ([`VcpuPmu::needs_room`]).
    pub fn set_room_elsewhere(&mut self, room: usize) {
        self.room_elsewhere = room;
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
        Some(core.relied_on(self.owner, fixed) + usize::from(programmable))
    }

    /// No core has that room: the request is refused.
    pub fn stay(&mut self, core: Option<&mut CorePmu>) {
        let _ = self.arbitrate(core, |unit, cx| ((), unit.stay(cx)));
    }

    /// Tells the reservations what can be backed. Off its core, what they were told
    /// last holds.
    pub(super) fn look_for_room(&mut self, here: &mut Here<'_>) {
        let Some(core) = here else { return };
        let backing = self.backing(core);
        if let Some(reservations) = &mut self.reservations {
            let (unit, mut context) = reservations.parts(self.left);
            let effects = unit.back(backing, &mut context);
            self.take_effects(here, effects);
        }
    }

    /// Tells the VM what this vCPU holds, and how many counters its guest may want.
    pub(super) fn note_holdings(&self) {
        if let Some(reservations) = &self.reservations {
            let held = self.guests_holding();
            reservations.holdings.note(self.owner, held, self.wished());
        }
    }
}
