//! Who is on which slot: coming, staying, making room.

use pmu_model::{
    Constraint, CountRequest, LossReason, Reading, SlotIndex, SlotSet, Unavailable,
    UnavailableReason,
};

use super::{Claimant, FinalReading, Resident, SlotBank, SlotLease};

impl SlotBank {
    /// Whether the counter is still where it was.
    pub(crate) fn holds(&self, lease: &SlotLease) -> bool {
        self.occupant(lease.slot())
            .is_some_and(|resident| resident.stamp == lease.stamp())
    }

    /// What a lease has come to that is over or about to be.
    pub(super) fn final_reading(&mut self, lease: &SlotLease) -> Option<FinalReading> {
        match self.occupant(lease.slot()) {
            Some(resident) if resident.stamp == lease.stamp() => {
                let claimant = resident.claimant;
                Some(self.reading_of(claimant, lease.slot()))
            }
            // Somebody else has ended it.
            _ => self.final_readings.remove(&lease.stamp()),
        }
    }

    fn reading_of(&mut self, claimant: Claimant, slot: SlotIndex) -> FinalReading {
        let stale = self.stale.contains(slot);
        if stale {
            self.operations += 1;
            self.stale.remove(slot);
        }
        FinalReading {
            claimant,
            reading: stale.then(|| self.backend.read(slot)),
            loss: self.backend.loss(slot),
        }
    }

    /// The count of a lease's slot without taking it in, and why it is no longer
    /// exact.
    pub(crate) fn peek(&self, lease: &SlotLease) -> Option<(Reading, Option<LossReason>)> {
        let slot = lease.slot();
        self.holds(lease)
            .then(|| (self.backend.read(slot), self.backend.loss(slot)))
    }

    /// A slot that can be had without moving a counter that counts now: a free
    /// one, else one that counts the same for a vCPU that is away or is kept
    /// by a host context that has stopped, else any such; of these the one that
    /// was used least recently.
    ///
    /// `constraint` is the backend's for `request`. Counters that need more than
    /// one slot, or one by name, are not placed this way.
    pub(crate) fn find(&self, request: &CountRequest, constraint: &Constraint) -> Option<SlotSet> {
        if constraint.paired || constraint.exclusive.is_some() {
            return None;
        }
        let possible = constraint.slots.intersection(self.slots());
        if let Some(free) = possible.difference(self.taken).iter().next() {
            return Some(SlotSet::of(free));
        }
        possible
            .iter()
            .filter_map(|slot| Some((self.occupant(slot)?, slot)))
            .filter(|(resident, slot)| self.yields(resident, *slot))
            .min_by_key(|(resident, slot)| (!self.serves(resident, *slot, request), resident.used))
            .map(|(_, slot)| SlotSet::of(slot))
    }

    /// Whether a resident makes room for whoever comes: its vCPU is away, or it
    /// is a host context's that does not count.
    fn yields(&self, resident: &Resident, slot: SlotIndex) -> bool {
        !self.is_present(&resident.claimant)
            || matches!(resident.claimant, Claimant::Context { .. }) && !self.is_running(slot)
    }

    /// Whether it counts while the attached vCPU runs.
    pub(crate) fn is_running(&self, slot: SlotIndex) -> bool {
        self.running.contains(slot) || self.batch.is_some_and(|batch| batch.contains(slot))
    }

    /// Whether the slot of `resident` need not be programmed to count `request`
    /// for somebody else.
    fn serves(&self, resident: &Resident, slot: SlotIndex, request: &CountRequest) -> bool {
        resident.request.counts_like(request) && self.backend.is_shared(slot)
    }

    /// Puts a counter of one who is present on `slots`, one or a pair, stopped.
    /// Who is there makes room; a counter that counts now must have left before.
    pub(crate) fn place(
        &mut self,
        slots: SlotSet,
        claimant: Claimant,
        request: &CountRequest,
    ) -> Result<SlotLease, UnavailableReason> {
        let slot = slots.iter().next().ok_or(UnavailableReason::Waiting)?;
        let inherited = if slots.intersection(self.taken).is_empty() {
            None
        } else {
            self.make_room(slot, slots, request)
        };
        if inherited.is_none() {
            self.operations += 1;
            let programmed = self.backend.program(slot, request);
            programmed.map_err(|Unavailable { reason }| reason)?;
            self.stats.restored += 1;
        }
        let settled = inherited.unwrap_or(0);
        self.stamps += 1;
        let resident = Resident {
            claimant,
            request: *request,
            seen: Some(settled),
            stamp: self.stamps,
            used: self.stats.switches,
            slots,
        };
        self.settle_in(slots, Some(resident));
        Ok(SlotLease {
            slot,
            stamp: self.stamps,
            request: *request,
            settled,
            armed: None,
            running: false,
        })
    }

