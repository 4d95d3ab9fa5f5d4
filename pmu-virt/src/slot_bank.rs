//! One core's physical counters, and whose counts are on them.
//!
//! A core runs one vCPU at a time. The counters of a vCPU that is switched out
//! stay where they are, stopped, until another vCPU needs the place: so a vCPU
//! that comes back finds them, and a switch between vCPUs that do not count
//! touches nothing. Beside the guest of the vCPU, host contexts count on the
//! same counters: one that comes and goes with the vCPU, and the core's own.

mod claimant;
mod lease;
mod places;

pub use claimant::{Claimant, HolderReport};
pub(crate) use lease::{FinalReading, Return, Settled, SlotLease};

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use pmu_model::{CountRequest, OwnerId, Progress, SlotSet, Tsc};

use crate::backend::CounterBackend;

/// The physical counters of one core.
#[derive(Debug)]
pub(crate) struct SlotBank {
    /// No other bank of this program has it.
    number: u64,
    backend: Box<dyn CounterBackend>,
    residents: Vec<Option<Resident>>,
    /// Slots with a resident; both of a pair.
    taken: SlotSet,
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

/// What a slot counts, and for whom.
#[derive(Clone, Copy, Debug)]
struct Resident {
    claimant: Claimant,
    request: CountRequest,
    /// The slot's count when it was last read; none if it could not be.
    seen: Option<u64>,
    /// Of its lease; no other lease on this core has it.
    stamp: u64,
    /// Switch after which its owner was attached last.
    used: u64,
    slots: SlotSet,
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
            residents: vec![None; capacity],
            taken: SlotSet::EMPTY,
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
        SlotSet::below(self.residents.len())
    }

    /// The slots that nobody holds.
    pub(crate) fn free(&self) -> SlotSet {
        self.slots().difference(self.taken)
    }

    /// The slots on which no counter is of a vCPU that is away.
    pub(crate) fn unclaimed(&self) -> SlotSet {
        let others = self.taken.iter().filter(|slot| {
            self.occupant(*slot)
                .is_some_and(|resident| !self.is_present(&resident.claimant))
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
            match self.occupant(slot).map(|resident| resident.claimant) {
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
}
