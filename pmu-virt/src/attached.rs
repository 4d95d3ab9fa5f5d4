//! A context on a core: what it wants counted is brought onto slots, and what
//! these have counted is brought to it.
//!
//! Places, time and allowance own their state and know nothing of each other, nor of the
//! context. [`AttachedContext`] lets them meet.

mod allowance;
mod group;
mod places;
mod record;
mod samplers;
mod time;

pub(crate) use group::ContextGroup;
pub use group::MAX_CONTEXTS;
pub use record::{HostAudit, HostEvent, HostRecord};

use std::sync::Arc;

use perfmon::{Context, ContextId, MessageQueue, Moment, Quantities, Wanted};
use perfmon_abi::consts::PFM_FL_PREEMPTIBLE;
use perfmon_abi::wire::{Call, Refusal};
use pmu_model::ibs::IbsSample;
use pmu_model::{
    CountRequest, IbsKind, Nanos, OwnerId, Reading, SlotIndex, SlotSet, Ticks, Tsc, Unavailable,
};

use crate::assign::Demand;
use crate::backend::{CountPlan, CounterBackend};
use crate::filter::EventFilter;
use crate::placement::Claim;
use crate::slot_bank::{Settled, SlotBank, SlotLease};
use allowance::Allowance;
use places::Places;
pub(crate) use samplers::no_sampler_of_core;
use time::ContextTime;
pub(crate) use time::TickClock;

/// A context that is attached to a vCPU or a core, with its queue.
///
/// Times are those in which its vCPU runs, or the wall time of its core.
#[derive(Debug)]
pub struct AttachedContext {
    context: Box<Context>,
    queue: Box<dyn MessageQueue>,
    places: Places,
    time: ContextTime,
    allowance: Allowance,
}

/// A context that could not be attached.
#[derive(Debug)]
pub struct NotLoaded {
    pub hosted: Box<AttachedContext>,
    pub refusal: Refusal,
    /// It would have room if the owners of reserved counters kept to this.
    pub beside: Option<GuestLimit>,
}

impl NotLoaded {
    /// A refusal that nobody's counters are in the way of.
    #[must_use]
    pub fn new(hosted: Box<AttachedContext>, refusal: Refusal) -> Self {
        NotLoaded {
            hosted,
            refusal,
            beside: None,
        }
    }
}

/// What the layers of guests would have to keep to, so that a context has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestLimit {
    /// So many programmable counters fewer than now for the guest of each vCPU that can
    /// be on the context's core.
    pub fewer: u8,
    /// The most programmable counters that the layers of any vCPU of the VM hold.
    pub most: u8,
}

impl AttachedContext {
    /// A context that is attached to nothing yet.
    #[must_use]
    pub fn new(id: ContextId, context: Box<Context>, queue: Box<dyn MessageQueue>) -> Box<Self> {
        Box::new(AttachedContext {
            context,
            queue,
            places: Places::new(id),
            time: ContextTime::default(),
            allowance: Allowance::default(),
        })
    }

