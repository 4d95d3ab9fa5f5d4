//! The host contexts of a vCPU, and those of the core which it is on.

use arbiter::{
    Answer, Cookie, CounterSet, Effects, Layer, Outcome, PerKind, Reason, Request, Wanted,
};
use perfmon::{ContextId, Moment, Quantities, Wish};
use perfmon_abi::wire::{Call, Errno, Refusal};
use pmu_model::{
    CountRequest, EventCode, KnownEvent, Nanos, Progress, Ticks, Tsc, UnavailableReason,
};

use super::{Here, VcpuPmu};
use crate::attached::{AttachedContext, GuestLimit, HostEvent, NotLoaded};
use crate::core_pmu::{CorePmu, GuestClaim, fixed_request, no_context, write_until};
use crate::slot_bank::SlotBank;

impl VcpuPmu {
    /// Attaches a context to this vCPU, which is on a core.
    ///
    /// # Errors
    /// EBUSY: the vCPU has as many contexts as it may or is on no core, or there is
    /// no room, and who has it. EINVAL: there is no such set, or nothing counts one
    /// of its events.
    pub fn load_context(
        &mut self,
        core: Option<&mut CorePmu>,
        hosted: Box<AttachedContext>,
        set: u16,
    ) -> Result<(), NotLoaded> {
        let here = &mut self.here(core);
        let Some(core) = here else {
            let reason = format!("{} is on no core at present; try again", self.owner);
            return Err(NotLoaded::new(hosted, Refusal::new(Errno::EBUSY, reason)));
        };
        let free = core.host.check_group(&self.owner, &self.hosts);
        if let Err(refusal) =
            free.and_then(|()| hosted.check_samplers(|kind| self.check_free(kind)))
        {
            return Err(NotLoaded::new(hosted, refusal));
        }
        self.introduce_anew(core);
        let hosted = core.admit_hosted(hosted, Some(self.owner), set)?;
        self.hosts.push(*hosted);
        self.host_changed(here);
        Ok(())
    }

    /// Detaches a context of this vCPU, with all that it has counted.
    pub fn unload_context(
        &mut self,
        core: Option<&mut CorePmu>,
        id: ContextId,
    ) -> Option<Box<AttachedContext>> {
        let here = &mut self.here(core);
        let mut hosted = self.hosts.remove(id)?;
        match here {
            Some(core) => {
                hosted.end(&mut core.bank);
                core.dismiss(&hosted);
            }
            // Its slots are given back when the vCPU comes to the core again.
            None => self.orphans.push((id, hosted.end_away())),
        }
        self.host_changed(here);
        Some(hosted)
    }

    /// The contexts of this vCPU, the oldest first.
    pub fn host_contexts(&self) -> impl Iterator<Item = &AttachedContext> {
        self.hosts.iter()
    }

    /// A context of this vCPU.
    #[must_use]
    pub fn host_context(&self, id: ContextId) -> Option<&AttachedContext> {
        self.hosts.get(id)
    }

    /// Carries out a command on a context of this vCPU. An overflow may be found
    /// that nobody has handled yet ([`VcpuPmu::has_host_overflow`]).
    ///
    /// # Errors
    /// The command's; EINVAL if there is no such context.
    pub fn call_context(
        &mut self,
        core: Option<&mut CorePmu>,
        id: ContextId,
        call: &mut Call,
        values: &dyn Quantities,
    ) -> Result<(), Refusal> {
        let here = &mut self.here(core);
        let refused = self
            .hosts
            .get(id)
            .and_then(|hosted| hosted.refused_sampler(call, |kind| self.check_free(kind)));
        let Some(hosted) = self.hosts.get_mut(id) else {
            return Err(no_context("vCPU", id));
        };
        let only_reads = hosted.is_only_read_by(call);
        let result = match here {
            Some(core) => core.call_hosted(hosted, call, values, refused),
            // Its counts were settled when it was parked.
            None => {
                let done = match refused {
                    Some((at, refusal)) => write_until(at, refusal, hosted, call, values),
                    None => hosted.carry_out(call, values),
                };
                hosted.keep_to_lease();
                done
            }
        };
        if !only_reads {
            self.host_changed(here);
        }
        result
    }

    /// A context of this vCPU may use so many counters at a time from now on
    /// ([`AttachedContext::set_lease`]).
    pub fn lease_context(&mut self, core: Option<&mut CorePmu>, id: ContextId, counters: usize) {
        let here = &mut self.here(core);
        let Some(hosted) = self.hosts.get_mut(id) else {
            return;
        };
        hosted.set_lease(counters);
        if let (true, Some(core)) = (hosted.is_to_leave(), here.as_deref_mut()) {
            core.host.record(id, hosted.vcpu(), HostEvent::Preempted);
        }
        // On no core it has nothing to leave: it looks again when its vCPU is back.
        self.host_changed(here);
    }

