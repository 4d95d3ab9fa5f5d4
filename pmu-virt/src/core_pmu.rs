//! One core's PMU: its physical counters, and the host contexts that may count
//! on them beside the guest.

#[cfg(feature = "contexts")]
mod book;
#[cfg(not(feature = "contexts"))]
#[path = "core_pmu/no_book.rs"]
mod book;
mod planner;

#[cfg(feature = "contexts")]
pub(crate) use book::GuestClaim;
pub(crate) use book::{Book, FirmDemands};
#[cfg(feature = "contexts")]
pub(crate) use hosting::{no_context, write_until};
pub(crate) use planner::{Planner, fixed_request};

use std::sync::Arc;

use pmu_model::{CountRequest, Unavailable};

use crate::backend::{CountPlan, CounterBackend};
use crate::filter::EventFilter;
use crate::slot_bank::{HolderReport, SlotBank, SwitchStats};
#[cfg(feature = "contexts")]
use hosting::CoreHost;

/// The PMU of one core. Owned by the core's thread.
#[derive(Debug)]
pub struct CorePmu {
    bank: SlotBank,
    #[cfg(feature = "contexts")]
    host: CoreHost,
    /// What guests may have counted.
    filter: Arc<EventFilter>,
    book: Book,
}

impl CorePmu {
    /// The counters of `backend`, all free.
    pub fn new(backend: Box<dyn CounterBackend>) -> Self {
        CorePmu {
            bank: SlotBank::new(backend),
            #[cfg(feature = "contexts")]
            host: CoreHost::default(),
            filter: Arc::default(),
            book: Book::default(),
        }
    }

    /// Which events guests may have counted here, from now on; all without it.
    pub fn set_event_filter(&mut self, filter: Arc<EventFilter>) {
        self.filter = filter;
    }

    /// How a request of the guest's would be counted.
    ///
    /// # Errors
    /// Why it is not: nobody can, or the event filter denies it.
    pub fn plan_for_guest(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        self.planner().plan_for_guest(request)
    }

    pub(crate) fn planner(&self) -> Planner<'_> {
        Planner::new(&self.bank, &self.filter)
    }

    #[inline]
    pub(crate) fn bank(&self) -> &SlotBank {
        &self.bank
    }

    #[inline]
    pub(crate) fn bank_mut(&mut self) -> &mut SlotBank {
        &mut self.bank
    }

    /// What is wanted of this core.
    pub(crate) fn book(&self) -> &Book {
        &self.book
    }

    /// How many counters of a vCPU that comes have a slot here beside what the core's
    /// own contexts rely on, going by the events that its guest can name.
    #[must_use]
    pub fn room(&self) -> usize {
        self.book.room(self.planner())
    }

    /// The vCPUs of the VM, by bit, for whose named events the core's own contexts leave no
    /// room.
    #[must_use]
    pub fn refuses(&self) -> u64 {
        self.book.refuses(self.planner())
    }

    /// The backend that counts.
    pub fn backend(&self) -> &dyn CounterBackend {
        self.bank.backend()
    }

    /// What switches have cost so far.
    pub fn stats(&self) -> SwitchStats {
        self.bank.stats()
    }

    /// Operations on physical counters so far, switches or not.
    pub fn operations(&self) -> u64 {
        self.bank.operations()
    }

    /// Who holds which slot, by ascending slot.
    #[must_use]
    pub fn holders(&self) -> Vec<HolderReport> {
        self.bank.holders()
    }

    /// Slots that nobody holds.
    #[must_use]
    pub fn free_slots(&self) -> u32 {
        self.bank.free().len()
    }
}

/// What tools of the host do to a core: contexts that count there beside the guest, and those
/// of the vCPUs that are on it.
#[cfg(feature = "contexts")]
mod hosting {
    use std::fmt;
    use std::num::NonZeroU32;
    use std::time::Duration;

    use perfmon::Quantities;
    use perfmon_abi::consts::{PFM_REG_RETFL_EINVAL, PFM_REG_RETFL_MASK};
    use perfmon_abi::wire::{Call, Errno, Refusal, Subcode};
    use pmu_model::{
        ContextId, CountRequest, Nanos, OwnerId, Ticks, Tsc, Unavailable, UnavailableReason,
    };

