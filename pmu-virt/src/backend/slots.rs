//! The bookkeeping that counting backends share: programmed slots with a
//! count, a running flag and an armed overflow.

use std::num::NonZeroU64;

use pmu_model::{
    Constraint, CountRequest, LossReason, Provenance, Reading, SlotIndex, SlotSet, Unavailable,
    UnavailableReason,
};

use super::CountPlan;
use super::patience::Patience;

/// Slots of each backend here: a stopped one costs nothing, so there are
/// enough for the counters of several vCPUs that take turns on one core.
pub(super) const CAPACITY: usize = 64;

/// What every countable request is free to take.
pub(super) const ANY_SLOT: Constraint = Constraint::any(CAPACITY);

/// One programmed slot.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) request: CountRequest,
    pub(super) provenance: Provenance,
    /// Events since it was programmed.
    count: u64,
    /// Events still to come before the armed overflow.
    armed: Option<NonZeroU64>,
    /// How long that may wait.
    pub(super) patience: Patience,
    /// Ticks whose ring is yet to be told (`clock`).
    pub(super) unattributed: u64,
    pub(super) loss: Option<LossReason>,
}

impl Slot {
    /// Counts `events` more; true when the armed overflow came.
    pub(super) fn add(&mut self, events: u64) -> bool {
        self.count = self.count.wrapping_add(events);
        let Some(armed) = self.armed else {
            return false;
        };
        self.armed = armed.get().checked_sub(events).and_then(NonZeroU64::new);
        self.armed.is_none()
    }

    /// Events until the armed overflow.
    pub(super) fn remaining(&self) -> Option<u64> {
        self.armed.map(NonZeroU64::get)
    }
}

/// All slots of a backend.
#[derive(Debug)]
pub(super) struct Slots {
    backend: &'static str,
    slots: Box<[Option<Slot>; CAPACITY]>,
    programmed: SlotSet,
    /// Those of them that count one ring alone.
    of_one_ring: SlotSet,
    /// Those whose armed overflow may wait.
    patient: SlotSet,
    running: SlotSet,
    /// Running since before the present interval began.
    in_interval: SlotSet,
    overflowed: SlotSet,
}

impl Slots {
    pub(super) fn new(backend: &'static str) -> Self {
        Slots {
            backend,
            slots: Box::new([const { None }; CAPACITY]),
            programmed: SlotSet::EMPTY,
            of_one_ring: SlotSet::EMPTY,
            patient: SlotSet::EMPTY,
            running: SlotSet::EMPTY,
            in_interval: SlotSet::EMPTY,
            overflowed: SlotSet::EMPTY,
        }
    }

    /// Binds a slot to a request that the backend found `countable`; frees it
    /// where it is not, so that it does not answer for what it counted before.
    pub(super) fn program(
        &mut self,
        index: SlotIndex,
        request: &CountRequest,
        countable: Result<CountPlan, Unavailable>,
    ) -> Result<Provenance, Unavailable> {
        if self.programmed.contains(index) {
            self.release(index);
        }
        let provenance = countable?.provenance;
        let place = self
            .slots
            .get_mut(usize::from(index.0))
            .ok_or(Unavailable {
                reason: UnavailableReason::NoSuchSlot {
                    backend: self.backend,
                    slot: index,
                },
            })?;
        *place = Some(Slot {
            request: *request,
            provenance,
            count: 0,
            armed: None,
            patience: Patience::default(),
            unattributed: 0,
            loss: None,
        });
        self.programmed.insert(index);
        if request.is_ring_filtered() {
            self.of_one_ring.insert(index);
        }
        Ok(provenance)
    }

    pub(super) fn release(&mut self, index: SlotIndex) {
        if let Some(place) = self.slots.get_mut(usize::from(index.0)) {
            *place = None;
            self.programmed.remove(index);
            self.of_one_ring.remove(index);
            self.patient.remove(index);
            self.stop(index);
            self.overflowed.remove(index);
        }
    }

