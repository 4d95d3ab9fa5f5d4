//! What was counted, and what comes of it: counts are taken in, and lead to overflows,
//! PMIs, records and samples that are due. Nothing here moves a counter that another one
//! needs the place of.

use arbiter::{CounterId, CounterSet, PerKind};
use instruction_facts::OperandKind;
use pmu_model::{
    CountRequest, IbsKind, KnownEvent, MsrIndex, OwnerId, PmuModel, SlotSet, Ticks,
    UnavailableReason,
};

use super::counters::{Counters, Outcome};
use super::interrupts::Interrupts;
use super::losses::Losses;
use super::pebs::Pebs;
use super::registers::Registers;
use super::samplers::Samplers;
use super::seat::Seat;
use super::terms::Terms;
use super::uncounted::Uncounted;
use crate::pebs::{LinearMemory, PebsArea, PebsMoment, PebsNeeds, PebsRecord, PebsSkip, XMM};
use crate::slot_bank::{Claimant, Return, Settled};

/// The counts of one vCPU.
#[derive(Debug)]
pub(super) struct Tally {
    owner: OwnerId,
    model: PmuModel,
    terms: Terms,
    registers: Registers,
    counters: Counters,
    interrupts: Interrupts,
    pebs: Pebs,
    samplers: Samplers,
    losses: Losses,
    uncounted: Uncounted,
}

impl Tally {
    pub(super) fn new(owner: OwnerId, model: PmuModel, terms: Terms) -> Self {
        Tally {
            owner,
            registers: Registers::after_reset(&model),
            counters: Counters::new(),
            interrupts: Interrupts::default(),
            pebs: Pebs::new(),
            samplers: Samplers::of(&model),
            losses: Losses::default(),
            uncounted: Uncounted::default(),
            model,
            terms,
        }
    }

    /// Brings every register to its reset value, and frees every slot of the guest.
    pub(super) fn reset(&mut self, seat: &mut Seat<'_>) {
        if let Some(bank) = seat.bank() {
            self.counters.leases().for_each(|lease| bank.release(lease));
        }
        self.counters.reset();
        self.registers = Registers::after_reset(&self.model);
        self.pebs.reset();
        self.losses = Losses::default();
        self.interrupts.reset();
        self.samplers.reset(&self.model);
    }

    pub(super) fn set_floor(&mut self, ticks: Ticks) {
        self.interrupts.set_floor(ticks);
        self.samplers.set_floor(ticks);
    }

    pub(super) fn set_terms(&mut self, terms: Terms) {
        self.terms = terms;
    }

    pub(super) fn owner(&self) -> OwnerId {
        self.owner
    }

    #[inline]
    pub(super) fn model(&self) -> &PmuModel {
        &self.model
    }

    #[inline]
    pub(super) fn terms(&self) -> &Terms {
        &self.terms
    }

    #[inline]
    pub(super) fn registers(&self) -> &Registers {
        &self.registers
    }

    pub(super) fn registers_mut(&mut self) -> &mut Registers {
        &mut self.registers
    }

    #[inline]
    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    #[inline]
    pub(super) fn counters_mut(&mut self) -> &mut Counters {
        &mut self.counters
    }

    #[inline]
    pub(super) fn interrupts(&self) -> &Interrupts {
        &self.interrupts
    }

    #[inline]
    pub(super) fn interrupts_mut(&mut self) -> &mut Interrupts {
        &mut self.interrupts
    }

    #[inline]
    pub(super) fn samplers(&self) -> &Samplers {
        &self.samplers
    }

    #[inline]
    pub(super) fn samplers_mut(&mut self) -> &mut Samplers {
        &mut self.samplers
    }

    #[inline]
    pub(super) fn losses(&self) -> &Losses {
        &self.losses
    }

    pub(super) fn losses_mut(&mut self) -> &mut Losses {
        &mut self.losses
    }

    /// Adds what the backend has counted since the last settlement. A carry
    /// out of the counter's width is an overflow; the counter goes on.
    #[inline]
    pub(super) fn settle(&mut self, seat: &mut Seat<'_>, counter: CounterId) {
        let (Some(bank), Some(lease)) = (seat.bank(), self.counters.lease_mut(counter)) else {
            return;
        };
        if let Some(reading) = bank.read(lease) {
            let (request, settled) = (*lease.request(), lease.absorb(reading));
            self.take_in(seat, counter, &request, settled);
        }
    }