    use super::CorePmu;
    use super::book::{GuestClaim, ResourceClaim};
    use super::planner::Planner;
    use crate::attached::{
        AttachedContext, ContextGroup, HostAudit, HostEvent, HostRecord, MAX_CONTEXTS, NotLoaded,
        TickClock, no_sampler_of_core,
    };
    use crate::policy::HostPolicy;
    use crate::slot_bank::SlotBank;

    /// What host contexts need of a core.
    #[derive(Debug, Default)]
    pub(crate) struct CoreHost {
        /// The contexts of the core.
        contexts: ContextGroup,
        /// Most contexts of the core, and of each vCPU on it.
        most: usize,
        /// Ticks of the TSC in a millisecond; none: contexts are not taken.
        tsc_khz: Option<NonZeroU32>,
        audit: Option<Box<dyn HostAudit>>,
        /// A context of the core was called while no vCPU was there to place for it.
        changed: bool,
    }

    impl CoreHost {
        /// Whether the core has contexts of its own.
        #[inline]
        pub(crate) fn has_contexts(&self) -> bool {
            !self.contexts.is_empty()
        }

        pub(crate) fn contexts(&self) -> impl Iterator<Item = &AttachedContext> {
            self.contexts.iter()
        }

        pub(crate) fn contexts_mut(&mut self) -> impl Iterator<Item = &mut AttachedContext> {
            self.contexts.iter_mut()
        }

        /// Refuses one more context of `whose`, which has `group`, if these are as many as
        /// there may be.
        pub(crate) fn check_group(
            &self,
            whose: &dyn fmt::Display,
            group: &ContextGroup,
        ) -> Result<(), Refusal> {
            if group.len() < self.most {
                return Ok(());
            }
            let reason = format!(
                "{whose} has {} already, and --contexts-per-vcpu allows {}; unload one first",
                group.names(),
                self.most
            );
            Err(Refusal::new(Errno::EBUSY, reason))
        }

        pub(crate) fn tsc_khz(&self) -> u32 {
            self.tsc_khz.map_or(1, NonZeroU32::get)
        }

        /// Whether contexts can be loaded here.
        #[inline]
        pub(crate) fn is_enabled(&self) -> bool {
            self.tsc_khz.is_some()
        }

        /// Whether the core's contexts want something else than when this was asked
        /// last.
        pub(crate) fn take_changed(&mut self) -> bool {
            std::mem::take(&mut self.changed)
        }

        pub(crate) fn record(
            &mut self,
            context: ContextId,
            vcpu: Option<OwnerId>,
            event: HostEvent,
        ) {
            log::debug!("{context}: {event:?}");
            if let Some(audit) = &mut self.audit {
                audit.record(&HostRecord {
                    context,
                    vcpu,
                    event,
                });
            }
        }

        /// TSC at which a context of the core has something to do.
        pub(crate) fn deadline(&self) -> Option<Tsc> {
            let due = |hosted: &AttachedContext| hosted.core_due(self.tsc_khz());
            self.contexts().filter_map(due).min()
        }
    }

    impl CorePmu {
        /// What contexts of the host need of it.
        #[inline]
        pub(crate) fn host(&self) -> &CoreHost {
            &self.host
        }

        pub(crate) fn host_mut(&mut self) -> &mut CoreHost {
            &mut self.host
        }

        pub(crate) fn parts_mut(&mut self) -> (&mut CoreHost, &mut SlotBank) {
            (&mut self.host, &mut self.bank)
        }

        /// What the guest of `vcpu` may want of this core ([`Book::set_guest`]).
        pub(crate) fn set_guest(&mut self, vcpu: OwnerId, generation: u64, guest: GuestClaim) {
            self.book.set_guest(vcpu, generation, guest);
        }

        /// Lets host contexts be loaded on this core, and on vCPUs that run on it: on
        /// each so many as [`CorePmu::limit_contexts`] says, [`MAX_CONTEXTS`] by default.
        pub fn enable_hosting(&mut self, policy: HostPolicy, tsc_khz: NonZeroU32) {
            self.book.set_policy(policy);
            self.host.tsc_khz = Some(tsc_khz);
            self.host.most = MAX_CONTEXTS;
        }

