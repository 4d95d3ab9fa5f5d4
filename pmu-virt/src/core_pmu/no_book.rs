//! A core on which nobody but guests counts: in place of `book`, where the feature `contexts`
//! is off. What nobody was promised takes no room.

use arbiter::CounterSet;
use pmu_model::{Constraint, OwnerId, SlotSet};

use super::planner::Planner;
use crate::placement::fits;

pub(crate) use NoBook as Book;
pub(crate) use NoFirmDemands as FirmDemands;

/// No promises.
#[derive(Debug, Default)]
pub(crate) struct NoBook {}

impl NoBook {
    pub(crate) fn firm_beside(&self, planner: Planner<'_>, _: OwnerId) -> NoFirmDemands {
        NoFirmDemands(planner.slots())
    }

    pub(crate) fn firm_of(&self, planner: Planner<'_>, _: OwnerId) -> NoFirmDemands {
        NoFirmDemands(planner.slots())
    }

    /// The counters that it `holds`.
    pub(crate) fn relied_on(&self, _: OwnerId, holds: CounterSet) -> usize {
        usize::try_from(holds.len()).unwrap_or(usize::MAX)
    }

    /// For any number of counters.
    pub(super) fn room(&self, _: Planner<'_>) -> usize {
        usize::MAX
    }

    pub(super) fn refuses(&self, _: Planner<'_>) -> u64 {
        0
    }

    pub(crate) fn guest_may_have(&self, _: Planner<'_>, _: OwnerId, _: usize) -> bool {
        true
    }

    pub(crate) fn guest_may_have_more(&self, _: Planner<'_>, _: usize) -> bool {
        true
    }
}

/// The slots of a core, all of them free of promises.
#[derive(Debug)]
pub(crate) struct NoFirmDemands(SlotSet);

impl NoFirmDemands {
    /// Whether all of `wanted` has a place.
    pub(crate) fn leave_room_for(&self, wanted: &[Constraint]) -> bool {
        fits(wanted.iter(), self.0)
    }
}
