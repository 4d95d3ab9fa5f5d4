//! Counters that fail now and then, and that tell how often they are asked.

use pmu_virt::{
    CountPlan, CountRequest, CounterBackend, OwnerId, Progress, Provenance, Reading, SlotIndex,
    SlotSet, Tsc, Unavailable, UnavailableReason,
};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// What a test sets and sees of a [`Shaky`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Hand {
    /// While it is set, no slot has a count.
    pub(crate) fails: Arc<AtomicBool>,
    /// Times that the needs of a request were asked for.
    pub(crate) asked: Arc<AtomicUsize>,
}

/// Counters in somebody's hand.
#[derive(Debug)]
pub(crate) struct Shaky {
    counters: Box<dyn CounterBackend>,
    hand: Hand,
}

impl Shaky {
    pub(crate) fn new(counters: Box<dyn CounterBackend>, hand: Hand) -> Self {
        Shaky { counters, hand }
    }
}

impl CounterBackend for Shaky {
    fn name(&self) -> &'static str {
        "shaky"
    }

    fn capacity(&self) -> usize {
        self.counters.capacity()
    }

    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        self.hand.asked.fetch_add(1, Ordering::Relaxed);
        self.counters.plan(request)
    }

    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable> {
        self.counters.program(slot, request)
    }

    fn release(&mut self, slot: SlotIndex) {
        self.counters.release(slot);
    }

    fn start(&mut self, slot: SlotIndex) {
        self.counters.start(slot);
    }

    fn stop(&mut self, slot: SlotIndex) {
        self.counters.stop(slot);
    }

    fn attach(&mut self, owner: OwnerId) {
        self.counters.attach(owner);
    }

    fn read(&self, slot: SlotIndex) -> Reading {
        if self.hand.fails.load(Ordering::Relaxed) {
            return Reading::Unavailable(UnavailableReason::Busy { backend: "shaky" });
        }
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
