//! One core's physical counters, and whose counts are on them.
//!
//! A core runs one vCPU at a time. The counters of a vCPU that is switched out
//! stay where they are, stopped, until another vCPU needs the place: so a vCPU
//! that comes back finds them, and a switch between vCPUs that do not count
//! touches nothing.
//!
//! Beside the guest of the vCPU, host contexts count on the same counters: one
//! that belongs to the vCPU and comes and goes with it, and one that belongs to
//! the core and counts whichever vCPU runs.

mod claims;
mod holder;
mod hosting;
mod stays;

pub(crate) use claims::GuestWish;
pub use holder::{Holder, HolderReport};
pub(crate) use hosting::{CoreHost, no_context};

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use pmu_model::{CountRequest, LossReason, OwnerId, Progress, Reading, SlotIndex, SlotSet};

use crate::backend::CounterBackend;

/// The physical counters of one core. Owned by the core's thread.
#[derive(Debug)]
pub struct CorePmu {
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
    /// By the stamp of the stay that was ended.
    debts: BTreeMap<u64, Debt>,
    stamps: u64,
    operations: u64,
    stats: SwitchStats,
    /// Slots to be started when the switch under way ends.
    batch: Option<SlotSet>,
    /// `operations` when it began.
    booked: u64,
    /// What host contexts need.
    host: CoreHost,
}

/// What a slot counts, and for whom.
#[derive(Clone, Copy, Debug)]
struct Resident {
    holder: Holder,
    request: CountRequest,
    /// The slot's count when it was last read; none if it could not be.
    seen: Option<u64>,
    /// Of this stay; no other stay on this core has it.
    stamp: u64,
    /// Switch after which its owner was attached last.
    used: u64,
    slots: SlotSet,
}

/// The last count of a counter that had to make room while its vCPU was away,
/// or its host context had stopped it.
#[derive(Clone, Copy, Debug)]
struct Debt {
    holder: Holder,
    last: Last,
}

/// What a counter takes along when it leaves a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Last {
    /// None if it has not run since it was read.
    pub(crate) reading: Option<Reading>,
    /// Why it is no longer exact.
    pub(crate) loss: Option<LossReason>,
}

/// A stay of a logical counter on a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stay {
    pub(crate) slot: SlotIndex,
    stamp: u64,
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

impl CorePmu {
    /// The counters of `backend`, all free.
    pub fn new(backend: Box<dyn CounterBackend>) -> Self {
        let capacity = backend.capacity().min(usize::from(SlotSet::CAPACITY));
        CorePmu {
            backend,
            residents: vec![None; capacity],
            taken: SlotSet::EMPTY,
            running: SlotSet::EMPTY,
            flagged: SlotSet::EMPTY,
            flagged_hosts: SlotSet::EMPTY,
            stale: SlotSet::EMPTY,
            armed: SlotSet::EMPTY,
            attached: None,
            debts: BTreeMap::new(),
            stamps: 0,
            operations: 0,
            stats: SwitchStats::default(),
            batch: None,
            booked: 0,
            host: CoreHost::default(),
        }
    }

    /// The backend that counts.
    pub fn backend(&self) -> &dyn CounterBackend {
        self.backend.as_ref()
    }

    /// What switches have cost so far.
    pub fn stats(&self) -> SwitchStats {
        self.stats
    }

    /// Operations on physical counters so far, switches or not.
    pub fn operations(&self) -> u64 {
        self.operations
    }

    /// Every slot there is.
    pub(crate) fn slots(&self) -> SlotSet {
        SlotSet::below(self.residents.len())
    }

    /// The slots on which no counter is of a vCPU that is away.
    pub(crate) fn unclaimed(&self) -> SlotSet {
        let others = self.taken.iter().filter(|slot| {
            self.occupant(*slot)
                .is_some_and(|resident| !self.is_present(&resident.holder))
        });
        self.slots().difference(others.collect())
    }

