//! One core's physical counters, and whose counts are on them.
//!
//! A core runs one vCPU at a time. The counters of a vCPU that is switched out
//! stay where they are, stopped, until another vCPU needs the place: so a vCPU
//! that comes back finds them, and a switch between vCPUs that do not count
//! touches nothing. Beside the guest of the vCPU, host contexts count on the
//! same counters: one that comes and goes with the vCPU, and the core's own.

mod claimant;
mod lease;
mod residents;

pub use claimant::{Claimant, HolderReport};
pub(crate) use lease::{Return, Settled, SlotLease};

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

use pmu_model::{
    Constraint, CountRequest, LossReason, OwnerId, Progress, Reading, SlotIndex, SlotSet, Tsc,
    Unavailable, UnavailableReason,
};

use crate::backend::CounterBackend;
use lease::Arming;
use residents::{Resident, Residents};

/// The physical counters of one core.
#[derive(Debug)]
pub(crate) struct SlotBank {
    /// No other bank of this program has it.
    number: u64,
    backend: Box<dyn CounterBackend>,
    residents: Residents,
    /// Slots that count while the attached vCPU runs.
    running: SlotSet,
    /// Overflows told by the backend that their owner has not heard of.
    flagged: SlotSet,
    /// Those of host contexts that are present.
    flagged_hosts: SlotSet,
    /// Slots that have run since they were read.
    stale: SlotSet,
    /// Slots with an overflow to be told.
    armed: SlotSet,
    attached: Option<OwnerId>,
    /// What is owed to leases that somebody else has ended, by their stamps.
    final_readings: BTreeMap<u64, FinalReading>,
    stamps: u64,
    operations: u64,
    stats: SwitchStats,
    /// Slots to be started when the switch under way ends.
    batch: Option<SlotSet>,
    /// `operations` when it began.
    booked: u64,
}

/// The last count of a lease that is over.
#[derive(Clone, Copy, Debug)]
struct FinalReading {
    claimant: Claimant,
    /// None if it has not run since it was read.
    reading: Option<Reading>,
    /// Why it is no longer exact.
    loss: Option<LossReason>,
}

/// What vCPU switches cost a core, summed since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchStats {
    /// Times that a vCPU was attached or left for good.
    pub switches: u64,
    /// Operations on physical counters in these: each program, release, start,
    /// stop, read, arm, and each common start or stop of a set.
    pub operations: u64,
    /// Counters that were found in place.
    pub in_place: u64,
    /// Counters that had to be programmed.
    pub restored: u64,
    /// Counters of vCPUs switched out that had to make room.
    pub evicted: u64,
}

impl SlotBank {
    /// The counters of `backend`, all free.
    pub(crate) fn new(backend: Box<dyn CounterBackend>) -> Self {
        static BANKS: AtomicU64 = AtomicU64::new(0);
        let capacity = backend.capacity().min(usize::from(SlotSet::CAPACITY));
        SlotBank {
            number: BANKS.fetch_add(1, Ordering::Relaxed),
            backend,
            residents: Residents::new(capacity),
            running: SlotSet::EMPTY,
            flagged: SlotSet::EMPTY,
            flagged_hosts: SlotSet::EMPTY,
            stale: SlotSet::EMPTY,
            armed: SlotSet::EMPTY,
            attached: None,
            final_readings: BTreeMap::new(),
            stamps: 0,
            operations: 0,
            stats: SwitchStats::default(),
            batch: None,
            booked: 0,
        }
    }

    /// Tells this bank from all others.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The backend that counts.
    pub(crate) fn backend(&self) -> &dyn CounterBackend {
        self.backend.as_ref()
    }

    /// What switches have cost so far.
    pub(crate) fn stats(&self) -> SwitchStats {
        self.stats
    }

    /// Operations on physical counters so far, switches or not.
    pub(crate) fn operations(&self) -> u64 {
        self.operations
    }

    /// Every slot there is.
    pub(crate) fn slots(&self) -> SlotSet {
        self.residents.slots()
    }

    /// The slots that nobody holds.
    pub(crate) fn free(&self) -> SlotSet {
        self.slots().difference(self.residents.taken())
    }

    /// The slots on which no counter is of a vCPU that is away.
    pub(crate) fn unclaimed(&self) -> SlotSet {
        let others = self.residents.taken().iter().filter(|slot| {
            let resident = self.residents.get(*slot);
            resident.is_some_and(|resident| !self.is_present(&resident.claimant))
        });
        self.slots().difference(others.collect())
    }

    /// Whether a counter is the attached vCPU's or the core's own.
    fn is_present(&self, claimant: &Claimant) -> bool {
        claimant
            .vcpu()
            .is_none_or(|vcpu| self.attached == Some(vcpu))
    }

    /// The vCPU that counts.
    pub(crate) fn attached(&self) -> Option<OwnerId> {
        self.attached
    }