    /// What it was made of. It was unloaded before.
    #[must_use]
    pub fn into_parts(self) -> (ContextId, Box<Context>, Box<dyn MessageQueue>) {
        (self.id(), self.context, self.queue)
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> ContextId {
        self.places.context()
    }

    /// The context, as of the last settlement.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Keeps the quantities of the VMM for reads while it is attached to nothing.
    pub fn keep_quantities(&mut self, values: &dyn Quantities) {
        self.context.keep_quantities(values);
    }

    /// Whether its counters were taken by somebody who comes first.
    #[must_use]
    pub fn is_preempted(&self) -> bool {
        self.time.is_blind()
    }

    /// Whether others may take its counters for a time.
    #[must_use]
    pub fn is_preemptible(&self) -> bool {
        self.context.flags() & PFM_FL_PREEMPTIBLE != 0
    }

    /// Counters of its largest event set: what it wants of a core at a time.
    #[must_use]
    pub fn counters(&self) -> usize {
        let sets = self.context.demands().into_iter();
        sets.map(|(_, set)| set.len()).max().unwrap_or(0)
    }

    /// It may use so many counters at a time from now on, by a lease of the host's arbiter.
    /// While its largest set wants more it is preempted, as nothing says which of its
    /// events could do without.
    pub fn set_lease(&mut self, counters: usize) {
        self.allowance.set_lease(counters);
        self.keep_to_lease();
    }

    /// Its tool may count no more than this allows.
    pub fn set_filter(&mut self, filter: Arc<EventFilter>) {
        self.allowance.set_filter(filter);
    }

    /// How a request of its tool's would be counted.
    pub(crate) fn plan(
        &self,
        backend: &dyn CounterBackend,
        request: &CountRequest,
    ) -> Result<CountPlan, Unavailable> {
        self.allowance.plan(backend, request)
    }

    /// Whether its largest set wants more than its lease holds.
    pub(crate) fn is_beyond_lease(&self) -> bool {
        self.allowance.is_exceeded()
    }

    /// Looks at the lease again, after its sets have changed.
    pub(crate) fn keep_to_lease(&mut self) {
        self.allowance.compare(self.counters());
    }

    /// Whether it has to give up what it has for want of a lease.
    pub(crate) fn is_to_leave(&self) -> bool {
        self.allowance.is_exceeded() && !self.time.is_blind()
    }

    /// The vCPU that it is loaded on; none if that is a core.
    #[must_use]
    pub fn vcpu(&self) -> Option<OwnerId> {
        self.places.vcpu()
    }

    /// Whether anything is to be done while the guest runs.
    pub(crate) fn is_active(&self) -> bool {
        self.context.is_started()
    }
}

/// Coming, going, and what tools ask for.
impl AttachedContext {
    /// The context is attached from now on.
    pub(crate) fn begin(&mut self, vcpu: Option<OwnerId>, set: u16) {
        self.places.begin(vcpu);
        self.time = ContextTime::default();
        self.context.attached(set);
    }

    /// The context is attached no longer. Its slots are given back, with the
    /// last counts.
    pub(crate) fn end(&mut self, bank: &mut SlotBank) {
        self.leave_all(bank);
        self.end_away();
    }

    /// The same on no core: yields what it holds on the one where its vCPU was
    /// parked. Its counts were settled then.
    pub(crate) fn end_away(&mut self) -> Vec<SlotLease> {
        self.context.detached();
        self.time.see_again();
        self.places.take_missing();
        self.places.end_away()
    }

    /// Carries a command out. Counts were settled before, and slots are
    /// brought in line after.
    pub(crate) fn carry_out(
        &mut self,
        call: &mut Call,
        values: &dyn Quantities,
    ) -> Result<(), Refusal> {
        self.context.call(call, values)
    }

    /// Whether a command leaves its places as they are: it tells values, and nothing
    /// waits for a slot.
    pub(crate) fn is_only_read_by(&self, call: &Call) -> bool {
        call.only_reads() && !self.waits_for_room()
    }

    /// What `check` says of the samplers that it uses.
    pub(crate) fn check_samplers(
        &self,
        check: impl Fn(IbsKind) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let kinds = IbsKind::ALL.into_iter();
        let mut used = kinds.filter(|kind| self.context.uses_sampler(*kind));
        used.try_for_each(check)
    }

    /// The first write that would make it use a sampler which it does not use yet and
    /// which `check` refuses.
    pub(crate) fn refused_sampler(
        &self,
        call: &Call,
        check: impl Fn(IbsKind) -> Result<(), Refusal>,
    ) -> Option<(usize, Refusal)> {
        samplers::refused(&self.context, call, check)
    }

    /// Chooses what its samplers count here, by what the sources of the core count.
    pub(crate) fn choose_for_samplers(&mut self, backend: &dyn CounterBackend) {
        let allowance = &self.allowance;
        self.context
            .choose_for_samplers(|request| allowance.plan(backend, request).is_ok());
    }

    /// Takes in a sample of IBS, if it waits for one.
    pub(crate) fn take_in_sample(&mut self, sample: &IbsSample) -> bool {
        self.context.sampled(sample)
    }

