//! A context on a core: what it wants counted is brought onto slots, and what
//! these have counted is brought to it.

mod group;
mod place;
mod record;
mod samplers;
mod time;

pub(crate) use group::ContextGroup;
pub use group::MAX_CONTEXTS;
pub use record::{HostAudit, HostEvent, HostRecord};

use std::collections::BTreeSet;
use std::sync::Arc;

use perfmon::{Context, ContextId, MessageQueue, Moment, Quantities, Wanted};
use perfmon_abi::consts::PFM_FL_PREEMPTIBLE;
use perfmon_abi::wire::Refusal;
use pmu_model::ibs::IbsSample;
use pmu_model::{CountRequest, Nanos, OwnerId, Tsc, Unavailable, UnavailableReason};

use crate::backend::{CountPlan, CounterBackend};
use crate::filter::EventFilter;
use crate::slot_bank::{Claimant, SlotBank, SlotLease};
use place::PmdLease;
pub(crate) use samplers::no_sampler_of_core;
pub(crate) use time::TickClock;

/// A context that is attached to a vCPU or a core, with its queue.
///
/// Times are those in which its vCPU runs, or the wall time of its core.
#[derive(Debug)]
pub struct AttachedContext {
    id: ContextId,
    context: Box<Context>,
    queue: Box<dyn MessageQueue>,
    /// The vCPU that it is loaded on; none if that is a core.
    vcpu: Option<OwnerId>,
    /// Slots that count for it, and slots that it keeps for a while.
    places: Vec<PmdLease>,
    /// What is to count and has no slot.
    missing: Vec<Wanted>,
    /// Set and PMD of what nobody counts, as the log has it.
    uncounted: BTreeSet<(u16, u16)>,
    /// It was preempted so long ago.
    blind: Option<Nanos>,
    /// The counters that it may use at a time by a lease of the host's arbiter; without a
    /// number it needs none.
    lease: Option<usize>,
    /// What its tool may count; all without it.
    filter: Option<Arc<EventFilter>>,
    /// Its largest set wants more than that: it is preempted for as long.
    beyond_lease: bool,
    /// Time for which there would have been room again, or in which it was not
    /// looked for.
    waited: Nanos,
    /// How late a switch may come because its vCPU only halts; 0 while it runs.
    patience: Nanos,
    clock: TickClock,
    /// Of a core's context: TSC until which it knows how time has passed; none before
    /// a vCPU runs for the first time.
    until: Option<Tsc>,
    /// Time since then that it was told of.
    idle: Nanos,
}

/// A context that could not be attached.
#[derive(Debug)]
pub struct NotLoaded {
    /// The context.
    pub hosted: Box<AttachedContext>,
    /// Why.
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

fn plan(
    filter: Option<&EventFilter>,
    backend: &dyn CounterBackend,
    request: &CountRequest,
) -> Result<CountPlan, Unavailable> {
    if let Some(filter) = filter {
        let denied = filter.check(request);
        denied.map_err(|reason| Unavailable { reason })?;
    }
    if request.is_for_host_alone() {
        let reason = UnavailableReason::HostOnly;
        return Err(Unavailable { reason });
    }
    backend.plan(request)
}

impl AttachedContext {
    /// A context that is attached to nothing yet.
    #[must_use]
    pub fn new(id: ContextId, context: Box<Context>, queue: Box<dyn MessageQueue>) -> Box<Self> {
        Box::new(AttachedContext {
            id,
            context,
            queue,
            vcpu: None,
            places: Vec::new(),
            missing: Vec::new(),
            uncounted: BTreeSet::new(),
            blind: None,
            lease: None,
            beyond_lease: false,
            filter: None,
            waited: Nanos(0),
            patience: Nanos(0),
            clock: TickClock::default(),
            until: None,
            idle: Nanos(0),
        })
    }

