//! One core's physical counters, and whose counts are on them.
//!
//! A core runs one vCPU at a time. The counters of a vCPU that is switched out
//! stay where they are, stopped, until another vCPU needs the place: so a vCPU
//! that comes back finds them, and a switch between vCPUs that do not count
//! touches nothing. Beside the guest of the vCPU, host contexts count on the
//! same counters: one that comes and goes with the vCPU, and the core's own.

mod claimant;
mod lease;
mod marks;
mod residents;

pub use claimant::{Claimant, HolderReport};
pub(crate) use lease::{Arming, Return, Settled, SlotLease};

use std::sync::atomic::{AtomicU64, Ordering};

use pmu_model::{
    Constraint, CountRequest, LossReason, OwnerId, Progress, Reading, SlotIndex, SlotSet, Tsc,
    Unavailable, UnavailableReason,
};

use crate::backend::CounterBackend;
use marks::{Hearer, Marks};
use residents::{FinalReading, Resident, Residents};

/// The physical counters of one core.
///
/// It lets the backend, the slots' residents and their marks meet. How far a count was taken
/// in is the lease's: whoever holds it reads here and takes in there.
#[derive(Debug)]
pub(crate) struct SlotBank {
    /// No other bank of this program has it.
    number: u64,
    backend: Box<dyn CounterBackend>,
    residents: Residents,
    marks: Marks,
    attached: Option<OwnerId>,
    stamps: u64,
    operations: u64,
    stats: SwitchStats,
    /// `operations` when the switch under way began.
    booked: u64,
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
            marks: Marks::default(),
            attached: None,
            stamps: 0,
            operations: 0,
            stats: SwitchStats::default(),
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
        self.slots()
            .difference(self.residents.of_absent(self.attached))
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
        let running = self.marks.stop_all();
        if running.is_empty() {
            return;
        }
        self.operations += 1;
        self.backend.pause(running);
        self.marks.flag(self.backend.take_overflows());
    }

    /// A switch begins: what starts in it starts as one.
    pub(crate) fn begin_switch(&mut self) {
        self.stats.switches += 1;
        self.booked = self.operations;
        self.marks.begin_batch();
    }

    /// The switch ends.
    pub(crate) fn end_switch(&mut self) {
        let batch = self.marks.end_batch();
        if !batch.is_empty() {
            self.operations += 1;
            self.backend.resume(batch);
        }
        self.stats.operations += self.operations - self.booked;
    }

    #[inline]
    pub(crate) fn observe(&mut self, progress: &Progress) {
        self.backend.observe(progress);
        if !matches!(progress, Progress::Entered { .. }) {
            self.marks.have_run();
        }
    }

    /// Overflows of the attached guest's counters, each told once.
    #[inline]
    pub(crate) fn take_overflows(&mut self) -> SlotSet {
        let told = self.backend.take_overflows();
        if told.is_empty() && !self.marks.is_any_flagged() {
            return SlotSet::EMPTY;
        }
        self.marks.flag(told);
        let (residents, attached) = (&self.residents, self.attached);
        self.marks.tell_guests(|slot| {
            let claimant = residents.get(slot).map(|resident| resident.claimant);
            match claimant.filter(|claimant| claimant.is_present(attached)) {
                Some(Claimant::Guest { .. }) => Hearer::Guest,
                Some(Claimant::Context { .. }) => Hearer::Host,
                None => Hearer::NobodyYet,
            }
        })
    }

    #[inline]
    pub(crate) fn deadline(&self) -> Option<Tsc> {
        self.backend.deadline()
    }

    #[inline]
    pub(crate) fn horizon(&self) -> Option<u64> {
        self.backend.horizon()
    }

    /// Whether anything counts while the attached vCPU runs.
    pub(crate) fn is_counting(&self) -> bool {
        self.marks.is_any_running()
    }

    /// Forgets a vCPU that leaves the core: its slots were released.
    pub(crate) fn forget(&mut self, owner: OwnerId) {
        self.residents.forget(owner);
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
            counting: self.marks.runs_now(slot),
        };
        self.residents.iter().map(report).collect()
    }
}