    /// Works with the core that the vCPU is on, and with the contexts of that
    /// core; what that changes for the vCPU takes place at once. While it is
    /// switched out, nothing does.
    pub fn with_core<R>(&mut self, core: &mut CorePmu, act: impl FnOnce(&mut CorePmu) -> R) -> R {
        if !self.attached {
            return act(core);
        }
        self.introduce(core);
        let result = act(core);
        if core.host.take_changed() {
            self.host_changed(&mut Some(core));
        }
        result
    }

    /// Whether a counter of the vCPU's or the core's contexts has overflowed, and
    /// [`VcpuPmu::sample_hosts`] is to be called before the guest runs on.
    #[inline]
    #[must_use]
    pub fn has_host_overflow(&self, core: &CorePmu) -> bool {
        self.hosting && self.overflow_waits(Some(core))
    }

    fn overflow_waits(&self, core: Option<&CorePmu>) -> bool {
        let mut hosts = self.hosts(core);
        hosts.any(|hosted| hosted.context().has_pending_overflow())
    }

    /// What the contexts that are to sample now record of the guest's memory: before
    /// [`VcpuPmu::sample_hosts`], for [`Quantities::guest`].
    #[must_use]
    pub fn host_wish(&self, core: &CorePmu) -> Wish {
        let all = self.hosts(Some(core)).map(AttachedContext::context);
        let sampling = all.filter(|context| context.has_pending_overflow());
        sampling.fold(Wish::default(), |wish, context| wish.and(context.wish()))
    }

    /// Handles the overflows of host contexts: samples, notifications, resets.
    pub fn sample_hosts(&mut self, core: &mut CorePmu, moment: &Moment, values: &dyn Quantities) {
        let here = &mut self.here(Some(core));
        let mut sampled = false;
        self.each_host(here, |hosted, bank| {
            if hosted.context().has_pending_overflow() {
                // What is recorded with it is told as of now.
                hosted.settle(bank);
                hosted.sample(moment, values);
                sampled = true;
            }
        });
        if sampled {
            self.arrange(here);
        }
    }