    /// Makes `owner` the vCPU that counts, and stops what counted for another one.
    pub(crate) fn attach(&mut self, owner: OwnerId) {
        self.pause();
        self.attached = Some(owner);
        self.backend.attach(owner);
    }

    /// Stops what is running.
    fn pause(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let running = std::mem::take(&mut self.running);
        self.operations += 1;
        self.backend.pause(running);
        self.flagged = self.flagged.union(self.backend.take_overflows());
    }

    /// A switch begins: what starts in it starts as one.
    pub(crate) fn begin_switch(&mut self) {
        self.stats.switches += 1;
        self.booked = self.operations;
        self.batch = Some(SlotSet::EMPTY);
    }

    /// The switch ends.
    pub(crate) fn end_switch(&mut self) {
        let batch = self.batch.take().unwrap_or(SlotSet::EMPTY);
        let stopped = batch.difference(self.running);
        if !stopped.is_empty() {
            self.running = self.running.union(stopped);
            self.operations += 1;
            self.backend.resume(stopped);
        }
        self.stats.operations += self.operations - self.booked;
    }

    #[inline]
    pub(crate) fn observe(&mut self, progress: &Progress) {
        self.backend.observe(progress);
        if !matches!(progress, Progress::Entered { .. }) {
            self.stale = self.stale.union(self.running);
        }
    }

    /// Overflows of the attached guest's counters, each told once.
    #[inline]
    pub(crate) fn take_overflows(&mut self) -> SlotSet {
        let told = self.backend.take_overflows();
        if told.is_empty() && self.flagged.is_empty() {
            return SlotSet::EMPTY;
        }
        self.flagged = self.flagged.union(told);
        let (mut guests, mut hosts) = (SlotSet::EMPTY, SlotSet::EMPTY);
        for slot in self.flagged.iter() {
            match self.residents.get(slot).map(|resident| resident.claimant) {
                Some(Claimant::Guest { vcpu, .. }) if self.attached == Some(vcpu) => {
                    guests.insert(slot);
                }
                Some(Claimant::Context { vcpu, .. }) if vcpu.is_none() || self.attached == vcpu => {
                    hosts.insert(slot);
                }
                // Its vCPU hears of it when it is back.
                Some(_) | None => {}
            }
        }
        self.flagged = self.flagged.difference(guests).difference(hosts);
        self.flagged_hosts = self.flagged_hosts.union(hosts);
        guests
    }

    /// Overflows of host contexts' counters, as of the last
    /// [`SlotBank::take_overflows`].
    pub(crate) fn take_host_overflows(&mut self) -> SlotSet {
        std::mem::take(&mut self.flagged_hosts)
    }

    #[inline]
    pub(crate) fn deadline(&self) -> Option<Tsc> {
        self.backend.deadline()
    }

    /// Whether anything counts while the attached vCPU runs.
    pub(crate) fn is_counting(&self) -> bool {
        !self.running.is_empty()
    }

    /// Forgets a vCPU that leaves the core: its slots were released.
    pub(crate) fn forget(&mut self, owner: OwnerId) {
        self.final_readings
            .retain(|_, reading| reading.claimant.vcpu() != Some(owner));
        if self.attached == Some(owner) {
            self.pause();
            self.attached = None;
        }
    }

    /// Who holds which slot, by ascending slot.
    pub(crate) fn holders(&self) -> Vec<HolderReport> {
        let report = |(slot, resident): (SlotIndex, &Resident)| HolderReport {
            slot,
            holder: resident.claimant,
            request: resident.request,
            source: self.backend.source(slot),
            counting: self.running.contains(slot),
        };
        self.residents.iter().map(report).collect()
    }
}

/// What is done with a lease.
impl SlotBank {
    /// Its vCPU is back, and wants `now` counted.
    fn take_back(&mut self, lease: &mut SlotLease, now: Option<CountRequest>) -> Return {
        let Some(resident) = self.residents.stamped(lease.slot(), lease.stamp()) else {
            return Return::Lost;
        };
        // Its control may have been written while it was away.
        if !now.is_some_and(|now| now.counts_like(lease.request())) {
            return Return::Superseded;
        }
        resident.used = self.stats.switches;
        self.stats.in_place += 1;
        if lease.is_running() {
            self.start(lease);
        } else {
            self.stop(lease);
        }
        Return::InPlace
    }

    #[inline]
    fn settle(&mut self, lease: &mut SlotLease) -> Option<Settled> {
        if !lease.is_running() {
            return None;
        }
        let slot = lease.slot();
        let resident = self.residents.stamped(slot, lease.stamp())?;
        self.operations += 1;
        self.stale.remove(slot);
        let settled = lease.absorb(self.backend.read(slot));
        resident.seen = matches!(settled, Settled::Counted(..)).then_some(lease.settled());
        Some(settled)
    }