    /// The same of those that have a place.
    pub(super) fn settle_each(&mut self, seat: &mut Seat<'_>, counters: CounterSet) {
        for counter in (counters & self.counters.active()).iter() {
            self.settle(seat, counter);
        }
    }

    /// The same of those whose overflow was told on these slots.
    pub(super) fn settle_slots(&mut self, seat: &mut Seat<'_>, slots: SlotSet) {
        for counter in self.counters.overflowed_on(slots).iter() {
            self.settle(seat, counter);
        }
    }

    pub(super) fn settle_all(&mut self, seat: &mut Seat<'_>) {
        self.settle_each(seat, self.counters.active());
    }

    /// Adds what a physical counter has counted for `request`.
    fn take_in(
        &mut self,
        seat: &mut Seat<'_>,
        counter: CounterId,
        request: &CountRequest,
        settled: Settled,
    ) {
        let mask = self.model.counter_mask(counter);
        let awaits = self.pebs.awaits(counter, self.registers.pebs_enable());
        match self.counters.take(counter, settled, mask, awaits) {
            Outcome::Nothing => {}
            Outcome::Uncounted(reason) => self.refuse(counter, request, reason),
            Outcome::Overflow => self.overflow(seat, counter),
        }
    }

    /// Marks an overflow: the status bit where the model has one, a PMI where
    /// the control asks for it.
    fn overflow(&mut self, seat: &mut Seat<'_>, counter: CounterId) {
        if let CounterId::Ibs(kind) = counter {
            self.samplers.fell_due(kind);
            return;
        }
        let with_pebs = self.registers.pebs_enable();
        if !self.pebs.takes_overflow(counter, with_pebs) {
            let request = self.counters.request(counter);
            let int = request.is_some_and(|request| request.int);
            let reach = &self.terms.reach;
            self.registers.overflowed(&self.model, reach, counter, int);
            if int {
                self.interrupts.overflowed(counter);
            }
        }
        self.rearm(seat, counter);
    }

    /// Tells the backend when the next overflow is due.
    #[inline]
    pub(super) fn rearm(&mut self, seat: &mut Seat<'_>, counter: CounterId) {
        let Some(bank) = seat.bank() else { return };
        if self.pebs.due().contains(counter) {
            // It is reloaded at once.
            return;
        }
        let with_pebs = self.registers.pebs_enable();
        let awaits = self.pebs.awaits(counter, with_pebs);
        let mask = self.model.counter_mask(counter);
        let has_pebs = with_pebs.contains(counter);
        let until = self.counters.overflow_in(counter, mask, has_pebs, awaits);
        let lease = self.counters.lease_mut(counter);
        if let Some(lease) = lease.filter(|lease| lease.is_running()) {
            let arming = lease.await_overflow(until);
            bank.arm(lease, arming);
        }
    }

    /// The guest sets the count.
    pub(super) fn set_count(&mut self, seat: &mut Seat<'_>, counter: CounterId, count: u64) {
        self.settle(seat, counter);
        self.counters.set_value(counter, count);
        self.pebs.disarm(counter);
        self.rearm(seat, counter);
    }

    /// These have PEBS and no others from now on; the overflows of `changed` are others.
    pub(super) fn take_pebs(&mut self, seat: &mut Seat<'_>, changed: CounterSet) {
        self.pebs.keep(self.registers.pebs_enable());
        for counter in changed.iter() {
            self.rearm(seat, counter);
        }
    }

    /// The processor has taken its bits of a write of an MSR that it shares with the model.
    pub(super) fn rest_taken(&mut self, msr: MsrIndex, value: u64) {
        self.registers.rest_taken(&self.model, msr, value);
    }

    /// Decodes the control of `counter`.
    pub(super) fn decode(&self, counter: CounterId) -> Option<CountRequest> {
        match counter {
            CounterId::Ibs(kind) => self.samplers.request(kind),
            _ => self.registers.request(&self.model, counter),
        }
    }

    /// It counts something else from now on.
    pub(super) fn begin_anew(&mut self, counter: CounterId) {
        self.counters.begin_anew(counter);
        self.losses.is_backed(counter);
        self.pebs.disarm(counter);
    }