    /// Ends the leases of who is on `slots`. A counter that counts the same already
    /// is taken over, and its count is yielded. Who is on the same slots is
    /// programmed over; others give theirs back.
    fn make_room(
        &mut self,
        slot: SlotIndex,
        slots: SlotSet,
        request: &CountRequest,
    ) -> Option<u64> {
        if let Some(resident) = self.resident(slot)
            && resident.slots == slots
            && self.serves(&resident, slot, request)
            && let Some(count) = self.evict(slot)
        {
            return Some(count);
        }
        for other in slots.iter() {
            let Some(resident) = self.resident(other) else {
                continue;
            };
            self.evict(other);
            if resident.slots != slots {
                self.vacate(resident.slots);
            }
        }
        self.drop_marks(slot);
        None
    }

    /// Ends the lease of whoever is on `slot`, and keeps for it what it has come
    /// to. Yields the slot's count, if there is one.
    fn evict(&mut self, slot: SlotIndex) -> Option<u64> {
        let resident = self.resident(slot)?;
        let at = resident.slots.iter().next()?;
        let last = self.reading_of(resident.claimant, at);
        let seen = match last.reading {
            Some(Reading::Counted { value, .. }) => Some(value),
            Some(Reading::Unavailable(_)) => None,
            None => resident.seen,
        };
        if last.reading.is_some() || last.loss.is_some() {
            self.final_readings.insert(resident.stamp, last);
        }
        log::trace!("{} makes room", resident.claimant);
        self.stats.evicted += 1;
        self.settle_in(resident.slots, None);
        seen
    }

    /// Notes who is on `slots`.
    fn settle_in(&mut self, slots: SlotSet, resident: Option<Resident>) {
        self.taken = match resident {
            Some(_) => self.taken.union(slots),
            None => self.taken.difference(slots),
        };
        for slot in slots.iter() {
            if let Some(place) = self.residents.get_mut(usize::from(slot.0)) {
                *place = resident;
            }
        }
    }

    /// Forgets what was known of a slot's counter.
    fn drop_marks(&mut self, slot: SlotIndex) {
        let marks = [
            &mut self.running,
            &mut self.flagged,
            &mut self.flagged_hosts,
            &mut self.stale,
            &mut self.armed,
        ];
        for mark in marks.into_iter().chain(&mut self.batch) {
            mark.remove(slot);
        }
    }

    /// Frees the slot of a lease, or forgets what is owed to it; its count was
    /// taken before, or is nobody's.
    pub(crate) fn release(&mut self, lease: &SlotLease) {
        match self.occupant(lease.slot()) {
            Some(resident) if resident.stamp == lease.stamp() => self.vacate(resident.slots),
            _ => drop(self.final_readings.remove(&lease.stamp())),
        }
    }

    /// Frees the slots of one counter; it is addressed by the first.
    fn vacate(&mut self, slots: SlotSet) {
        if let Some(at) = slots.iter().next() {
            self.operations += 1;
            self.backend.release(at);
            self.drop_marks(at);
        }
        self.settle_in(slots, None);
    }

    /// Whether the slot is to be given up before another vCPU is attached.
    pub(crate) fn is_private(&self, lease: &SlotLease) -> bool {
        !self.backend.is_shared(lease.slot())
    }

    /// The counter on a slot stays, and counts for somebody else of the same
    /// context.
    pub(crate) fn rename(&mut self, lease: &SlotLease, claimant: Claimant) {
        for place in self.residents.iter_mut().flatten() {
            if place.stamp == lease.stamp() {
                place.claimant = claimant;
            }
        }
    }

    pub(super) fn resident(&self, slot: SlotIndex) -> Option<Resident> {
        self.occupant(slot).copied()
    }

    pub(super) fn occupant(&self, slot: SlotIndex) -> Option<&Resident> {
        self.residents.get(usize::from(slot.0))?.as_ref()
    }
}
