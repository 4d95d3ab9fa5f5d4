//! On which terms a vCPU's counters count: what was decided about them, by value. Who
//! counts does not know who decides.

use arbiter::{CounterId, CounterSet, Grant, LegacyMap, NamedEvent, PcrUnit, PerKind, Shared};
use pmu_model::{Constraint, CountRequest, EventCode, IbsKind, KnownEvent, PmuModel};

use super::{COUNTERS, index_of};
use crate::core_pmu::{CorePmu, Planner, fixed_request};

/// Which counters the registers that belong to several reach, and under which names.
/// All other bits stay as they are, and read as 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach {
    /// By [`Shared`].
    shared: [CounterSet; 5],
    names: LegacyMap,
}

impl Reach {
    /// Where nothing can be reserved.
    pub(super) fn everything() -> Self {
        Reach {
            shared: [CounterSet::from_bits(u64::MAX); 5],
            names: LegacyMap::identity(),
        }
    }

    pub(super) fn of(names: LegacyMap, unit: &PcrUnit) -> Self {
        let shared = [
            Shared::GlobalControl,
            Shared::Freeze,
            Shared::GlobalStatus,
            Shared::FixedControl,
            Shared::PebsEnable,
        ];
        let mut reach = Reach {
            shared: [CounterSet::EMPTY; 5],
            names,
        };
        for one in shared {
            reach.shared[one as usize] = unit.reached_by(one);
        }
        reach
    }

    /// Counters that a shared control reaches.
    #[inline]
    pub(super) fn reached_by(&self, shared: Shared) -> CounterSet {
        self.shared[shared as usize]
    }

    /// Those of them that have a legacy name, through which it does.
    #[inline]
    pub(super) fn touchable(&self, shared: Shared) -> CounterSet {
        self.reached_by(shared) & self.names.named()
    }

    /// The bits of counters as a legacy register shows them.
    pub(super) fn shown(&self, shared: Shared, bits: u64) -> u64 {
        self.names.to_names(bits & self.reached_by(shared).bits())
    }

    /// Bits of a legacy register as bits of the counters behind the names.
    pub(super) fn behind(&self, bits: u64) -> u64 {
        self.names.to_counters(bits)
    }

    /// Counters by the names that the guest has for them.
    pub(super) fn names_of(&self, counters: CounterSet) -> CounterSet {
        CounterSet::from_bits(self.names.to_names(counters.bits()))
    }

    /// The names that have a counter.
    pub(super) fn visible(&self) -> CounterSet {
        self.names.names()
    }

    /// Whether a counter may have another name than its own.
    pub(super) fn renames(&self) -> bool {
        !self.names.is_identity()
    }
}

#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub(super) grant: Grant,
    pub(super) reach: Reach,
    /// Counters that somebody has reserved.
    pub(super) held: CounterSet,
    /// Those that a layer of the guest has.
    pub(super) held_by_guest: CounterSet,
    /// Counters that the guest was given and that the hypervisor has not reserved.
    pub(super) usable: CounterSet,
    /// The events for which counters are reserved, by position.
    pub(super) named: [Option<NamedEvent>; COUNTERS],
}

impl Terms {
    /// The event for which a counter is reserved, if one was named.
    pub(super) fn event_of(&self, counter: CounterId) -> Option<NamedEvent> {
        self.named.get(index_of(counter)).copied().flatten()
    }

    /// Each event that the guest can ask for by a name.
    pub(super) fn events(&self, model: &PmuModel) -> Vec<CountRequest> {
        let events = KnownEvent::ALL.into_iter().filter_map(|event| {
            let event = EventCode::of(model.events(), event)?;
            Some(CountRequest::plain(event, true, true))
        });
        let fixed = self.usable.iter().filter_map(fixed_request);
        events.chain(fixed).collect()
    }

    /// What most of them can be counted by on a core.
    pub(super) fn any_event(&self, model: &PmuModel, core: &CorePmu) -> Option<Constraint> {
        core.planner().any_event(&self.events(model))
    }

    /// How many counters the guest may want at a time, by its budget.
    pub(super) fn wished(&self) -> usize {
        let (budget, there) = (self.grant.budget, PerKind::count(self.usable));
        // What it will have again nobody else is promised.
        let (most, later) = (budget.most(), budget.later());
        let at_most = |of: fn(PerKind) -> u8| of(there).min(of(most).max(of(later)));
        usize::from(at_most(|kind| kind.programmable) + at_most(|kind| kind.fixed))
    }

    /// What has to count for a reserved counter; `any`: [`Terms::any_event`].
    pub(super) fn promise(
        &self,
        model: &PmuModel,
        planner: Planner<'_>,
        counter: CounterId,
        any: Option<Constraint>,
    ) -> Option<Constraint> {
        let event = self.event_of(counter);
        planner.promise(counter, event.map(|event| (model.events(), event)), any)
    }

    /// The same for each of the counters that layers of the guest have reserved.
    pub(super) fn promised(
        &self,
        model: &PmuModel,
        planner: Planner<'_>,
        any: Option<Constraint>,
    ) -> Vec<(CounterId, Constraint)> {
        let promise = |counter| Some((counter, self.promise(model, planner, counter, any)?));
        self.held_by_guest.iter().filter_map(promise).collect()
    }
}

/// Counters and samplers of the model.
pub(super) fn counters_there(model: &PmuModel) -> CounterSet {
    let samplers = IbsKind::ALL.into_iter().map(CounterId::Ibs);
    let samplers = samplers.filter(|sampler| model.has(*sampler));
    model.counters().chain(samplers).collect()
}