        /// Allows `most` contexts on this core and on each vCPU that runs on it, and no
        /// more than [`MAX_CONTEXTS`]. With 1 they are as perfmon2 has them.
        pub fn limit_contexts(&mut self, most: usize) {
            self.host.most = most.clamp(1, MAX_CONTEXTS);
        }

        /// Ticks of the TSC in a millisecond; 1 where contexts are not taken.
        #[must_use]
        pub fn tsc_khz(&self) -> u64 {
            u64::from(self.host.tsc_khz())
        }

        /// Who is told of decisions about host contexts.
        pub fn set_host_audit(&mut self, audit: Box<dyn HostAudit>) {
            self.host.audit = Some(audit);
        }

        /// Attaches a context to this core. It counts from the next time on that a
        /// vCPU runs. While a vCPU is attached, go by
        /// [`VcpuPmu::with_core`](crate::VcpuPmu::with_core).
        ///
        /// # Errors
        /// EBUSY: the core has as many contexts as it may, or there is no room, and who
        /// has it. EINVAL: there is no such set, or nothing counts one of its events.
        pub fn load_context(
            &mut self,
            hosted: Box<AttachedContext>,
            set: u16,
        ) -> Result<(), NotLoaded> {
            let free = self.host.check_group(&"the core", &self.host.contexts);
            if let Err(refusal) = free.and_then(|()| hosted.check_samplers(no_sampler_of_core)) {
                return Err(NotLoaded::new(hosted, refusal));
            }
            let hosted = self.admit_hosted(hosted, None, set)?;
            self.host.contexts.push(*hosted);
            self.host.changed = true;
            Ok(())
        }

        /// Detaches a context of this core, with all that it has counted.
        pub fn unload_context(&mut self, id: ContextId) -> Option<Box<AttachedContext>> {
            let mut hosted = self.host.contexts.remove(id)?;
            hosted.end(&mut self.bank);
            self.dismiss(&hosted);
            self.host.changed = true;
            Some(hosted)
        }

        /// The contexts of this core, the oldest first.
        pub fn host_contexts(&self) -> impl Iterator<Item = &AttachedContext> {
            self.host.contexts()
        }

        /// A context of this core.
        #[must_use]
        pub fn host_context(&self, id: ContextId) -> Option<&AttachedContext> {
            self.host.contexts.get(id)
        }

        /// Carries out a command on a context of this core. While a vCPU is
        /// attached, go by [`VcpuPmu::with_core`](crate::VcpuPmu::with_core).
        ///
        /// # Errors
        /// The command's; EINVAL if there is no such context.
        pub fn call_context(
            &mut self,
            id: ContextId,
            call: &mut Call,
            values: &dyn Quantities,
        ) -> Result<(), Refusal> {
            // What it does to the core leaves the group alone.
            let mut contexts = std::mem::take(&mut self.host.contexts);
            let result = match contexts.get_mut(id) {
                Some(hosted) => {
                    self.host.changed |= !hosted.is_only_read_by(call);
                    let refused = hosted.refused_sampler(call, no_sampler_of_core);
                    self.call_hosted(hosted, call, values, refused)
                }
                None => Err(no_context("core", id)),
            };
            self.host.contexts = contexts;
            result
        }

        /// A context of this core may use so many counters at a time from now on
        /// ([`AttachedContext::set_lease`]). While a vCPU is attached, go by
        /// [`VcpuPmu::with_core`](crate::VcpuPmu::with_core).
        pub fn lease_context(&mut self, id: ContextId, counters: usize) {
            let Some(hosted) = self.host.contexts.get_mut(id) else {
                return;
            };
            hosted.set_lease(counters);
            if hosted.is_to_leave() {
                self.host.record(id, None, HostEvent::Preempted);
            }
            self.host.changed = true;
        }

        /// `time` has passed in which no vCPU ran on the core, since the last one was
        /// left or since the last call.
        pub fn pass_idle(&mut self, time: Duration) {
            let time = Nanos::from(time);
            for hosted in self.host.contexts.iter_mut() {
                self.host.changed |= hosted.core_idles(time, &mut self.bank);
            }
        }