    /// A counter that nobody can count for keeps its value. The architecture
    /// has no way to tell the guest, so the log does, once for each event.
    pub(super) fn refuse(
        &mut self,
        counter: CounterId,
        request: &CountRequest,
        reason: UnavailableReason,
    ) {
        if !self.counters.refuse(counter, reason) {
            return;
        }
        match reason {
            UnavailableReason::Lost { .. } if self.is_held(counter) => {
                self.losses.note_taken(counter);
            }
            UnavailableReason::Lost { .. }
            | UnavailableReason::Waiting
            | UnavailableReason::Budget { .. }
            | UnavailableReason::NoCore => {}
            _ => self.note_unbacked(counter),
        }
        if reason != UnavailableReason::Waiting {
            self.uncounted.log(self.owner, counter, request, reason);
        }
    }

    fn is_held(&self, counter: CounterId) -> bool {
        self.terms.held_by_guest.contains(counter)
    }

    fn note_unbacked(&mut self, counter: CounterId) {
        if self.is_held(counter) {
            self.losses.note_unbacked(counter);
        }
    }

    /// A sampler that the guest has enabled counts for a tool.
    pub(super) fn sampler_is_taken(&mut self, seat: &Seat<'_>, kind: IbsKind) {
        let counter = CounterId::Ibs(kind);
        let request = self.samplers.choose(&self.model, seat.core(), kind);
        if let (Some(request), Some(core)) = (request, seat.core()) {
            let backend = core.backend().name();
            let reason = UnavailableReason::Busy { backend };
            self.uncounted.log(self.owner, counter, &request, reason);
        }
        self.note_unbacked(counter);
    }

    /// A sampler counts from now on what the core has for it.
    pub(super) fn start_sampler(&mut self, seat: &Seat<'_>, kind: IbsKind) {
        let request = self.samplers.choose(&self.model, seat.core(), kind);
        let left = self.samplers.start(kind, request);
        let counter = CounterId::Ibs(kind);
        let mask = self.model.counter_mask(counter);
        let value = (mask - left).wrapping_add(1) & mask;
        self.counters.set_value(counter, value);
    }

    /// Events until a sampler comes to its maximum, as of the last settlement.
    pub(super) fn left_of(&self, kind: IbsKind) -> u64 {
        let counter = CounterId::Ibs(kind);
        self.model.counter_mask(counter) - self.counters.value(counter) + 1
    }

    /// Whether the guest has not enabled more counters like this one than its budget
    /// lets it use at a time.
    pub(super) fn is_within_budget(&self, counter: CounterId) -> bool {
        let most = self.terms.grant.budget.most().of(counter);
        most == u8::MAX || PerKind::count(self.counters.wanted()).of(counter) <= most
    }

    /// Puts a counter on a slot, or a pair of them, and lets it count there.
    pub(super) fn bind(
        &mut self,
        seat: &mut Seat<'_>,
        counter: CounterId,
        slots: SlotSet,
        request: &CountRequest,
        takes_turns: bool,
    ) -> Result<(), UnavailableReason> {
        let Some(bank) = seat.bank() else {
            return Err(UnavailableReason::NoCore);
        };
        let vcpu = self.owner;
        let claimant = Claimant::Guest { vcpu, counter };
        let lease = bank.place(slots, claimant, request)?;
        self.losses.is_backed(counter);
        self.counters.come(counter, lease);
        self.run(seat, counter, takes_turns);
        Ok(())
    }

    /// Has it count in its place.
    pub(super) fn run(&mut self, seat: &mut Seat<'_>, counter: CounterId, takes_turns: bool) {
        if let Some(bank) = seat.bank()
            && let Some(stood) = self.counters.run(counter, takes_turns)
        {
            bank.start(stood);
        }
        self.rearm(seat, counter);
    }

    /// Leaves the slot, with the count.
    pub(super) fn release(&mut self, seat: &mut Seat<'_>, counter: CounterId) {
        let Some(bank) = seat.bank() else { return };
        let Some(mut lease) = self.counters.leave(counter) else {
            return;
        };
        let (reading, loss) = bank.end(&lease);
        // What was cleared while it was away is nobody's count any more.
        let is_used = self.counters.request(counter).is_some();
        if let Some(reading) = reading.filter(|_| is_used) {
            let (request, settled) = (*lease.request(), lease.absorb(reading));
            self.take_in(seat, counter, &request, settled);
        }
        self.counters.left(counter, loss.filter(|_| is_used));
    }

