//! Logical counters on physical ones: binding, settling, overflow.

use super::{VcpuPmu, index_of};
use crate::backend::{Reading, UnavailableReason};
use crate::event::FixedFunction;
use crate::ids::{SlotIndex, SlotSet};
use crate::request::CountRequest;
use arbiter::CounterId;
use std::num::NonZeroU64;

impl VcpuPmu {
    /// What the control of `counter` asks for at present.
    #[inline]
    pub(super) fn request_of(&self, counter: CounterId) -> Option<CountRequest> {
        self.counters[index_of(counter)].request
    }

    /// Decodes the control of `counter`.
    fn decode_request(&self, counter: CounterId) -> Option<CountRequest> {
        match counter {
            CounterId::Programmable(n) => {
                let select = self.select.get(usize::from(n))?;
                Some(CountRequest::decode(self.model.events(), *select))
            }
            CounterId::Fixed(n) => Some(CountRequest::decode_fixed(
                FixedFunction::of(n)?,
                self.fixed_control,
            )),
        }
    }

    /// Settles every running counter.
    pub(super) fn settle_all(&mut self) {
        for counter in self.model.counters() {
            self.settle(counter);
        }
    }

    /// Settles the counters that are bound to `slots`.
    pub(super) fn settle_slots(&mut self, slots: SlotSet) {
        for counter in self.model.counters() {
            let bound = self.counters[index_of(counter)].bound;
            if bound.is_some_and(|(slot, _)| slots.contains(slot)) {
                self.settle(counter);
            }
        }
    }

    /// Adds what the backend has counted since the last settlement. A carry
    /// out of the counter's width is an overflow; the counter goes on.
    #[inline]
    pub(super) fn settle(&mut self, counter: CounterId) {
        let mask = self.model.counter_mask(counter);
        let logical = &mut self.counters[index_of(counter)];
        let (true, Some((slot, _))) = (logical.running, logical.bound) else {
            return;
        };
        let Reading::Counted { value, .. } = self.backend.read(slot) else {
            return;
        };
        let events = value.wrapping_sub(logical.settled);
        if events == 0 {
            return;
        }
        logical.settled = value;
        let wrapped = events > mask - logical.value;
        logical.value = logical.value.wrapping_add(events) & mask;
        if wrapped {
            self.overflow(counter);
        }
    }

    /// Marks an overflow: the status bit where the model has one, a PMI where
    /// the control asks for it.
    fn overflow(&mut self, counter: CounterId) {
        if let (true, Some(bit)) = (self.model.has_status(), counter.global_bit()) {
            self.global_status |= 1 << bit;
        }
        if self.request_of(counter).is_some_and(|request| request.int) {
            self.pending.insert(counter);
        }
        self.rearm(counter);
    }

    /// Tells the backend when the next overflow is due. Without INT nobody
    /// waits for it: status is settled when it is read.
    pub(super) fn rearm(&mut self, counter: CounterId) {
        let logical = &self.counters[index_of(counter)];
        let (true, Some((slot, _))) = (logical.running, logical.bound) else {
            return;
        };
        let wanted = self.request_of(counter).is_some_and(|request| request.int);
        let after = (self.model.counter_mask(counter) - logical.value).saturating_add(1);
        self.backend
            .arm(slot, NonZeroU64::new(after).filter(|_| wanted));
    }

    /// Takes in a control that was written, and gives the physical counter
    /// back if it counts something else. The counter was settled before.
    pub(super) fn take_control(&mut self, counter: CounterId) {
        let index = index_of(counter);
        let Some(request) = self.decode_request(counter) else {
            return;
        };
        self.counters[index].request = Some(request);
        if let Some((slot, bound)) = self.counters[index].bound
            && !bound.counts_like(&request)
        {
            self.unbind(index, slot);
        }
        self.update(counter);
    }

    /// Brings the physical counter in line with the controls. The counter was
    /// settled under the old ones.
    pub(super) fn update(&mut self, counter: CounterId) {
        let index = index_of(counter);
        let Some(request) = self.counters[index].request else {
            return;
        };
        let wanted = request.can_advance() && self.is_enabled(counter);
        if !wanted {
            self.counters[index].unavailable = None;
            self.halt(index);
            return;
        }
        if !self.grant.holds(counter) {
            self.counters[index].unavailable = Some(UnavailableReason::NotGranted);
            return;
        }
        match self.bind(index, &request) {
            Ok(slot) => {
                self.counters[index].unavailable = None;
                self.run(index, slot);
                self.rearm(counter);
            }
            Err(reason) => self.freeze(counter, &request, reason),
        }
    }

    fn is_enabled(&self, counter: CounterId) -> bool {
        !self.model.has_global_control()
            || counter
                .global_bit()
                .is_some_and(|bit| self.global_control & (1 << bit) != 0)
    }

    fn bind(
        &mut self,
        index: usize,
        request: &CountRequest,
    ) -> Result<SlotIndex, UnavailableReason> {
        if let Some((slot, _)) = self.counters[index].bound {
            return Ok(slot);
        }
        let capacity = self.backend.capacity();
        let slot = (0..64)
            .map(SlotIndex)
            .take(capacity)
            .find(|slot| !self.slots.contains(*slot))
            .ok_or(UnavailableReason::NoFreeCounter {
                backend: self.backend.name(),
                capacity,
            })?;
        self.backend
            .program(slot, request)
            .map_err(|unavailable| unavailable.reason)?;
        self.slots.insert(slot);
        self.counters[index].bound = Some((slot, *request));
        self.counters[index].settled = 0;
        Ok(slot)
    }

    fn unbind(&mut self, index: usize, slot: SlotIndex) {
        self.halt(index);
        self.backend.release(slot);
        self.slots.remove(slot);
        self.counters[index].bound = None;
    }

    fn run(&mut self, index: usize, slot: SlotIndex) {
        let logical = &mut self.counters[index];
        if logical.running {
            return;
        }
        // What was settled last still holds: a stopped slot stands still, and
        // a fresh one is at 0.
        self.backend.start(slot);
        logical.running = true;
    }

    fn halt(&mut self, index: usize) {
        let logical = &mut self.counters[index];
        if let (true, Some((slot, _))) = (logical.running, logical.bound) {
            self.backend.stop(slot);
            logical.running = false;
        }
    }

    /// A counter that nobody can count for keeps its value. The architecture
    /// has no way to tell the guest, so the log does, once for each change.
    fn freeze(&mut self, counter: CounterId, request: &CountRequest, reason: UnavailableReason) {
        let logical = &mut self.counters[index_of(counter)];
        if logical.unavailable != Some(reason) {
            log::info!("{counter} stays frozen on '{request}': {reason}");
        }
        logical.unavailable = Some(reason);
    }
}
