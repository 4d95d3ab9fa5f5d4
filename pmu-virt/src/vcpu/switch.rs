//! Onto a core and off it.

use super::VcpuPmu;
use crate::core_pmu::{CorePmu, Last};
use crate::ids::SlotSet;
use arbiter::{CounterId, CounterSet};

impl VcpuPmu {
    /// Switches the vCPU in: its counters count on `core` from now on. Those
    /// that are still in place are started, all as one; the others are given a
    /// place. Counters of other vCPUs are stopped, and stay until their place
    /// is needed.
    pub fn attach(&mut self, mut core: Box<CorePmu>) {
        core.begin_switch();
        core.attach(self.owner);
        self.core = Some(core);
        let counters = self.model.counters();
        for counter in counters.clone() {
            self.return_to_place(counter);
        }
        // Those that counted before come first, so that they go on.
        let is_refused = |counter: &CounterId| {
            let logical = &self.counters[super::index_of(*counter)];
            logical.unavailable.is_some()
        };
        let refused: CounterSet = counters.clone().filter(is_refused).collect();
        let before = counters
            .clone()
            .filter(|counter| !refused.contains(*counter));
        for counter in before.chain(refused.iter()) {
            if self.is_wanted(counter) && !self.counters[super::index_of(counter)].running {
                self.bring_up(counter);
            }
        }
        if let Some(core) = &mut self.core {
            core.end_switch();
            let overflowed = core.take_overflows();
            self.settle_slots(overflowed);
        }
        self.refresh_needs();
    }

    /// Switches the vCPU out. Its counters stay on the core, and are stopped
    /// when another vCPU is attached to it. Until then counts that the guest
    /// made last may not be settled yet.
    ///
    /// `None` if it was on no core.
    pub fn park(&mut self) -> Option<Box<CorePmu>> {
        let overflowed = self.core.as_mut()?.take_overflows();
        self.settle_slots(overflowed);
        let core = self.core.take();
        self.refresh_needs();
        core
    }

    /// Takes every count of the vCPU off `core`, on which it was parked, so
    /// that it can go on elsewhere.
    pub fn leave(&mut self, core: &mut CorePmu) {
        core.begin_switch();
        for counter in self.model.counters() {
            let Some((stay, _)) = self.counters[super::index_of(counter)].placed else {
                continue;
            };
            let last = core.last_of(stay);
            self.leave_place(counter, last);
            core.release(stay);
        }
        core.forget(self.owner);
        core.end_switch();
        self.refresh_needs();
    }

    /// Switches the vCPU out for good, with every count.
    ///
    /// `None` if it was on no core.
    pub fn depart(&mut self) -> Option<Box<CorePmu>> {
        let mut core = self.park()?;
        self.leave(&mut core);
        Some(core)
    }

    /// A counter that had a place looks whether it still has.
    fn return_to_place(&mut self, counter: CounterId) {
        let logical = &self.counters[super::index_of(counter)];
        let (Some((stay, _)), Some(core)) = (logical.placed, &mut self.core) else {
            return;
        };
        if core.holds(stay) {
            core.found_in_place(stay);
            if logical.running {
                core.start(stay.slot);
            }
            return;
        }
        let last = core.last_of(stay);
        self.leave_place(counter, last);
    }

    /// Takes in the last count of a stay.
    pub(super) fn leave_place(&mut self, counter: CounterId, last: Option<Last>) {
        let ran = self.ran;
        // An overflow in the last count is not to arm the place for the next
        // one: it may be another vCPU's by now.
        self.counters[super::index_of(counter)].running = false;
        if let Some(reading) = last.and_then(|last| last.reading) {
            self.absorb(counter, reading);
        }
        let logical = &mut self.counters[super::index_of(counter)];
        // The first reason is the one that counts.
        logical.loss = logical.loss.or(last.and_then(|last| last.loss));
        logical.placed = None;
        logical.settled = 0;
        logical.times.stop(ran);
    }

    /// Settles the counters on `slots`.
    pub(super) fn settle_slots(&mut self, slots: SlotSet) {
        if slots.is_empty() {
            return;
        }
        for counter in self.model.counters() {
            let placed = self.counters[super::index_of(counter)].placed;
            if placed.is_some_and(|(stay, _)| slots.contains(stay.slot)) {
                self.settle(counter);
            }
        }
    }
}
