//! Onto a core and off it.

use arbiter::{CounterId, CounterSet};
use pmu_model::SlotSet;

use super::{Here, VcpuPmu};
use crate::core_pmu::{CorePmu, Last};

impl VcpuPmu {
    /// Switches the vCPU in: its counters count on `core` from now on. Those
    /// that are still in place are started, all as one; the others are given a
    /// place. Counters of other vCPUs are stopped, and stay until their place
    /// is needed.
    pub fn attach(&mut self, core: &mut CorePmu) {
        core.begin_switch();
        core.attach(self.owner);
        self.attached = true;
        self.note_hosts(Some(core));
        if core.hosting().is_enabled() {
            self.introduce(core);
        }
        let here = &mut self.here(Some(core));
        let (mut before, mut refused) = (CounterSet::EMPTY, CounterSet::EMPTY);
        for counter in self.active.iter() {
            self.return_to_place(here, counter);
            let logical = &self.counters[super::index_of(counter)];
            match (logical.times.is_enabled(), logical.unavailable) {
                (false, _) if logical.placed.is_none() => self.active.remove(counter),
                (true, None) if !logical.running => drop(before.insert(counter)),
                (true, Some(_)) if !logical.running => drop(refused.insert(counter)),
                _ => {}
            }
        }
        if self.hosting || self.orphan.is_some() {
            self.return_hosts(here);
        }
        // Those that counted before come first, so that they go on.
        for counter in before.iter().chain(refused.iter()) {
            // What was brought up before may have placed this one as well.
            if !self.counters[super::index_of(counter)].running {
                self.bring_up(here, counter);
            }
        }
        if self.hosting {
            self.give_places(here);
        }
        if let Some(core) = here {
            core.end_switch();
            let overflowed = core.take_overflows();
            self.settle_slots(here, overflowed);
            self.freeze_if_due(here);
        }
        self.refresh_needs(here.as_deref());
    }

    /// Switches the vCPU out. Its counters stay on the core, and are stopped
    /// when another vCPU is attached to it. Until then counts that the guest
    /// made last may not be settled yet.
    pub fn park(&mut self, core: &mut CorePmu) {
        if !self.attached {
            return;
        }
        let overflowed = core.take_overflows();
        let here = &mut Some(core);
        self.settle_slots(here, overflowed);
        self.freeze_if_due(here);
        if let (true, Some(core)) = (self.hosting, here) {
            self.settle_hosts(core);
        }
        self.attached = false;
        self.hosting = false;
        self.refresh_needs(None);
    }

    /// Takes every count of the vCPU off `core`, on which it was parked, so
    /// that it can go on elsewhere.
    pub fn leave(&mut self, core: &mut CorePmu) {
        core.begin_switch();
        for counter in self.active.iter() {
            let Some((stay, _)) = self.counters[super::index_of(counter)].placed else {
                continue;
            };
            let last = core.last_of(stay);
            self.leave_place(&mut None, counter, last);
            core.release(stay);
        }
        if self.host.is_some() || self.orphan.is_some() {
            self.take_host_off(core);
        }
        core.forget(self.owner);
        core.end_switch();
        self.freeze_if_due(&mut None);
        self.refresh_needs(None);
    }

    /// Switches the vCPU out for good, with every count.
    pub fn depart(&mut self, core: &mut CorePmu) {
        self.park(core);
        self.leave(core);
    }

    /// A counter that had a place looks whether it still has.
    fn return_to_place(&mut self, here: &mut Here<'_>, counter: CounterId) {
        let logical = &self.counters[super::index_of(counter)];
        let (Some((stay, placed)), Some(core)) = (logical.placed, &mut *here) else {
            return;
        };
        if core.holds(stay) {
            // Its control may have been written while it was away.
            if logical.request.is_some_and(|now| now.counts_like(&placed)) {
                core.found_in_place(stay);
                match logical.running {
                    true => core.start(stay.slot),
                    false => core.stop(stay.slot),
                }
            } else {
                core.release(stay);
                self.leave_place(here, counter, None);
            }
            return;
        }
        let last = core.last_of(stay);
        self.leave_place(here, counter, last);
    }

    /// Takes in the last count of a stay.
    pub(super) fn leave_place(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        last: Option<Last>,
    ) {
        let ran = self.ran;
        // An overflow in the last count is not to arm the place for the next
        // one: it may be another vCPU's by now.
        self.counters[super::index_of(counter)].running = false;
        // What was cleared while it was away is nobody's count any more.
        let last = last.filter(|_| self.counters[super::index_of(counter)].request.is_some());
        if let Some(reading) = last.and_then(|last| last.reading) {
            self.absorb(here, counter, reading);
        }
        let logical = &mut self.counters[super::index_of(counter)];
        // The first reason is the one that counts.
        logical.loss = logical.loss.or(last.and_then(|last| last.loss));
        logical.placed = None;
        logical.settled = 0;
        logical.times.stop(ran);
    }

    /// Settles the counters on `slots`.
    pub(super) fn settle_slots(&mut self, here: &mut Here<'_>, slots: SlotSet) {
        if slots.is_empty() {
            return;
        }
        for counter in self.active.iter() {
            let placed = self.counters[super::index_of(counter)].placed;
            if placed.is_some_and(|(stay, _)| slots.contains(stay.slot)) {
                self.settle(here, counter);
            }
        }
    }
}