    /// Handles the overflows that are pending. Counts were settled before.
    pub(crate) fn sample(&mut self, moment: &Moment, values: &dyn Quantities) {
        self.context.overflow(moment, values, &mut *self.queue);
        // A time switch may have waited for that.
        self.switch_if_due();
    }

    /// Its counters are taken: it counts nothing, and its time stands still,
    /// until it is restored.
    #[must_use]
    pub(crate) fn preempt(&mut self, bank: &mut SlotBank) -> Option<HostEvent> {
        if self.time.is_blind() {
            return None;
        }
        self.leave_all(bank);
        for wanted in self.context.wanted() {
            self.context.lose(wanted.pmd);
        }
        self.places.take_missing();
        self.time.go_blind();
        self.context.preempted(&mut *self.queue);
        Some(HostEvent::Preempted)
    }

    /// There is room for it again. It has no slots yet.
    #[must_use]
    pub(crate) fn restore(&mut self) -> Option<HostEvent> {
        let blind = self.time.see_again()?;
        self.context.restored(blind, &mut *self.queue);
        Some(HostEvent::Restored { blind })
    }
}

/// Counts and slots.
impl AttachedContext {
    /// Takes in what its slots have counted since the last time.
    pub(crate) fn settle(&mut self, bank: &mut SlotBank) {
        for index in self.places.indices() {
            if let Some(reading) = bank.read(self.places.lease(index)) {
                self.take_in(index, reading);
            }
        }
    }

    /// Takes in what the slots have counted whose overflow has come.
    pub(crate) fn settle_slots(&mut self, slots: SlotSet, bank: &mut SlotBank) {
        for index in self.places.indices() {
            let lease = self.places.lease_mut(index);
            if slots.contains(lease.slot()) && bank.holds(lease) {
                lease.overflowed();
                if let Some(reading) = bank.read(lease) {
                    self.take_in(index, reading);
                }
            }
        }
    }

    /// What the slot of a place tells is its PMD's.
    fn take_in(&mut self, index: usize, reading: Reading) {
        let (pmd, settled) = self.places.absorb(index, reading);
        let set = self.context.active_set();
        match settled {
            Settled::Counted(events, provenance) => {
                self.context.count(pmd, events, provenance);
                self.places.note_counted(set, pmd);
            }
            Settled::Uncounted(reason) => {
                self.context.lose(pmd);
                self.places
                    .log_uncounted(set, pmd, "is not counted", reason);
            }
        }
    }

    /// Gives every slot back.
    pub(crate) fn leave_all(&mut self, bank: &mut SlotBank) {
        self.leave_where(bank, |_, _| true);
    }

    /// Gives back those slots which `which` says.
    pub(crate) fn leave_where(
        &mut self,
        bank: &mut SlotBank,
        which: impl Fn(&SlotBank, &SlotLease) -> bool,
    ) {
        for index in self.places.indices() {
            if which(bank, self.places.lease(index)) {
                self.leave(index, bank);
            }
        }
    }

    fn leave(&mut self, index: usize, bank: &mut SlotBank) {
        let lease = self.places.lease(index);
        let is_running = lease.is_running();
        let (last, _) = bank.end(lease);
        if let Some(last) = last.filter(|_| is_running) {
            self.take_in(index, last);
        }
        self.places.remove(index);
    }

    /// Starts and stops its slots as the context wants it; what finds none is
    /// missing. Counts were settled before, or its vCPU was away.
    pub(crate) fn reconcile(&mut self, bank: &mut SlotBank) {
        self.leave_where(bank, |bank, lease| !bank.holds(lease));
        if self.allowance.is_exceeded() {
            // Whoever found that has recorded it.
            let _ = self.preempt(bank);
        }
        let mut wanted = self.context.wanted();
        if self.time.is_blind() {
            // Also what was started or written since it was preempted.
            for wanted in wanted.drain(..) {
                self.context.lose(wanted.pmd);
            }
        }
        for (index, serves) in self.places.serve(wanted).into_iter().enumerate() {
            if let Some(wanted) = serves {
                self.run(index, &wanted, bank);
            } else {
                let lease = self.places.lease_mut(index);
                lease.stand();
                bank.stop(lease);
            }
        }
    }