    /// A counter that had a place looks whether it still has.
    pub(super) fn come_back(&mut self, seat: &mut Seat<'_>, counter: CounterId) {
        let (Some(bank), Some(lease)) = (seat.bank(), self.counters.lease(counter)) else {
            return;
        };
        match bank.take_back(lease, self.counters.request(counter)) {
            Return::InPlace => {}
            Return::Lost => self.release(seat, counter),
            Return::Superseded => {
                bank.release(lease);
                self.counters.leave(counter);
                self.counters.left(counter, None);
            }
        }
    }

    /// Leaves nothing of a counter's former owner.
    pub(super) fn clear(&mut self, seat: &mut Seat<'_>, counter: CounterId) {
        self.registers.clear(counter);
        if let CounterId::Ibs(kind) = counter {
            self.samplers.clear(kind);
        }
        if let Some(bank) = seat.bank()
            && let Some(lease) = self.counters.leave(counter)
        {
            bank.release(&lease);
        }
        self.counters.clear(counter);
        self.interrupts.clear(counter);
        self.pebs.disarm(counter);
        self.losses.clear(counter);
    }

    /// What is counted from now on was done by one instruction that was seen, or was not.
    #[inline]
    pub(super) fn retire(&mut self, retiring: bool) {
        self.pebs.retire(retiring);
    }

    /// Whether a record is due, and what it needs.
    #[inline]
    pub(super) fn pebs_due(&self) -> Option<PebsNeeds> {
        let due = self.pebs.due();
        (!due.is_empty()).then(|| PebsNeeds {
            xmm: self.registers.pebs_groups(due) & XMM != 0,
            operand: self.sampled_operand(due),
        })
    }

    /// Which operand in memory a record is about, as its counters' events say.
    fn sampled_operand(&self, due: CounterSet) -> OperandKind {
        let samples = |event| {
            let mut requests = due.iter().filter_map(|one| self.counters.request(one));
            requests.any(|request| request.event.known() == Some(event))
        };
        match (samples(KnownEvent::Loads), samples(KnownEvent::Stores)) {
            (true, false) => OperandKind::Load,
            (false, true) => OperandKind::Store,
            _ => OperandKind::Any,
        }
    }

    /// Writes the record that is due, of `moment`, and reloads its counters. Where it
    /// cannot be written, the guest's buffer stays as it is and the counters go on.
    pub(super) fn write_pebs(
        &mut self,
        seat: &mut Seat<'_>,
        memory: &dyn LinearMemory,
        moment: &PebsMoment,
    ) {
        let due = self.pebs.due();
        let appended = self.append_record(due, memory, moment);
        if let Ok((area, is_full)) = &appended {
            self.reload(seat, due, area);
            if *is_full {
                // What was settled just now may be due as well.
                let due = self.pebs.due();
                self.registers.buffer_full(&self.terms.reach, due);
                for counter in due.iter() {
                    self.interrupts.overflowed(counter);
                }
            }
        }
        for counter in self.pebs.done(self.owner, appended.map(drop)).iter() {
            self.rearm(seat, counter);
        }
    }

    fn append_record(
        &self,
        due: CounterSet,
        memory: &dyn LinearMemory,
        moment: &PebsMoment,
    ) -> Result<(PebsArea, bool), PebsSkip> {
        let at = self.registers.ds_area();
        let pebs = self.model.pebs().ok_or(PebsSkip::Area(at))?;
        let names = self.terms.reach.names_of(due);
        let groups = self.registers.pebs_groups(due);
        let record = PebsRecord::of(pebs.format, groups, names.bits(), moment);
        let area = PebsArea::read(memory, at, names.iter())?;
        let is_full = area.append(memory, record.bytes())?;
        Ok((area, is_full))
    }

    /// Sets the counters to their reset values, as of the record.
    fn reload(&mut self, seat: &mut Seat<'_>, due: CounterSet, area: &PebsArea) {
        for counter in due.iter() {
            self.settle(seat, counter);
            let name = self
                .terms
                .reach
                .names_of(std::iter::once(counter).collect());
            let Some(name) = name.iter().next() else {
                continue;
            };
            let mask = self.model.counter_mask(counter);
            let reset = area.reset_value(name) & mask;
            let is_late = self.pebs.is_late(counter);
            self.counters.reload(counter, reset, mask, is_late);
        }
    }

    /// Counters whose overflow has no record yet.
    pub(super) fn pebs_waiting(&self) -> CounterSet {
        self.pebs.waiting()
    }

    pub(super) fn restore_pebs(&mut self, armed: CounterSet) {
        self.pebs.restore(armed);
    }
}
