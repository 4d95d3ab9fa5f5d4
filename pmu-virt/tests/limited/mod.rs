//! A backend with fewer slots than it could have, as hardware has.

use pmu_virt::{
    ClockBackend, Constraint, CountPlan, CountRequest, CounterBackend, LossReason, OwnerId,
    Progress, Provenance, Reading, SlotIndex, SlotSet, Tsc, Unavailable,
};
use std::num::NonZeroU64;

/// Another backend, cut to its first slots.
#[derive(Debug)]
pub(crate) struct Limited {
    inner: Box<dyn CounterBackend>,
    slots: usize,
    /// Tells overflows only once its counters are stopped, as a signal does
    /// that comes late.
    late: bool,
    held: SlotSet,
    /// Its slots may go on for other vCPUs.
    shared: bool,
    /// No slot counts all that it should.
    lossy: bool,
}

impl Limited {
    /// A clock with this many slots.
    pub(crate) fn clock(slots: usize) -> Self {
        Limited::of(Box::new(ClockBackend::new()), slots)
    }

    /// The first slots of `inner`.
    pub(crate) fn of(inner: Box<dyn CounterBackend>, slots: usize) -> Self {
        Limited {
            inner,
            slots,
            late: false,
            held: SlotSet::EMPTY,
            shared: false,
            lossy: false,
        }
    }

    /// The same, as hardware whose counters know nothing of vCPUs.
    pub(crate) fn shared(self) -> Self {
        Limited {
            shared: true,
            ..self
        }
    }

    /// The same, with a loss to report of each slot.
    pub(crate) fn lossy(self) -> Self {
        Limited {
            lossy: true,
            ..self
        }
    }

    /// A clock that tells overflows late.
    pub(crate) fn late_clock(slots: usize) -> Self {
        Limited {
            late: true,
            ..Limited::clock(slots)
        }
    }
}

impl CounterBackend for Limited {
    fn name(&self) -> &'static str {
        "limited"
    }
    fn capacity(&self) -> usize {
        self.slots
    }
    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        Ok(CountPlan {
            constraint: Constraint::any(self.capacity()),
            ..self.inner.plan(request)?
        })
    }
    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable> {
        assert!(usize::from(slot.0) < self.slots, "slot {}", slot.0);
        self.inner.program(slot, request)
    }
    fn release(&mut self, slot: SlotIndex) {
        self.inner.release(slot);
    }
    fn start(&mut self, slot: SlotIndex) {
        self.inner.start(slot);
    }
    fn stop(&mut self, slot: SlotIndex) {
        self.inner.stop(slot);
    }
    fn resume(&mut self, slots: SlotSet) {
        self.inner.resume(slots);
    }
    fn pause(&mut self, slots: SlotSet) {
        self.inner.pause(slots);
        self.held = self.inner.take_overflows();
    }
    fn attach(&mut self, owner: OwnerId) {
        self.inner.attach(owner);
    }
    fn read(&self, slot: SlotIndex) -> Reading {
        self.inner.read(slot)
    }
    fn arm(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        self.inner.arm(slot, after);
    }
    fn observe(&mut self, progress: &Progress) {
        self.inner.observe(progress);
    }
    fn take_overflows(&mut self) -> SlotSet {
        if self.late {
            std::mem::take(&mut self.held)
        } else {
            self.inner.take_overflows()
        }
    }
    fn deadline(&self) -> Option<Tsc> {
        self.inner.deadline()
    }
    fn is_shared(&self, _: SlotIndex) -> bool {
        self.shared
    }
    fn needs_ring(&self) -> bool {
        self.inner.needs_ring()
    }
    fn loss(&self, slot: SlotIndex) -> Option<LossReason> {
        let loss = self.inner.loss(slot);
        loss.or(self.lossy.then_some(LossReason::Taken))
    }
}