    /// Has a place count for `wanted`.
    fn run(&mut self, index: usize, wanted: &Wanted, bank: &mut SlotBank) {
        if let Some(claimant) = self.places.give_to(index, wanted.pmd) {
            bank.rename(self.places.lease(index), claimant);
        }
        let lease = self.places.lease_mut(index);
        lease.run();
        bank.start(lease);
        // A set that switches at overflows (PFM_SETFL_OVFL_SWITCH) does so as late as a sample
        // comes: what it counted meanwhile is its own, and no count is missing.
        let arming = lease.await_about(wanted.until);
        bank.arm(lease, arming);
    }

    /// Gives slots to what is missing, where that moves nobody who counts.
    pub(crate) fn place_missing(&mut self, bank: &mut SlotBank) {
        for missing in self.places.take_missing() {
            let Ok(plan) = self.plan(bank.backend(), &missing.request) else {
                self.miss(missing);
                continue;
            };
            match bank.find(&missing.request, &plan.constraint) {
                Some(slots) => self.bind(slots, missing, bank),
                None => self.places.miss(missing),
            }
        }
    }

    /// Puts a PMD that is missing on a slot, or a pair.
    pub(crate) fn bind_slot(&mut self, pmd: u16, slots: SlotSet, bank: &mut SlotBank) {
        if let Some(missing) = self.places.take_missing_pmd(pmd) {
            self.bind(slots, missing, bank);
        }
    }

    fn bind(&mut self, slots: SlotSet, wanted: Wanted, bank: &mut SlotBank) {
        let pmd = wanted.pmd;
        match bank.place(slots, self.places.claimant(pmd), &wanted.request) {
            Ok(lease) => {
                let index = self.places.come(lease, pmd);
                self.run(index, &wanted, bank);
            }
            Err(reason) => {
                let set = self.context.active_set();
                self.places
                    .log_uncounted(set, pmd, "finds no counter", reason);
                self.miss(wanted);
            }
        }
    }

    /// Leaves the slot of a PMD, which is missing from then on.
    pub(crate) fn displace(&mut self, pmd: u16, bank: &mut SlotBank) {
        let Some(index) = self.places.place_of(pmd) else {
            return;
        };
        self.leave(index, bank);
        let mut wanted = self.context.wanted().into_iter();
        if let Some(wanted) = wanted.find(|wanted| wanted.pmd == pmd) {
            self.places.miss(wanted);
        }
    }

    /// Nobody counts for what is still missing.
    pub(crate) fn miss_the_rest(&mut self) {
        for missing in self.places.take_missing() {
            self.miss(missing);
        }
    }

    /// Nobody counts for it, and its context is told so: each time, as its set,
    /// or what was written meanwhile, may be another one.
    fn miss(&mut self, wanted: Wanted) {
        self.context.lose(wanted.pmd);
        self.places.miss(wanted);
    }

    /// Whether something that can be counted finds no slot.
    pub(crate) fn is_short(&self, bank: &SlotBank) -> bool {
        let mut missing = self.places.missing().iter();
        missing.any(|wanted| self.plan(bank.backend(), &wanted.request).is_ok())
    }

    /// What it wants counted that can be.
    pub(crate) fn claims(&self, bank: &SlotBank) -> Vec<Claim> {
        let claim = |(pmd, request, held): (u16, &CountRequest, _)| {
            let demand = self.demand(pmd, request, held, bank)?;
            Some((self.places.claimant(pmd), demand))
        };
        self.places.requests().filter_map(claim).collect()
    }

    /// What it would demand if it were not preempted.
    pub(crate) fn demands_if_restored(&self, bank: &SlotBank) -> Vec<Demand> {
        let wanted = self.context.wanted();
        wanted
            .iter()
            .filter_map(|wanted| self.demand(wanted.pmd, &wanted.request, None, bank))
            .collect()
    }