    /// Keeps the vCPU out of its guest until somebody lets it go on.
    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Whether a tool has paused it.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether it may not enter its guest: a tool has paused it, or a context of its keeps
    /// it off its core until PFM_RESTART.
    #[inline]
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        if self.paused {
            return true;
        }
        let mut hosts = self.hosts.iter();
        hosts.any(|hosted| hosted.context().is_blocked())
    }

    /// The contexts that are on the vCPU's core.
    pub(super) fn hosts<'a>(
        &'a self,
        core: Option<&'a CorePmu>,
    ) -> impl Iterator<Item = &'a AttachedContext> {
        let of_core = core.into_iter().flat_map(|core| core.host.contexts());
        self.hosts.iter().chain(of_core)
    }

    /// Works with each of them.
    pub(super) fn each_host(
        &mut self,
        here: &mut Here<'_>,
        mut act: impl FnMut(&mut AttachedContext, &mut SlotBank),
    ) {
        let Some(core) = here else { return };
        for hosted in self.hosts.iter_mut().chain(core.host.contexts_mut()) {
            act(hosted, &mut core.bank);
        }
    }

    /// A context has come or gone, or wants something else.
    fn host_changed(&mut self, here: &mut Here<'_>) {
        self.note_hosts(here.as_deref());
        self.return_samplers(here);
        if self.hosting {
            self.arrange(here);
        }
        // What it has given up may be what the guest waits for.
        let waits = |reason| matches!(reason, Some(UnavailableReason::Busy { .. }));
        if self.needs_places() || self.counters.iter().any(|one| waits(one.unavailable)) {
            self.distribute(here);
        }
        self.refresh_needs(here.as_deref());
    }

    /// Whether there are contexts on this core.
    pub(super) fn note_hosts(&mut self, core: Option<&CorePmu>) {
        self.hosting = core.is_some_and(|core| !self.hosts.is_empty() || core.host.has_contexts());
    }

    /// Before the guest is entered.
    pub(super) fn enter_hosts(&mut self, here: &mut Here<'_>, tsc: Tsc) {
        if let Some(core) = here {
            core.host_enters(tsc);
        }
    }

    /// Takes in what happened, for the host contexts. `ran`: how long the guest did.
    pub(super) fn observe_hosts(&mut self, here: &mut Here<'_>, progress: &Progress, ran: Ticks) {
        let Some(core) = here else { return };
        let overflowed = core.bank.take_host_overflows();
        if !overflowed.is_empty() {
            self.each_host(here, |hosted, bank| hosted.settle_slots(overflowed, bank));
        }
        let Progress::Left { tsc, halted, .. } = *progress else {
            return;
        };
        // Nothing comes of an overflow whose count nobody told; the slot is armed
        // anew.
        let disarmed = !overflowed.is_empty() && !self.overflow_waits(here.as_deref());
        // A write of the guest's may have displaced what nobody has told yet.
        self.each_host(here, |hosted, _| hosted.miss_the_rest());
        let Some(core) = here else { return };
        let mut changed = core.host_leaves(tsc, halted);
        let halted = core.idle_time(halted);
        for hosted in self.hosts.iter_mut() {
            let time = hosted.run_time(ran, core.host.tsc_khz());
            changed |= hosted.advance(time, Nanos(0), &mut core.bank);
            hosted.note_interval(time, halted);
        }
        let mut look = false;
        self.each_host(here, |hosted, _| look |= hosted.is_to_look_for_room());
        if look {
            self.restore_hosts(here);
        }
        if changed || look || disarmed {
            self.arrange(here);
        }
    }

    /// TSC value at which a host context has something to do.
    pub(super) fn host_deadline(&self, core: Option<&CorePmu>) -> Option<Tsc> {
        let core = core?;
        let due = |hosted: &AttachedContext| hosted.due_in(core.host.tsc_khz());
        let of_vcpu = self.hosts.iter().filter_map(due).min().zip(self.entered);
        let of_vcpu = of_vcpu.map(|(due, entered)| entered + due);
        [of_vcpu, core.host.deadline()].into_iter().flatten().min()
    }

    /// A core switches the vCPU in: its contexts look after their places.
    pub(super) fn return_hosts(&mut self, here: &mut Here<'_>) {
        let Some(core) = here else { return };
        self.bury_orphans(core);
        for hosted in self.hosts.iter_mut() {
            core.adopt(hosted);
        }
        self.each_host(here, AttachedContext::reconcile);
        self.return_samplers(here);
    }

    /// The vCPU goes: counts of its contexts are those until now.
    pub(super) fn settle_hosts(&mut self, core: &mut CorePmu) {
        for hosted in self.hosts.iter_mut() {
            hosted.settle(&mut core.bank);
        }
    }

    /// The vCPU leaves `core`, on which it was parked, and its contexts with it.
    pub(super) fn take_hosts_off(&mut self, core: &mut CorePmu) {
        self.bury_orphans(core);
        for hosted in self.hosts.iter_mut() {
            hosted.leave_all(&mut core.bank);
            core.forget_claim(hosted.id());
        }
    }

    /// Gives back what contexts held on `core` that were unloaded while the vCPU was
    /// parked there.
    fn bury_orphans(&mut self, core: &mut CorePmu) {
        for (context, leases) in self.orphans.drain(..) {
            leases.iter().for_each(|lease| core.bank.release(lease));
            core.forget_claim(context);
        }
    }

    /// Tells the core what guests may want of it, if nobody has.
    pub(super) fn introduce(&self, core: &mut CorePmu) {
        if !core
            .book()
            .knows_guest(self.owner, self.grant.budget.generation)
        {
            self.introduce_anew(core);
        }
    }

    /// The same after that has changed.
    pub(super) fn introduce_anew(&self, core: &mut CorePmu) {
        let generation = self.grant.budget.generation;
        core.set_guest(self.owner, generation, self.wish());
    }

    /// Counters that the guest was given and that the hypervisor has not reserved.
    fn usable(&self) -> CounterSet {
        let reserved = self.held_by(Layer::Hypervisor);
        let counters = self.model.counters();
        let counters = counters.filter(|counter| self.grant.holds(*counter));
        counters
            .filter(|counter| !reserved.contains(*counter))
            .collect()
    }

    /// How many of them the guest may want at a time, by its budget.
    pub(super) fn wished(&self) -> usize {
        let (budget, there) = (self.grant.budget, PerKind::count(self.usable()));
        // What it will have again nobody else is promised.
        let (most, later) = (budget.most(), budget.later());
        let at_most = |of: fn(PerKind) -> u8| of(there).min(of(most).max(of(later)));
        usize::from(at_most(|kind| kind.programmable) + at_most(|kind| kind.fixed))
    }

    /// What the guest may want: counters of the model that it was given and that
    /// the hypervisor has not reserved, and each event that has a name.
    pub(super) fn wish(&self) -> GuestClaim {
        let events = KnownEvent::ALL.into_iter().filter_map(|event| {
            let event = EventCode::of(self.model.events(), event)?;
            Some(CountRequest::plain(event, true, true))
        });
        let fixed = self.usable().iter().filter_map(fixed_request);
        let reservations = self.reservations.as_ref();
        GuestClaim {
            counters: self.wished(),
            events: events.chain(fixed).collect(),
            family: Some(self.model.events()),
            holdings: reservations.map(|reservations| reservations.holdings.clone()),
        }
    }

    /// Asks the owners of this vCPU's counters, for a host's tool, to keep to `limit`.
    /// `is_there`: the vCPU can be on the core of the tool's context. The hypervisor then
    /// holds what they give up, until `cookie` gives it back. `None` without
    /// reservations; [`Outcome::Nothing`] where they keep to it as it is.
    ///
    /// # Errors
    /// As [`arbiter::PcrUnit::request`].
    pub fn ask_owners(
        &mut self,
        core: Option<&mut CorePmu>,
        (limit, is_there): (GuestLimit, bool),
        cookie: Cookie,
    ) -> Option<Result<Outcome, Reason>> {
        let held = PerKind::count(self.guests_holding()).programmable;
        // Of what the guest's budget leaves out, counters fewer are none fewer to use.
        let left_out = || {
            let usable = PerKind::count(self.usable());
            let usable = usize::from(usable.programmable + usable.fixed);
            let left_out = usable.saturating_sub(self.wished());
            u8::try_from(left_out).unwrap_or(u8::MAX)
        };
        let fewer = match limit.fewer {
            fewer if is_there && fewer > 0 => fewer.saturating_add(left_out()),
            _ => 0,
        };
        let count = held.saturating_sub(limit.most).max(fewer);
        let request = Request::Reserve {
            wanted: Wanted::Held(count),
            cookie,
            lease_ms: None,
            event: None,
        };
        if count == 0 {
            return self.reservations().map(|_| Ok(Outcome::Nothing));
        }
        let asked = self.request_for_tool(core, request)?;
        Some(asked.map(|answer| answer.outcome))
    }

    /// Makes a request for a host's tool.
    fn request_for_tool(
        &mut self,
        mut core: Option<&mut CorePmu>,
        request: Request,
    ) -> Option<Result<Answer, Reason>> {
        let done = self.arbitrate(core.as_deref_mut(), |unit, cx| {
            match unit.request(Layer::HostTool, request, cx) {
                Ok((answer, effects)) => (Ok(answer), effects),
                Err(reason) => (Err(reason), Effects::NONE),
            }
        });
        self.introduce_if_here(core);
        done
    }

    /// What the owners have answered; `None` while they have not, or without
    /// reservations.
    pub fn owners_answer(&mut self, core: Option<&mut CorePmu>) -> Option<Outcome> {
        let answer = self.reservations()?.answer(Layer::HostTool);
        if answer.outcome == Outcome::Pending {
            return None;
        }
        self.introduce_if_here(core);
        Some(answer.outcome)
    }

    /// Nobody waits any more for what [`VcpuPmu::ask_owners`] asked with this cookie.
    pub fn ask_no_more(&mut self, core: Option<&mut CorePmu>, cookie: Cookie) {
        // It may have its answer already.
        let _ = self.request_for_tool(core, Request::Withdraw { cookie });
    }

    /// Gives counters back that owners gave up. One that somebody else holds by now
    /// stays with them.
    pub fn give_back(
        &mut self,
        mut core: Option<&mut CorePmu>,
        counters: CounterSet,
        cookie: Cookie,
    ) {
        for counter in counters.iter() {
            let _ = self.arbitrate(core.as_deref_mut(), |unit, cx| {
                ((), unit.give_back(counter, cookie, cx))
            });
        }
        self.introduce_if_here(core);
    }

    /// What the guest may want has changed.
    fn introduce_if_here(&mut self, core: Option<&mut CorePmu>) {
        if let Some(core) = self.here(core) {
            self.introduce_anew(core);
        }
    }

    /// Whether the hypervisor may yield a counter that it has reserved: what host
    /// contexts on this core rely on has room without it. If the vCPU is on no
    /// core, nobody can tell, and its contexts are not put at risk.
    #[must_use]
    pub fn hypervisor_can_yield(&self, core: Option<&CorePmu>) -> bool {
        match self.if_here(core) {
            Some(core) => core.book().guest_may_have_more(core.planner(), 1),
            None => self.hosts.is_empty(),
        }
    }
}