    pub(super) fn get(&self, index: SlotIndex) -> Option<&Slot> {
        self.slots.get(usize::from(index.0))?.as_ref()
    }

    pub(super) fn get_mut(&mut self, index: SlotIndex) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(index.0))?.as_mut()
    }

    pub(super) fn start(&mut self, index: SlotIndex) {
        if self.programmed.contains(index) {
            self.running.insert(index);
        }
    }

    pub(super) fn resume(&mut self, slots: SlotSet) {
        self.running = self.running.union(slots.intersection(self.programmed));
    }

    pub(super) fn stop(&mut self, index: SlotIndex) {
        self.running.remove(index);
        self.in_interval.remove(index);
    }

    pub(super) fn pause(&mut self, slots: SlotSet) {
        self.running = self.running.difference(slots);
        self.in_interval = self.in_interval.difference(slots);
    }

    /// An interval begins.
    pub(super) fn enter(&mut self) {
        self.in_interval = self.running;
    }

    /// The slots that have run since the interval began.
    pub(super) fn interval(&self) -> SlotSet {
        self.in_interval
    }

    /// The interval ends: the slots that ran from its beginning.
    pub(super) fn take_interval(&mut self) -> SlotSet {
        std::mem::take(&mut self.in_interval)
    }

    pub(super) fn arm(&mut self, index: SlotIndex, after: Option<NonZeroU64>) {
        self.overflowed.remove(index);
        self.patient.remove(index);
        if let Some(slot) = self.get_mut(index) {
            slot.armed = after;
            slot.patience.deny();
        }
    }

    /// Arms an overflow that may wait for others.
    pub(super) fn arm_about(&mut self, index: SlotIndex, after: Option<NonZeroU64>) {
        self.arm(index, after);
        if let (Some(slot), Some(after)) = (self.get_mut(index), after) {
            slot.patience.grant(after.get());
            self.patient.insert(index);
        }
    }

    /// Whether an overflow is armed that may wait.
    pub(super) fn is_patient(&self) -> bool {
        !self.patient.is_empty()
    }

    pub(super) fn read(&self, index: SlotIndex) -> Reading {
        match self.get(index) {
            Some(slot) => Reading::Counted {
                value: slot.count,
                provenance: slot.provenance,
            },
            None if usize::from(index.0) >= CAPACITY => {
                Reading::Unavailable(UnavailableReason::NoSuchSlot {
                    backend: self.backend,
                    slot: index,
                })
            }
            None => Reading::Unavailable(UnavailableReason::NotProgrammed {
                backend: self.backend,
                slot: index,
            }),
        }
    }

    /// Whether a slot is running that counts one ring alone.
    pub(super) fn any_of_one_ring(&self) -> bool {
        !self.running.intersection(self.of_one_ring).is_empty()
    }

    /// The slots that are running.
    pub(super) fn running_set(&self) -> SlotSet {
        self.running
    }

    /// Those slots, one by one.
    pub(super) fn running(&self) -> impl Iterator<Item = &Slot> {
        self.running.iter().filter_map(|index| self.get(index))
    }

    /// Gives each of `slots` what `events` says happened to it.
    pub(super) fn advance(&mut self, slots: SlotSet, mut events: impl FnMut(&mut Slot) -> u64) {
        for index in slots.iter() {
            let Some(slot) = self.get_mut(index) else {
                continue;
            };
            let events = events(slot);
            self.add(index, events);
        }
    }

    /// Something happened to a slot so many times.
    pub(super) fn add(&mut self, index: SlotIndex, events: u64) {
        if self.get_mut(index).is_some_and(|slot| slot.add(events)) {
            self.overflowed.insert(index);
        }
    }

    pub(super) fn take_overflows(&mut self) -> SlotSet {
        std::mem::take(&mut self.overflowed)
    }
}