    /// What it was made of. It was unloaded before.
    #[must_use]
    pub fn into_parts(self) -> (ContextId, Box<Context>, Box<dyn MessageQueue>) {
        (self.id, self.context, self.queue)
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> ContextId {
        self.id
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
        self.blind.is_some()
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
        self.lease = Some(counters);
        self.keep_to_lease();
    }

    /// Its tool may count no more than this allows.
    pub fn set_filter(&mut self, filter: Arc<EventFilter>) {
        self.filter = Some(filter);
    }

    /// How a request of its tool's would be counted.
    pub(crate) fn plan(
        &self,
        backend: &dyn CounterBackend,
        request: &CountRequest,
    ) -> Result<CountPlan, Unavailable> {
        plan(self.filter.as_deref(), backend, request)
    }

    /// Whether its largest set wants more than its lease holds.
    pub(crate) fn is_beyond_lease(&self) -> bool {
        self.beyond_lease
    }

    /// Looks at the lease again, after its sets have changed.
    pub(crate) fn keep_to_lease(&mut self) {
        self.beyond_lease = self.lease.is_some_and(|lease| lease < self.counters());
    }

    /// Whether it has to give up what it has for want of a lease.
    pub(crate) fn is_to_leave(&self) -> bool {
        self.beyond_lease && self.blind.is_none()
    }

    /// The vCPU that it is loaded on; none if that is a core.
    #[must_use]
    pub fn vcpu(&self) -> Option<OwnerId> {
        self.vcpu
    }

    fn claimant(&self, pmd: u16) -> Claimant {
        Claimant::Context {
            vcpu: self.vcpu,
            context: self.id,
            pmd,
        }
    }

    /// The context is attached from now on.
    pub(crate) fn begin(&mut self, vcpu: Option<OwnerId>, set: u16) {
        self.vcpu = vcpu;
        self.blind = None;
        self.waited = Nanos(0);
        self.patience = Nanos(0);
        self.clock = TickClock::default();
        (self.until, self.idle) = (None, Nanos(0));
        self.uncounted.clear();
        self.context.attached(set);
    }

    /// The context is attached no longer. Its slots are given back, with the
    /// last counts.
    pub(crate) fn end(&mut self, bank: &mut SlotBank) {
        self.leave_all(bank);
        self.context.detached();
        self.blind = None;
        self.missing.clear();
    }

    /// The same on no core: yields what it holds on the one where its vCPU was
    /// parked. Its counts were settled then.
    pub(crate) fn end_away(&mut self) -> Vec<SlotLease> {
        self.context.detached();
        self.blind = None;
        self.missing.clear();
        self.places.drain(..).map(|place| place.lease).collect()
    }

    /// Carries a command out. Counts were settled before, and slots are
    /// brought in line after.
    pub(crate) fn carry_out(
        &mut self,
        call: &mut perfmon_abi::wire::Call,
        values: &dyn Quantities,
    ) -> Result<(), Refusal> {
        self.context.call(call, values)
    }

    /// Takes in a sample of IBS, if it waits for one.
    pub(crate) fn take_in_sample(&mut self, sample: &IbsSample) -> bool {
        self.context.sampled(sample)
    }

    /// Chooses what its samplers count here, by what the sources of the core count.
    pub(crate) fn choose_for_samplers(&mut self, backend: &dyn CounterBackend) {
        let filter = self.filter.clone();
        self.context
            .choose_for_samplers(|request| plan(filter.as_deref(), backend, request).is_ok());
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
        if self.blind.is_some() {
            return None;
        }
        self.leave_all(bank);
        for wanted in self.context.wanted() {
            self.context.lose(wanted.pmd);
        }
        self.missing.clear();
        self.blind = Some(Nanos(0));
        self.waited = Nanos(0);
        self.context.preempted(&mut *self.queue);
        Some(HostEvent::Preempted)
    }

    /// There is room for it again. It has no slots yet.
    #[must_use]
    pub(crate) fn restore(&mut self) -> Option<HostEvent> {
        let blind = self.blind.take()?;
        self.waited = Nanos(0);
        self.context.restored(blind, &mut *self.queue);
        Some(HostEvent::Restored { blind })
    }
}
