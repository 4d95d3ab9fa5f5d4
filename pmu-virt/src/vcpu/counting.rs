//! Logical counters on physical ones: binding, settling, overflow.

use std::num::NonZeroU64;

use arbiter::{CounterId, Shared};
use pmu_model::{CountRequest, FixedFunction, LossReason, SlotSet, Unavailable, UnavailableReason};

use super::times::Times;
use super::{Here, VcpuPmu, index_of};
use crate::slot_bank::{Claimant, Settled};

impl VcpuPmu {
    /// What the control of `counter` asks for at present.
    #[inline]
    pub(super) fn request_of(&self, counter: CounterId) -> Option<CountRequest> {
        self.counters[index_of(counter)].request
    }

    /// Decodes the control of `counter`. The guest's cores have one thread each, so that
    /// any-thread means this one.
    pub(super) fn decode_request(&self, counter: CounterId) -> Option<CountRequest> {
        let request = match counter {
            CounterId::Ibs(kind) => self.ibs.as_ref()?.request(kind)?,
            CounterId::Programmable(n) => {
                let select = self.select.get(usize::from(n))?;
                CountRequest::decode(self.model.events(), *select)
            }
            CounterId::Fixed(n) => {
                CountRequest::decode_fixed(FixedFunction::of(n)?, self.fixed_control)
            }
        };
        Some(CountRequest {
            any_thread: false,
            ..request
        })
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
        let (Some(lease), Some(core)) = (&mut self.counters[index_of(counter)].lease, &mut *here)
        else {
            return;
        };
        if let Some(settled) = lease.settle(&mut core.bank) {
            let request = *lease.request();
            self.take_in(here, counter, &request, settled);
        }
    }

    /// Adds what a physical counter has counted for `request`.
    pub(super) fn take_in(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        request: &CountRequest,
        settled: Settled,
    ) {
        let mask = self.model.counter_mask(counter);
        let logical = &mut self.counters[index_of(counter)];
        let (counted, provenance) = match settled {
            Settled::Counted(events, provenance) => (events, provenance),
            Settled::Uncounted(reason) => {
                logical.times.lose(self.ran);
                self.freeze(counter, request, reason);
                return;
            }
        };
        if logical.unavailable.is_some() {
            // The source counts again, and knows itself what it has missed.
            logical.unavailable = None;
            logical.times.start_over(self.ran);
            if logical.is_running() {
                logical.times.run(self.ran);
            }
        }
        // Events of before keep their label, whoever counts now.
        let before = logical.provenance.unwrap_or(provenance);
        logical.provenance = Some(before.and(provenance));
        let events = logical.times.commit(self.ran, counted);
        if events == 0 {
            return;
        }
        logical.counted = logical.counted.wrapping_add(events);
        let wrapped = events > mask - logical.value;
        logical.value = logical.value.wrapping_add(events) & mask;
        if wrapped || self.pebs.awaits(counter) {
            self.overflow(here, counter);
        }
    }

    /// Marks an overflow: the status bit where the model has one, a PMI where
    /// the control asks for it.
    fn overflow(&mut self, here: &mut Here<'_>, counter: CounterId) {
        if let (CounterId::Ibs(kind), Some(ibs)) = (counter, self.ibs.as_deref_mut()) {
            ibs.fell_due(kind);
            return;
        }
        if self.pebs.takes_overflow(counter) {
            self.rearm(here, counter);
            return;
        }
        if self.model.has_status()
            && let Some(bit) = counter.global_bit()
        {
            self.global_status |= 1 << bit;
        }
        if self.request_of(counter).is_some_and(|request| request.int) {
            self.pmi.overflowed(counter);
            // A counter that freezing does not reach stops no others: its owner keeps
            // out of it.
            self.freeze.due |= self.freeze.on && self.reached_by(Shared::Freeze).contains(counter);
        }
        self.rearm(here, counter);
    }

    /// Tells the backend when the next overflow is due. Without INT and PEBS nobody
    /// waits for it: status is settled when it is read. Behind an overflow with PEBS it
    /// is the next event that is waited for.
    pub(super) fn rearm(&mut self, here: &mut Here<'_>, counter: CounterId) {
        let logical = &mut self.counters[index_of(counter)];
        let running = logical.lease.as_mut().filter(|lease| lease.is_running());
        let (Some(lease), Some(core)) = (running, here) else {
            return;
        };
        if self.pebs.is_due(counter) {
            // It is reloaded at once.
            return;
        }
        let pebs = self.pebs.enabled.contains(counter);
        let wanted = pebs || logical.request.is_some_and(|request| request.int);
        let after = if self.pebs.awaits(counter) {
            1
        } else {
            (self.model.counter_mask(counter) - logical.value).saturating_add(1)
        };
        lease.arm(NonZeroU64::new(after).filter(|_| wanted), &mut core.bank);
    }