        /// Time until the guest is entered, as far as it was not idle.
        pub(crate) fn host_enters(&mut self, tsc: Tsc) {
            let khz = self.host.tsc_khz();
            for hosted in self.host.contexts_mut() {
                hosted.core_enters(tsc, khz);
            }
        }

        /// Time in the guest. True if it has brought a switch of sets.
        pub(crate) fn host_leaves(&mut self, tsc: Tsc, halted: Ticks) -> bool {
            let (khz, halted) = (self.host.tsc_khz(), self.idle_time(halted));
            let mut switched = false;
            for hosted in self.host.contexts.iter_mut() {
                switched |= hosted.core_leaves(tsc, halted, khz, &mut self.bank);
            }
            switched
        }

        /// Of a time that the clock of a context has counted already.
        pub(crate) fn idle_time(&self, ticks: Ticks) -> Nanos {
            TickClock::default().pass(ticks, self.host.tsc_khz())
        }

        /// Looks whether there is room for a context, and begins with it if so.
        pub(crate) fn admit_hosted(
            &mut self,
            mut hosted: Box<AttachedContext>,
            vcpu: Option<OwnerId>,
            set: u16,
        ) -> Result<Box<AttachedContext>, NotLoaded> {
            hosted.choose_for_samplers(self.bank.backend());
            let admitted = (hosted.context().prepare_load(set))
                .and_then(|()| self.check_hosting())
                .and_then(|()| self.check_demands(&hosted))
                .and_then(|()| {
                    let planner = Planner::new(&self.bank, &self.filter);
                    self.book.claim(planner, &hosted, vcpu)
                });
            match admitted {
                Ok(standing) => {
                    hosted.begin(vcpu, set);
                    let event = HostEvent::Loaded { standing };
                    self.host.record(hosted.id(), vcpu, event);
                    Ok(hosted)
                }
                Err(refusal) => {
                    let event = HostEvent::Refused {
                        refusal: refusal.clone(),
                    };
                    self.host.record(hosted.id(), vcpu, event);
                    let beside = match refusal.errno {
                        Errno::EBUSY => {
                            let wish = ResourceClaim::of(&hosted, vcpu);
                            self.book.guest_limit(self.planner(), &wish)
                        }
                        _ => None,
                    };
                    Err(NotLoaded {
                        hosted,
                        refusal,
                        beside,
                    })
                }
            }
        }

        fn check_hosting(&self) -> Result<(), Refusal> {
            match self.host.tsc_khz {
                Some(_) => Ok(()),
                None => Err(Refusal::new(
                    Errno::EBUSY,
                    "this core takes no host contexts",
                )),
            }
        }

        /// Whether each event of each set can be counted.
        fn check_demands(&self, hosted: &AttachedContext) -> Result<(), Refusal> {
            for (set, requests) in hosted.context().demands() {
                for (pmd, request) in requests {
                    if let Err(refusal) = hosted.plan(self.bank.backend(), &request) {
                        let reason = format!("event set {set}, PMD{pmd}: {refusal}");
                        return Err(not_countable(reason, &refusal));
                    }
                }
            }
            Ok(())
        }

        /// A vCPU comes with its context. What it may rely on here.
        pub(crate) fn adopt(&mut self, hosted: &mut AttachedContext) {
            if self.book.standing_of(hosted.id()).is_none() {
                hosted.choose_for_samplers(self.bank.backend());
                self.reclaim(hosted);
            }
        }

        /// A context goes: what it had is the others', which may rely on more now.
        pub(crate) fn dismiss(&mut self, hosted: &AttachedContext) {
            let vcpu = hosted.vcpu();
            self.forget_claim(hosted.id());
            self.host.record(hosted.id(), vcpu, HostEvent::Unloaded);
        }

        /// What a context wants has changed while it is loaded.
        fn reclaim(&mut self, hosted: &AttachedContext) {
            let planner = Planner::new(&self.bank, &self.filter);
            if let Some(refusal) = self.book.reclaim(planner, hosted) {
                let (context, vcpu) = (hosted.id(), hosted.vcpu());
                log::info!("{context}: {refusal}");
                self.host.record(context, vcpu, HostEvent::Overdrawn);
            }
        }