    /// Whether a counter is the attached vCPU's or the core's own.
    fn is_present(&self, holder: &Holder) -> bool {
        holder.vcpu().is_none_or(|vcpu| self.attached == Some(vcpu))
    }

    /// Makes `owner` the vCPU that counts. The counters of the one before are
    /// stopped only now: if it is the same one, it never left. Those of the
    /// core's context are stopped for the switch, and started by whoever attached.
    pub(crate) fn attach(&mut self, owner: OwnerId) {
        if self.attached == Some(owner) {
            return;
        }
        self.pause();
        if self.host.is_some() {
            self.leave_private_slots();
        }
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
        if let Some(batch) = self.batch.take() {
            self.resume(batch);
        }
        self.stats.operations += self.operations - self.booked;
    }

    /// Starts a set of slots of the attached vCPU as one.
    fn resume(&mut self, slots: SlotSet) {
        let stopped = slots.difference(self.running);
        if stopped.is_empty() {
            return;
        }
        self.running = self.running.union(stopped);
        self.operations += 1;
        self.backend.resume(stopped);
    }

    pub(crate) fn start(&mut self, slot: SlotIndex) {
        if let Some(batch) = &mut self.batch {
            batch.insert(slot);
            return;
        }
        self.running.insert(slot);
        self.operations += 1;
        self.backend.start(slot);
    }

    pub(crate) fn stop(&mut self, slot: SlotIndex) {
        if let Some(batch) = &mut self.batch {
            batch.remove(slot);
        }
        if !self.running.contains(slot) {
            return;
        }
        self.running.remove(slot);
        self.operations += 1;
        self.backend.stop(slot);
    }

    pub(crate) fn read(&mut self, slot: SlotIndex) -> Reading {
        self.operations += 1;
        self.stale.remove(slot);
        let reading = self.backend.read(slot);
        if let Some(Some(resident)) = self.residents.get_mut(usize::from(slot.0)) {
            resident.seen = match reading {
                Reading::Counted { value, .. } => Some(value),
                Reading::Unavailable(_) => None,
            };
        }
        reading
    }

    /// A slot without an armed overflow is not disarmed again.
    pub(crate) fn arm(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        self.flagged.remove(slot);
        self.flagged_hosts.remove(slot);
        match after {
            Some(_) => self.armed.insert(slot),
            None if self.armed.contains(slot) => self.armed.remove(slot),
            None => return,
        }
        self.operations += 1;
        self.backend.arm(slot, after);
    }

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
            match self.occupant(slot).map(|resident| resident.holder) {
                Some(holder) if !self.is_present(&holder) => {}
                Some(Holder::Guest { .. }) => guests.insert(slot),
                Some(Holder::Context { .. }) => hosts.insert(slot),
                None => {}
            }
        }
        self.flagged = self.flagged.difference(guests).difference(hosts);
        self.flagged_hosts = self.flagged_hosts.union(hosts);
        guests
    }

    /// The same of host contexts, as of the last [`CorePmu::take_overflows`].
    pub(crate) fn take_host_overflows(&mut self) -> SlotSet {
        std::mem::take(&mut self.flagged_hosts)
    }

    pub(crate) fn deadline(&self) -> Option<u64> {
        self.backend.deadline()
    }

    /// Whether anything counts while the attached vCPU runs.
    pub(crate) fn is_counting(&self) -> bool {
        !self.running.is_empty()
    }

    pub(crate) fn loss(&self, slot: SlotIndex) -> Option<LossReason> {
        self.backend.loss(slot)
    }

    /// Forgets a vCPU that leaves the core: its slots were released.
    pub(crate) fn forget(&mut self, owner: OwnerId) {
        self.debts
            .retain(|_, debt| debt.holder.vcpu() != Some(owner));
        if self.attached == Some(owner) {
            self.pause();
            self.attached = None;
        }
    }
}