    fn demand(
        &self,
        pmd: u16,
        request: &CountRequest,
        held: Option<SlotIndex>,
        bank: &SlotBank,
    ) -> Option<Demand> {
        Some(Demand {
            counter: self.context.counter_of(pmd),
            constraint: self.plan(bank.backend(), request).ok()?.constraint,
            held,
        })
    }
}

/// Time, and the switches of event sets that it brings.
impl AttachedContext {
    /// A vCPU's context: its vCPU was left after it `ran` so long. True if that has brought a
    /// switch of sets.
    pub(crate) fn vcpu_leaves(
        &mut self,
        ran: Ticks,
        halted: Nanos,
        tsc_khz: u32,
        bank: &mut SlotBank,
    ) -> bool {
        let ran = self.time.run_time(ran, tsc_khz);
        let switched = self.advance(ran, Nanos(0), bank);
        let due = self.context.switch_due().unwrap_or_default();
        self.time.note_interval(due, ran, halted);
        switched
    }

    /// A core's context: the guest is entered, and time until then was not idle
    /// beyond what it was told.
    pub(crate) fn core_enters(&mut self, tsc: Tsc, tsc_khz: u32) {
        let time = self.time.wall_time_but_idle(tsc, tsc_khz);
        self.pass(time);
    }

    /// The same when the guest was left. True if that has brought a switch of sets.
    pub(crate) fn core_leaves(
        &mut self,
        tsc: Tsc,
        halted: Nanos,
        tsc_khz: u32,
        bank: &mut SlotBank,
    ) -> bool {
        let all = self.time.wall_time(tsc, tsc_khz);
        let halted = halted.min(all);
        self.advance(all - halted, halted, bank)
    }

    /// A core's context: nobody ran for so long. True as above.
    pub(crate) fn core_idles(&mut self, time: Nanos, bank: &mut SlotBank) -> bool {
        let switched = self.advance(Nanos(0), time, bank);
        self.time.note_idle(time);
        switched
    }

    /// TSC at which a core's context has something to do.
    pub(crate) fn core_due(&self, tsc_khz: u32) -> Option<Tsc> {
        self.time.after(self.due_in(tsc_khz)?)
    }

    /// Time passes: some in which a vCPU ran, and some in which nothing did. The
    /// switches of sets that are due take place: true if there were any.
    fn advance(&mut self, ran: Nanos, idle: Nanos, bank: &mut SlotBank) -> bool {
        let all = ran + idle;
        if !self.time.is_blind() && self.context.switch_due().is_some_and(|due| due <= all) {
            // Until now events were those of the set that was active.
            self.settle(bank);
        }
        self.pass(ran);
        if idle > Nanos(0)
            && let Some(own) = self.time.pass(idle)
        {
            self.context.pass(own, false);
        }
        self.switch_if_due()
    }

    /// Time passes in which a vCPU ran, or the VMM worked for one. A switch that
    /// is due does not take place yet.
    pub(crate) fn pass(&mut self, time: Nanos) {
        if self.waits_for_room() {
            self.time.wait(time);
        }
        if let Some(own) = self.time.pass(time) {
            self.context.pass(own, true);
        }
    }

    /// The set's time is up; not while an overflow of it waits to be handled.
    fn switch_if_due(&mut self) -> bool {
        let due = !self.time.is_blind() && self.context.switch_due() == Some(Nanos(0));
        if due {
            self.context.expire();
        }
        due
    }

    /// How long until something is due, or is to be looked at after a while in which
    /// its vCPU only halted.
    pub(crate) fn due_in(&self, tsc_khz: u32) -> Option<Ticks> {
        if self.time.is_blind() {
            return None;
        }
        let due = self.context.switch_due()?;
        Some(self.time.ticks_until(due, tsc_khz))
    }

    /// Whether room is to be looked for again; asked once in a while.
    pub(crate) fn is_to_look_for_room(&mut self) -> bool {
        let waits = self.waits_for_room();
        self.time.is_to_look_for_room(waits)
    }

    fn waits_for_room(&self) -> bool {
        self.time.is_blind() || self.places.is_short()
    }
}
