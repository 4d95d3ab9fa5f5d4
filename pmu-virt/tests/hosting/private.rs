//! Counters that belong to the vCPU for which they were programmed.

use pmu_virt::{
    CountPlan, CountRequest, CounterBackend, OwnerId, Progress, Provenance, Reading, SimBackend,
    SlotIndex, SlotSet, Tsc, Unavailable,
};
use std::collections::BTreeMap;
use std::num::NonZeroU64;

/// Simulated counters of which each counts for one vCPU, as a thread's events in
/// a kernel do. It is an error to start one for another.
#[derive(Debug)]
pub(crate) struct Private {
    counters: SimBackend,
    here: OwnerId,
    owners: BTreeMap<SlotIndex, OwnerId>,
    running: SlotSet,
}

impl Private {
    pub(crate) fn new(counters: SimBackend) -> Self {
        Private {
            counters,
            here: OwnerId::default(),
            owners: BTreeMap::new(),
            running: SlotSet::EMPTY,
        }
    }
}

impl CounterBackend for Private {
    fn name(&self) -> &'static str {
        "private"
    }

    fn capacity(&self) -> usize {
        self.counters.capacity()
    }

    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        self.counters.plan(request)
    }

    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable> {
        self.owners.insert(slot, self.here);
        self.running.remove(slot);
        self.counters.program(slot, request)
    }

    fn release(&mut self, slot: SlotIndex) {
        self.owners.remove(&slot);
        self.running.remove(slot);
        self.counters.release(slot);
    }

    fn start(&mut self, slot: SlotIndex) {
        assert_eq!(self.owners.get(&slot), Some(&self.here), "{slot:?}");
        self.running.insert(slot);
        self.counters.start(slot);
    }

    fn stop(&mut self, slot: SlotIndex) {
        self.running.remove(slot);
        self.counters.stop(slot);
    }

    fn attach(&mut self, owner: OwnerId) {
        assert_eq!(
            self.running,
            SlotSet::EMPTY,
            "these belong to {}",
            self.here
        );
        self.here = owner;
        self.counters.attach(owner);
    }

    fn read(&self, slot: SlotIndex) -> Reading {
        self.counters.read(slot)
    }

    fn arm(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        self.counters.arm(slot, after);
    }

    fn observe(&mut self, progress: &Progress) {
        self.counters.observe(progress);
    }

    fn take_overflows(&mut self) -> SlotSet {
        self.counters.take_overflows()
    }

    fn deadline(&self) -> Option<Tsc> {
        self.counters.deadline()
    }

    fn needs_ring(&self) -> bool {
        self.counters.needs_ring()
    }
}
