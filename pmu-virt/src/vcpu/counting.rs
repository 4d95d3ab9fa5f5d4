//! Logical counters on physical ones: binding, settling, overflow.

use std::num::NonZeroU64;

use arbiter::{CounterId, Shared};
use pmu_model::{CountRequest, FixedFunction, Reading, SlotSet, UnavailableReason};

use super::times::Times;
use super::{Here, VcpuPmu, index_of};
use crate::core_pmu::{Holder, Stay};

impl VcpuPmu {
    /// What the control of `counter` asks for at present.
    #[inline]
    pub(super) fn request_of(&self, counter: CounterId) -> Option<CountRequest> {
        self.counters[index_of(counter)].request
    }

    /// Decodes the control of `counter`.
    pub(super) fn decode_request(&self, counter: CounterId) -> Option<CountRequest> {
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
    pub(super) fn settle_all(&mut self, here: &mut Here<'_>) {
        for counter in self.active.iter() {
            self.settle(here, counter);
        }
    }

    /// Adds what the backend has counted since the last settlement. A carry
    /// out of the counter's width is an overflow; the counter goes on.
    #[inline]
    pub(super) fn settle(&mut self, here: &mut Here<'_>, counter: CounterId) {
        let logical = &self.counters[index_of(counter)];
        let (true, Some((stay, _)), Some(core)) = (logical.running, logical.placed, &mut *here)
        else {
            return;
        };
        let reading = core.read(stay.slot);
        self.absorb(here, counter, reading);
    }

    /// Adds what a physical counter has counted, by its own count of it.
    pub(super) fn absorb(&mut self, here: &mut Here<'_>, counter: CounterId, reading: Reading) {
        let mask = self.model.counter_mask(counter);
        let logical = &mut self.counters[index_of(counter)];
        let (value, provenance) = match reading {
            Reading::Counted { value, provenance } => (value, provenance),
            Reading::Unavailable(reason) => {
                let request = logical.placed.map(|(_, request)| request);
                logical.times.lose(self.ran);
                if let Some(request) = request {
                    self.freeze(counter, &request, reason);
                }
                return;
            }
        };
        if logical.unavailable.is_some() {
            // The source counts again, and knows itself what it has missed.
            logical.unavailable = None;
            logical.times.start_over(self.ran);
            if logical.running {
                logical.times.run(self.ran);
            }
        }
        // Events of before keep their label, whoever counts now.
        logical.provenance = Some(match logical.provenance {
            Some(before) => before.and(provenance),
            None => provenance,
        });
        let counted = value.wrapping_sub(logical.settled);
        logical.settled = value;
        let events = logical.times.commit(self.ran, counted);
        if events == 0 {
            return;
        }
        logical.counted = logical.counted.wrapping_add(events);
        let wrapped = events > mask - logical.value;
        logical.value = logical.value.wrapping_add(events) & mask;
        if wrapped {
            self.overflow(here, counter);
        }
    }

    /// Marks an overflow: the status bit where the model has one, a PMI where
    /// the control asks for it.
    fn overflow(&mut self, here: &mut Here<'_>, counter: CounterId) {
        if let (true, Some(bit)) = (self.model.has_status(), counter.global_bit()) {
            self.global_status |= 1 << bit;
        }
        if self.request_of(counter).is_some_and(|request| request.int) {
            self.pending.insert(counter);
            self.note_pmi(counter);
        }
        self.rearm(here, counter);
    }

    /// Tells the backend when the next overflow is due. Without INT nobody
    /// waits for it: status is settled when it is read.
    pub(super) fn rearm(&mut self, here: &mut Here<'_>, counter: CounterId) {
        let logical = &self.counters[index_of(counter)];
        let (true, Some((stay, _)), Some(core)) = (logical.running, logical.placed, &mut *here)
        else {
            return;
        };
        let wanted = logical.request.is_some_and(|request| request.int);
        let after = (self.model.counter_mask(counter) - logical.value).saturating_add(1);
        core.arm(stay.slot, NonZeroU64::new(after).filter(|_| wanted));
    }

    /// Takes in a control that was written, and gives the physical counter
    /// back if it counts something else. The counter was settled before.
    pub(super) fn take_control(&mut self, here: &mut Here<'_>, counter: CounterId) {
        let index = index_of(counter);
        let Some(request) = self.decode_request(counter) else {
            return;
        };
        let logical = &mut self.counters[index];
        let same = logical
            .request
            .is_some_and(|before| before.counts_like(&request));
        logical.request = Some(request);
        if !same {
            self.give_up_place(here, counter);
            let logical = &mut self.counters[index];
            logical.counted = 0;
            logical.provenance = None;
            logical.loss = None;
            logical.times = Times::default();
        }
        self.update(here, counter);
        if !same && self.needs_places() {
            // The new event may leave a place that another one can use.
            self.distribute(here);
        }
    }

    /// Brings the physical counter in line with the controls. The counter was
    /// settled under the old ones.
    pub(super) fn update(&mut self, here: &mut Here<'_>, counter: CounterId) {
        let index = index_of(counter);
        let Some(request) = self.counters[index].request else {
            return;
        };
        if !(request.can_advance() && self.is_enabled(counter)) {
            if self.counters[index].unavailable.is_some() {
                // A place that was lost is no use: the next time, a new one.
                self.give_up_place(here, counter);
            }
            self.counters[index].unavailable = None;
            self.halt(here, index);
            return;
        }
        if !self.grant.holds(counter) {
            self.counters[index].unavailable = Some(UnavailableReason::NotGranted);
            return;
        }
        self.active.insert(counter);
        self.counters[index].times.enable(self.ran);
        self.bring_up(here, counter);
    }

    /// Whether a counter is to count, as far as the guest can say.
    pub(super) fn is_wanted(&self, counter: CounterId) -> bool {
        self.counters[index_of(counter)].times.is_enabled()
    }

    fn is_enabled(&self, counter: CounterId) -> bool {
        !self.model.has_global_control()
            || !self.reached_by(Shared::GlobalControl).contains(counter)
            || counter
                .global_bit()
                .is_some_and(|bit| self.global_control & (1 << bit) != 0)
    }

    /// Has a wanted counter count on this core.
    pub(super) fn bring_up(&mut self, here: &mut Here<'_>, counter: CounterId) {
        let index = index_of(counter);
        let logical = &self.counters[index];
        let (Some(request), Some(core)) = (logical.request, &mut *here) else {
            return;
        };
        if let Some((stay, _)) = logical.placed {
            if core.holds(stay) && logical.unavailable.is_none() {
                self.run(here, counter, stay);
                return;
            }
            self.give_up_place(here, counter);
        }
        let Some(core) = here else { return };
        let constraint = match core.backend().plan(&request) {
            Ok(plan) => plan.constraint,
            Err(refusal) => {
                self.freeze(counter, &request, refusal.reason);
                return;
            }
        };
        let found = match self.turns.are_taken() {
            true => None,
            false => core.find(&request, &constraint),
        };
        let Some(slot) = found else {
            self.distribute(here);
            return;
        };
        if let Err(reason) = self.come_to(here, counter, constraint.taken_at(slot), &request) {
            self.freeze(counter, &request, reason);
        }
    }

    /// Puts a counter on a slot, or a pair of them, and lets it count there.
    pub(super) fn come_to(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        slots: SlotSet,
        request: &CountRequest,
    ) -> Result<(), UnavailableReason> {
        let Some(core) = here else {
            return Err(UnavailableReason::NoCore);
        };
        let holder = Holder::Guest {
            vcpu: self.owner,
            counter,
        };
        let (stay, begin) = core.place(slots, holder, request)?;
        self.active.insert(counter);
        let logical = &mut self.counters[index_of(counter)];
        logical.placed = Some((stay, *request));
        logical.settled = begin;
        self.run(here, counter, stay);
        Ok(())
    }

    fn run(&mut self, here: &mut Here<'_>, counter: CounterId, stay: Stay) {
        let logical = &mut self.counters[index_of(counter)];
        logical.unavailable = None;
        if !logical.running {
            // What was settled last still holds: a stopped slot stands still.
            logical.running = true;
            logical.times.run(self.ran);
            if !self.turns.are_allowed() {
                // The time until now was refused, not waited for.
                logical.times.start_over(self.ran);
            }
            if let Some(core) = here {
                core.start(stay.slot);
            }
        }
        self.rearm(here, counter);
    }

    /// Stops a counter that the guest has disabled. Its place is kept, for
    /// drivers enable it again soon; it goes to whoever needs it.
    fn halt(&mut self, here: &mut Here<'_>, index: usize) {
        let logical = &mut self.counters[index];
        if let (true, Some((stay, _)), Some(core)) = (logical.running, logical.placed, &mut *here) {
            core.stop(stay.slot);
        }
        logical.running = false;
        logical.times.disable(self.ran);
        if self.needs_places() {
            self.distribute(here);
        }
    }

    /// Whether some counter is wanted that has no place for want of one.
    pub(super) fn needs_places(&self) -> bool {
        self.turns.are_taken()
            || self
                .counters
                .iter()
                .any(|logical| match logical.unavailable {
                    Some(UnavailableReason::Conflict(_)) => true,
                    // What a host context has may be had again.
                    Some(UnavailableReason::Busy { .. }) => self.hosting,
                    _ => false,
                })
    }

    /// A counter that nobody can count for keeps its value. The architecture
    /// has no way to tell the guest, so the log does, once for each change.
    pub(super) fn freeze(
        &mut self,
        counter: CounterId,
        request: &CountRequest,
        reason: UnavailableReason,
    ) {
        let logical = &mut self.counters[index_of(counter)];
        if logical.unavailable == Some(reason) {
            return;
        }
        logical.unavailable = Some(reason);
        if reason != UnavailableReason::Waiting {
            let owner = self.owner;
            log::info!("{owner}: {counter} stays frozen on '{request}': {reason}");
        }
    }
}