    /// Takes in a control that was written, and gives the physical counter
    /// back if it counts something else. The counter was settled before.
    pub(super) fn take_control(&mut self, here: &mut Here<'_>, counter: CounterId) {
        let index = index_of(counter);
        let Some(request) = self.decode_request(counter) else {
            return;
        };
        let logical = &mut self.counters[index];
        let before = logical.request.replace(request);
        if before.is_some_and(|before| before.counts_like(&request)) {
            self.update(here, counter);
            return;
        }
        // The new event may leave a place that another one can use.
        let leaves = logical.lease.is_some() || logical.times.is_enabled();
        if logical.lease.is_some() {
            self.release_slot(here, counter);
        }
        let logical = &mut self.counters[index];
        logical.counted = 0;
        logical.provenance = None;
        logical.taken = logical.taken.filter(|taken| taken.counts_like(&request));
        logical.loss = logical.taken.map(|_| LossReason::Taken);
        logical.dead = None;
        self.unbacked.remove(counter);
        self.pebs.disarm(counter);
        logical.times = Times::default();
        self.update(here, counter);
        if leaves && self.needs_places() {
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
        let enabled = !self.model.has_global_control() || self.is_globally_enabled(counter);
        // Instruction-based sampling has no bit in the status, and goes on.
        let frozen = !matches!(counter, CounterId::Ibs(_)) && self.freeze.frozen.contains(counter);
        if !(request.can_advance() && enabled) || frozen {
            if self.counters[index].unavailable.is_some() {
                // A place that was lost is no use: the next time, a new one.
                self.release_slot(here, counter);
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

    fn is_globally_enabled(&self, counter: CounterId) -> bool {
        matches!(counter, CounterId::Ibs(_))
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
        let within = self.is_within_budget(counter);
        let logical = &self.counters[index];
        if let Some(lease) = &logical.lease {
            if within && core.bank.holds(lease) && logical.unavailable.is_none() {
                self.run(here, counter);
                return;
            }
            self.release_slot(here, counter);
        }
        if let Some(reason) = self.counters[index].dead {
            self.active.remove(counter);
            self.freeze(counter, &request, reason);
            return;
        }
        let Some(core) = here else { return };
        let constraint = match core.plan_for_guest(&request) {
            Ok(plan) => plan.constraint,
            Err(Unavailable { reason }) => {
                if reason.is_lasting() {
                    self.counters[index].dead = Some(reason);
                    self.active.remove(counter);
                }
                self.freeze(counter, &request, reason);
                return;
            }
        };
        let judged = self.is_judged(core, counter, &constraint);
        let found = if self.multiplexer.is_active() || !within || judged {
            None
        } else {
            core.bank.find(&request, &constraint)
        };
        let Some(slots) = found else {
            self.distribute(here);
            return;
        };
        if let Err(reason) = self.bind_slot(here, counter, slots, &request) {
            self.freeze(counter, &request, reason);
        }
    }

    /// Puts a counter on a slot, or a pair of them, and lets it count there.
    pub(super) fn bind_slot(
        &mut self,
        here: &mut Here<'_>,
        counter: CounterId,
        slots: SlotSet,
        request: &CountRequest,
    ) -> Result<(), UnavailableReason> {
        let Some(core) = here else {
            return Err(UnavailableReason::NoCore);
        };
        let vcpu = self.owner;
        let claimant = Claimant::Guest { vcpu, counter };
        let lease = core.bank.place(slots, claimant, request)?;
        self.active.insert(counter);
        self.unbacked.remove(counter);
        self.counters[index_of(counter)].lease = Some(lease);
        self.run(here, counter);
        Ok(())
    }

    fn run(&mut self, here: &mut Here<'_>, counter: CounterId) {
        let logical = &mut self.counters[index_of(counter)];
        let refused = matches!(
            logical.unavailable.take(),
            Some(UnavailableReason::Budget { .. })
        );
        if let (Some(lease), Some(core)) = (&mut logical.lease, &mut *here)
            && !lease.is_running()
        {
            // What was settled last still holds: a stopped slot stands still.
            lease.start(&mut core.bank);
            logical.times.run(self.ran);
            if refused || !self.multiplexer.is_allowed() {
                // The time until now was refused, not waited for.
                logical.times.start_over(self.ran);
            }
        }
        self.rearm(here, counter);
    }

    /// Stops a counter that the guest has disabled. Its place is kept, for
    /// drivers enable it again soon; it goes to whoever needs it.
    fn halt(&mut self, here: &mut Here<'_>, index: usize) {
        let logical = &mut self.counters[index];
        if let Some(lease) = &mut logical.lease {
            lease.stop(here.as_mut().map(|core| &mut core.bank));
        }
        logical.times.disable(self.ran);
        if self.needs_places() {
            self.distribute(here);
        }
    }

    /// Whether some counter is wanted that has no place for want of one.
    pub(super) fn needs_places(&self) -> bool {
        self.multiplexer.is_active()
            || self
                .counters
                .iter()
                .any(|logical| match logical.unavailable {
                    Some(UnavailableReason::Conflict(_) | UnavailableReason::Budget { .. }) => true,
                    // What a host context has may be had again.
                    Some(UnavailableReason::Busy { .. }) => self.hosting,
                    _ => false,
                })
    }

    /// A counter that nobody can count for keeps its value. The architecture
    /// has no way to tell the guest, so the log does, once for each event.
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
        match reason {
            UnavailableReason::Lost { .. } => self.note_taken(counter),
            UnavailableReason::Waiting
            | UnavailableReason::Budget { .. }
            | UnavailableReason::NoCore => {}
            _ => self.note_unbacked(counter),
        }
        if reason != UnavailableReason::Waiting {
            self.uncounted.log(self.owner, counter, request, reason);
        }
    }
}