/// What is done to the slot of a lease.
impl SlotBank {
    /// Its vCPU is back, and wants `now` counted. In a place that is still right, it counts
    /// on or stands still, as it did.
    pub(crate) fn take_back(&mut self, lease: &SlotLease, now: Option<CountRequest>) -> Return {
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

    /// What the slot has counted; nothing if it does not run, or is somebody else's by now.
    #[inline]
    pub(crate) fn read(&mut self, lease: &SlotLease) -> Option<Reading> {
        if !lease.is_running() {
            return None;
        }
        let slot = lease.slot();
        let resident = self.residents.stamped(slot, lease.stamp())?;
        self.operations += 1;
        self.marks.read(slot);
        let reading = self.backend.read(slot);
        resident.seen = count_of(reading);
        Some(reading)
    }

    /// The slot counts while the vCPU runs; in a switch, from its end on.
    #[inline]
    pub(crate) fn start(&mut self, lease: &SlotLease) {
        if self.marks.start(lease.slot()) {
            self.operations += 1;
            self.backend.start(lease.slot());
        }
    }

    /// The slot stands still.
    #[inline]
    pub(crate) fn stop(&mut self, lease: &SlotLease) {
        if self.holds(lease) && self.marks.stop(lease.slot()) {
            self.operations += 1;
            self.backend.stop(lease.slot());
        }
    }

    /// Asks for the overflow that the lease awaits.
    #[inline]
    pub(crate) fn arm(&mut self, lease: &SlotLease, arming: Arming) {
        let slot = lease.slot();
        match arming {
            Arming::AsBefore => return,
            // What is not armed need not be disarmed.
            Arming::Off if !self.marks.disarm(slot) => return,
            Arming::Off => self.backend.arm(slot, None),
            Arming::After(after) => {
                self.marks.arm(slot);
                self.backend.arm(slot, Some(after));
            }
            #[cfg(feature = "contexts")]
            Arming::About(after) => {
                self.marks.arm(slot);
                self.backend.arm_about(slot, Some(after));
            }
        }
        self.operations += 1;
    }

    /// Gives the slot back, and yields the last count and why it is no longer exact.
    #[inline]
    pub(crate) fn end(&mut self, lease: &SlotLease) -> (Option<Reading>, Option<LossReason>) {
        let last = match self.residents.stamped(lease.slot(), lease.stamp()) {
            Some(resident) => {
                let claimant = resident.claimant;
                Some(self.last_reading(claimant, lease.slot()))
            }
            // Somebody else has ended it.
            None => self.residents.pay(lease.stamp()),
        };
        self.release(lease);
        last.map_or((None, None), |last| (last.reading, last.loss))
    }
}

/// Coming, staying, making room.
impl SlotBank {
    /// Whether the counter is still where it was.
    pub(crate) fn holds(&self, lease: &SlotLease) -> bool {
        self.residents.has(lease.slot(), lease.stamp())
    }

    fn last_reading(&mut self, claimant: Claimant, slot: SlotIndex) -> FinalReading {
        let has_run = self.marks.read(slot);
        self.operations += u64::from(has_run);
        FinalReading {
            claimant,
            reading: has_run.then(|| self.backend.read(slot)),
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
        !resident.claimant.is_present(self.attached)
            || !resident.claimant.is_guest() && !self.is_running(slot)
    }

    /// Whether it counts while the attached vCPU runs.
    pub(crate) fn is_running(&self, slot: SlotIndex) -> bool {
        self.marks.runs(slot)
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
        self.marks.forget(slot);
        None
    }

    /// Ends the lease of whoever is on `slot`, and keeps for it what it has come
    /// to. Yields the slot's count, if there is one.
    fn evict(&mut self, slot: SlotIndex) -> Option<u64> {
        let resident = self.residents.get(slot).copied()?;
        let at = resident.slots.iter().next()?;
        let last = self.last_reading(resident.claimant, at);
        let seen = last.reading.map_or(resident.seen, count_of);
        if last.reading.is_some() || last.loss.is_some() {
            self.residents.owe(resident.stamp, last);
        }
        log::trace!("{} makes room", resident.claimant);
        self.stats.evicted += 1;
        self.residents.move_out(resident.slots);
        seen
    }

    /// Frees the slot of a lease, or forgets what is owed to it; its count was
    /// taken before, or is nobody's.
    pub(crate) fn release(&mut self, lease: &SlotLease) {
        let slots = self.residents.stamped(lease.slot(), lease.stamp());
        match slots.map(|resident| resident.slots) {
            Some(slots) => self.vacate(slots),
            None => drop(self.residents.pay(lease.stamp())),
        }
    }

    /// Frees the slots of one counter; it is addressed by the first.
    fn vacate(&mut self, slots: SlotSet) {
        if let Some(at) = slots.iter().next() {
            self.operations += 1;
            self.backend.release(at);
            self.marks.forget(at);
        }
        self.residents.move_out(slots);
    }
}

/// For contexts of tools.
#[cfg(feature = "contexts")]
impl SlotBank {
    /// Overflows of host contexts' counters, as of the last
    /// [`SlotBank::take_overflows`].
    pub(crate) fn take_host_overflows(&mut self) -> SlotSet {
        self.marks.tell_hosts()
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

fn count_of(reading: Reading) -> Option<u64> {
    match reading {
        Reading::Counted { value, .. } => Some(value),
        Reading::Unavailable(_) => None,
    }
}
