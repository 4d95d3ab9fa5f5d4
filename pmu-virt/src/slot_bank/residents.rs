//! Who is on which slot, and what is owed to those who had to leave.

use std::collections::BTreeMap;

use pmu_model::{CountRequest, LossReason, OwnerId, Reading, SlotIndex, SlotSet};

use super::Claimant;

/// What a slot counts, and for whom.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resident {
    pub(super) claimant: Claimant,
    pub(super) request: CountRequest,
    /// The slot's count when it was last read; none if it could not be.
    pub(super) seen: Option<u64>,
    /// Of its lease; no other lease on this core has it.
    pub(super) stamp: u64,
    /// Switch after which its owner was attached last.
    pub(super) used: u64,
    pub(super) slots: SlotSet,
}

/// The last count of a lease that is over.
#[derive(Clone, Copy, Debug)]
pub(super) struct FinalReading {
    pub(super) claimant: Claimant,
    /// None if it has not run since it was read.
    pub(super) reading: Option<Reading>,
    /// Why it is no longer exact.
    pub(super) loss: Option<LossReason>,
}

/// The residents of a core's slots. One on a pair is on both of its slots.
#[derive(Debug)]
pub(super) struct Residents {
    places: Vec<Option<Resident>>,
    taken: SlotSet,
    /// What is owed to leases that somebody else has ended, by their stamps.
    owed: BTreeMap<u64, FinalReading>,
}

impl Residents {
    pub(super) fn new(capacity: usize) -> Self {
        Residents {
            places: vec![None; capacity],
            taken: SlotSet::EMPTY,
            owed: BTreeMap::new(),
        }
    }

    /// Every slot there is.
    pub(super) fn slots(&self) -> SlotSet {
        SlotSet::below(self.places.len())
    }

    /// Slots with a resident.
    pub(super) fn taken(&self) -> SlotSet {
        self.taken
    }

    #[inline]
    pub(super) fn get(&self, slot: SlotIndex) -> Option<&Resident> {
        self.places.get(usize::from(slot.0))?.as_ref()
    }

    /// The resident of a slot if its lease has this stamp.
    #[inline]
    pub(super) fn stamped(&mut self, slot: SlotIndex, stamp: u64) -> Option<&mut Resident> {
        let place = self.places.get_mut(usize::from(slot.0))?.as_mut();
        place.filter(|resident| resident.stamp == stamp)
    }

    #[inline]
    pub(super) fn has(&self, slot: SlotIndex, stamp: u64) -> bool {
        self.get(slot)
            .is_some_and(|resident| resident.stamp == stamp)
    }

    /// Each with its first slot, by ascending slot.
    pub(super) fn iter(&self) -> impl Iterator<Item = (SlotIndex, &Resident)> {
        let all = self
            .taken
            .iter()
            .filter_map(|slot| Some((slot, self.get(slot)?)));
        all.filter(|(slot, resident)| resident.slots.iter().next() == Some(*slot))
    }

    /// Slots whose residents are of a vCPU other than `present`.
    pub(super) fn of_absent(&self, present: Option<OwnerId>) -> SlotSet {
        let is_absent = |slot: &SlotIndex| {
            let resident = self.get(*slot);
            resident.is_some_and(|resident| !resident.claimant.is_present(present))
        };
        self.taken.iter().filter(is_absent).collect()
    }

    pub(super) fn move_in(&mut self, resident: Resident) {
        self.taken = self.taken.union(resident.slots);
        self.fill(resident.slots, Some(resident));
    }

    pub(super) fn move_out(&mut self, slots: SlotSet) {
        self.taken = self.taken.difference(slots);
        self.fill(slots, None);
    }

    fn fill(&mut self, slots: SlotSet, resident: Option<Resident>) {
        for slot in slots.iter() {
            if let Some(place) = self.places.get_mut(usize::from(slot.0)) {
                *place = resident;
            }
        }
    }

    /// The resident stays, and counts for somebody else.
    #[cfg(feature = "contexts")]
    pub(super) fn rename(&mut self, stamp: u64, claimant: Claimant) {
        for place in self.places.iter_mut().flatten() {
            if place.stamp == stamp {
                place.claimant = claimant;
            }
        }
    }

    /// Somebody has to leave, and has not heard of its last count.
    pub(super) fn owe(&mut self, stamp: u64, last: FinalReading) {
        self.owed.insert(stamp, last);
    }

    /// What is owed to a lease, which is forgotten with it.
    pub(super) fn pay(&mut self, stamp: u64) -> Option<FinalReading> {
        self.owed.remove(&stamp)
    }

    /// A vCPU leaves the core, and asks for nothing any more.
    pub(super) fn forget(&mut self, owner: OwnerId) {
        self.owed
            .retain(|_, last| last.claimant.vcpu() != Some(owner));
    }
}