    #[inline]
    fn start(&mut self, lease: &mut SlotLease) {
        let slot = lease.slot();
        lease.set_running(true);
        if self.running.contains(slot) {
            return;
        }
        if let Some(batch) = &mut self.batch {
            batch.insert(slot);
            return;
        }
        self.running.insert(slot);
        self.operations += 1;
        self.backend.start(slot);
    }

    /// Stops the slot of a lease that stands still.
    #[inline]
    fn stop(&mut self, lease: &SlotLease) {
        if !self.holds(lease) {
            return;
        }
        let slot = lease.slot();
        if let Some(batch) = &mut self.batch {
            batch.remove(slot);
        }
        if self.running.contains(slot) {
            self.running.remove(slot);
            self.operations += 1;
            self.backend.stop(slot);
        }
    }

    #[inline]
    fn arm(&mut self, lease: &mut SlotLease, until: Option<NonZeroU64>) {
        if self.note_armed(lease, until) {
            self.backend.arm(lease.slot(), until);
        }
    }

    /// Asks for its overflow as [`SlotLease::arm`] does; this one may wait for others.
    #[inline]
    pub(crate) fn arm_about(&mut self, lease: &mut SlotLease, until: Option<NonZeroU64>) {
        if self.note_armed(lease, until) {
            self.backend.arm_about(lease.slot(), until);
        }
    }

    /// Whether the backend is to be told.
    #[inline]
    fn note_armed(&mut self, lease: &mut SlotLease, until: Option<NonZeroU64>) -> bool {
        let slot = lease.slot();
        let arming = lease.note_armed(until);
        if arming == Arming::AsBefore {
            return false;
        }
        self.flagged.remove(slot);
        self.flagged_hosts.remove(slot);
        match arming {
            Arming::Off if self.armed.contains(slot) => self.armed.remove(slot),
            Arming::Armed => self.armed.insert(slot),
            // What is not armed need not be disarmed.
            Arming::Off | Arming::AsBefore => return false,
        }
        self.operations += 1;
        true
    }

    #[inline]
    fn end(&mut self, mut lease: SlotLease) -> (Option<Settled>, Option<LossReason>) {
        let last = self.final_reading(&lease);
        self.release(&lease);
        match last {
            Some(last) => (last.reading.map(|reading| lease.absorb(reading)), last.loss),
            None => (None, None),
        }
    }
}

/// Coming, staying, making room.
impl SlotBank {
    /// Whether the counter is still where it was.
    pub(crate) fn holds(&self, lease: &SlotLease) -> bool {
        self.residents.has(lease.slot(), lease.stamp())
    }

    /// What a lease has come to that is over or about to be.
    fn final_reading(&mut self, lease: &SlotLease) -> Option<FinalReading> {
        match self.residents.stamped(lease.slot(), lease.stamp()) {
            Some(resident) => {
                let claimant = resident.claimant;
                Some(self.reading_of(claimant, lease.slot()))
            }
            // Somebody else has ended it.
            None => self.final_readings.remove(&lease.stamp()),
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
        if let Some(free) = possible.difference(self.residents.taken()).iter().next() {
            return Some(SlotSet::of(free));
        }
        possible
            .iter()
            .filter_map(|slot| Some((self.residents.get(slot)?, slot)))
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
        let inherited = if slots.intersection(self.residents.taken()).is_empty() {
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
        self.residents.move_in(resident);
        Ok(SlotLease::new(slot, self.stamps, request, settled))
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
        if let Some(resident) = self.residents.get(slot).copied()
            && resident.slots == slots
            && self.serves(&resident, slot, request)
            && let Some(count) = self.evict(slot)
        {
            return Some(count);
        }
        for other in slots.iter() {
            let Some(resident) = self.residents.get(other).copied() else {
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
        let resident = self.residents.get(slot).copied()?;
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
        self.residents.move_out(resident.slots);
        seen
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
        let slots = self.residents.stamped(lease.slot(), lease.stamp());
        match slots.map(|resident| resident.slots) {
            Some(slots) => self.vacate(slots),
            None => drop(self.final_readings.remove(&lease.stamp())),
        }
    }

    /// Frees the slots of one counter; it is addressed by the first.
    fn vacate(&mut self, slots: SlotSet) {
        if let Some(at) = slots.iter().next() {
            self.operations += 1;
            self.backend.release(at);
            self.drop_marks(at);
        }
        self.residents.move_out(slots);
    }

    /// Whether the slot is to be given up before another vCPU is attached.
    pub(crate) fn is_private(&self, lease: &SlotLease) -> bool {
        !self.backend.is_shared(lease.slot())
    }

    /// The counter on a slot stays, and counts for somebody else of the same
    /// context.
    pub(crate) fn rename(&mut self, lease: &SlotLease, claimant: Claimant) {
        self.residents.rename(lease.stamp(), claimant);
    }
}