        /// A context of a vCPU goes on elsewhere: what it had is the others', which may rely
        /// on more now.
        pub(crate) fn forget_claim(&mut self, context: ContextId) {
            let planner = Planner::new(&self.bank, &self.filter);
            self.book.forget(planner, context);
        }

        /// Carries a command out on a context that is on this core. `refused`: a write of a
        /// control that is not to be, for a reason that is not the core's.
        pub(crate) fn call_hosted(
            &mut self,
            hosted: &mut AttachedContext,
            call: &mut Call,
            values: &dyn Quantities,
            refused: Option<(usize, Refusal)>,
        ) -> Result<(), Refusal> {
            hosted.settle(&mut self.bank);
            let mut review = self.review(hosted, call);
            review.refused = [review.refused, refused]
                .into_iter()
                .flatten()
                .min_by_key(|(at, _)| *at);
            let result = match review.refused {
                None => hosted.carry_out(call, values),
                Some((at, refusal)) => write_until(at, refusal, hosted, call, values),
            };
            if review.demands_change {
                self.reclaim(hosted);
                hosted.keep_to_lease();
                if hosted.is_to_leave() {
                    log::info!("{}: wants more counters than its lease holds", hosted.id());
                    self.host
                        .record(hosted.id(), hosted.vcpu(), HostEvent::Overdrawn);
                }
            }
            result
        }

        /// What a command means for the counters. Looks at what is written alone: a
        /// context can have many sets. What is written as it was needs no new plan.
        fn review(&self, hosted: &AttachedContext, call: &Call) -> Review {
            let mut review = Review {
                demands_change: matches!(call, Call::DeleteEvtsets(_)),
                refused: None,
            };
            let Call::WritePmcs(writes) = call else {
                return review;
            };
            let context = hosted.context();
            for (at, write) in writes.iter().enumerate() {
                let (before, after) = (context.present_request(write), context.request_of(write));
                if before == after {
                    continue;
                }
                let plan = |request: CountRequest| hosted.plan(self.bank.backend(), &request);
                let before = before.and_then(|request| Some(plan(request).ok()?.constraint));
                let after = match after.map(plan).transpose() {
                    Ok(after) => after.map(|plan| plan.constraint),
                    Err(refusal) => {
                        let reason =
                            format!("event set {}, PMC{}: {refusal}", write.set, write.num);
                        review.refused = Some((at, not_countable(reason, &refusal)));
                        None
                    }
                };
                review.demands_change |= before != after;
                if review.refused.is_some() {
                    break;
                }
            }
            review
        }
    }

    /// What a command on a context means for the counters.
    struct Review {
        /// It may make the context demand other counters.
        demands_change: bool,
        /// The first write of a control that nobody could count for.
        refused: Option<(usize, Refusal)>,
    }

    /// Carries out the writes before the bad one, and marks that.
    pub(crate) fn write_until(
        at: usize,
        refusal: Refusal,
        hosted: &mut AttachedContext,
        call: &mut Call,
        values: &dyn Quantities,
    ) -> Result<(), Refusal> {
        let Call::WritePmcs(writes) = call else {
            return Err(refusal);
        };
        let mut rest = writes.split_off(at);
        let done = match at {
            0 => Ok(()),
            _ => hosted.carry_out(call, values),
        };
        if let (Ok(()), Some(bad)) = (&done, rest.first_mut()) {
            bad.flags = bad.flags & !PFM_REG_RETFL_MASK | PFM_REG_RETFL_EINVAL;
        }
        if let Call::WritePmcs(writes) = call {
            writes.append(&mut rest);
        }
        done.and(Err(refusal))
    }

    /// Nobody counts an event, for this reason, or nobody may.
    fn not_countable(reason: String, why: &Unavailable) -> Refusal {
        let subcode = match why.reason {
            UnavailableReason::Denied { .. } => Subcode::NoHypervisorAccess,
            _ => Subcode::PicNotCapable,
        };
        Refusal::new(Errno::EINVAL, reason).because(subcode)
    }

    /// There is no such context where one is addressed.
    pub(crate) fn no_context(of: &str, id: ContextId) -> Refusal {
        Refusal::new(Errno::EINVAL, format!("the {of} has no {id}"))
    }
}
