//! The host context of a vCPU, and that of the core which it is on.

use arbiter::{CounterSet, Layer};
use perfmon_abi::wire::{Call, Errno, Refusal};
use pmu_model::{CountRequest, EventCode, KnownEvent, Progress, UnavailableReason};

use super::VcpuPmu;
use crate::core_pmu::{CorePmu, GuestWish, no_context};
use crate::perfmon::{Hosted, Moment, NotLoaded, Quantities};

impl VcpuPmu {
    /// Attaches a context to this vCPU, which is on a core.
    ///
    /// # Errors
    /// EBUSY: the vCPU has a context already or is on no core, or there is no
    /// room, and who has it. EINVAL: there is no such set, or nothing counts one
    /// of its events.
    pub fn load_context(&mut self, hosted: Box<Hosted>, set: u16) -> Result<(), NotLoaded> {
        let busy = |reason| Refusal::new(Errno::EBUSY, reason);
        if let Some(other) = &self.host {
            let reason = format!("{} has {} already", self.owner, other.id());
            return Err((hosted, busy(reason)));
        }
        self.introduce_anew();
        let Some(core) = &mut self.core else {
            let reason = format!("{} is on no core at present; try again", self.owner);
            return Err((hosted, busy(reason)));
        };
        let hosted = core.admit_hosted(hosted, Some(self.owner), set)?;
        self.host = Some(hosted);
        self.host_changed();
        Ok(())
    }

    /// Detaches the context of this vCPU, with all that it has counted.
    pub fn unload_context(&mut self) -> Option<Box<Hosted>> {
        let mut hosted = self.host.take()?;
        match &mut self.core {
            Some(core) => {
                hosted.end(core);
                core.dismiss(&hosted);
            }
            // Its slots are given back when the vCPU comes to the core again.
            None => self.orphan = Some((hosted.id(), hosted.end_away())),
        }
        self.host_changed();
        Some(hosted)
    }

    /// The context of this vCPU.
    #[must_use]
    pub fn host_context(&self) -> Option<&Hosted> {
        self.host.as_deref()
    }

    /// Carries out a command on the context of this vCPU. An overflow may be found
    /// that nobody has handled yet ([`VcpuPmu::has_host_overflow`]).
    ///
    /// # Errors
    /// The command's; EINVAL if there is no context.
    pub fn call_context(
        &mut self,
        call: &mut Call,
        values: &dyn Quantities,
    ) -> Result<(), Refusal> {
        let (Some(hosted), core) = (&mut self.host, &mut self.core) else {
            return Err(no_context("vCPU"));
        };
        let result = match core {
            Some(core) => core.call_hosted(hosted, call, values),
            // Its counts were settled when it was parked.
            None => hosted.carry_out(call, values),
        };
        self.host_changed();
        result
    }

    /// Works with the core that the vCPU is on, and with the context of that
    /// core. `None` if it is on no core.
    pub fn with_core<R>(&mut self, act: impl FnOnce(&mut CorePmu) -> R) -> Option<R> {
        self.introduce();
        let core = self.core.as_mut()?;
        let result = act(core);
        if core.hosting_mut().take_changed() {
            self.host_changed();
        }
        Some(result)
    }

    /// Whether a counter of the vCPU's or the core's context has overflowed, and
    /// [`VcpuPmu::sample_hosts`] is to be called before the guest runs on.
    #[inline]
    #[must_use]
    pub fn has_host_overflow(&self) -> bool {
        self.hosting
            && self
                .hosts()
                .any(|hosted| hosted.context().has_pending_overflow())
    }

    /// Handles the overflows of host contexts: samples, notifications, resets.
    pub fn sample_hosts(&mut self, moment: &Moment, values: &dyn Quantities) {
        let mut sampled = false;
        self.each_host(|hosted, core| {
            if hosted.context().has_pending_overflow() {
                // What is recorded with it is told as of now.
                hosted.settle(core);
                hosted.sample(moment, values);
                sampled = true;
            }
        });
        if sampled {
            self.arrange();
        }
    }

    /// Whether the vCPU's context keeps it off its core until PFM_RESTART.
    #[inline]
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.host
            .as_ref()
            .is_some_and(|hosted| hosted.context().is_blocked())
    }

    /// The contexts that are on the vCPU's core.
    pub(super) fn hosts(&self) -> impl Iterator<Item = &Hosted> {
        let core = self.core.as_ref();
        let of_core = core.and_then(|core| core.hosting().context());
        self.host.as_deref().into_iter().chain(of_core)
    }

    /// Works with each of them.
    pub(super) fn each_host(&mut self, mut act: impl FnMut(&mut Hosted, &mut CorePmu)) {
        let Some(core) = &mut self.core else { return };
        if let Some(hosted) = &mut self.host {
            act(hosted, core);
        }
        core.with_context(act);
    }

    /// A context has come or gone, or wants something else.
    fn host_changed(&mut self) {
        self.note_hosts();
        if self.hosting {
            self.arrange();
        }
        // What it has given up may be what the guest waits for.
        let waits = |reason| matches!(reason, Some(UnavailableReason::Busy { .. }));
        if self.needs_places() || self.counters.iter().any(|one| waits(one.unavailable)) {
            self.distribute();
        }
        self.refresh_needs();
    }

    /// Whether there are contexts on this core.
    pub(super) fn note_hosts(&mut self) {
        let core = self.core.as_ref();
        self.hosting = core.is_some_and(|core| self.host.is_some() || core.hosting().is_some());
    }

    /// Before the guest is entered.
    pub(super) fn enter_hosts(&mut self, tsc: u64) {
        if let Some(core) = &mut self.core {
            core.host_enters(tsc);
        }
    }

    /// Takes in what happened, for the host contexts. `ticks`: the guest ran.
    pub(super) fn observe_hosts(&mut self, progress: &Progress, ticks: u64) {
        let Some(core) = &mut self.core else { return };
        let overflowed = core.take_host_overflows();
        if !overflowed.is_empty() {
            self.each_host(|hosted, core| hosted.settle_slots(overflowed, core));
        }
        let Progress::Left { tsc, halted, .. } = *progress else {
            return;
        };
        // Nothing comes of an overflow whose count nobody told; the slot is armed
        // anew.
        let disarmed = !overflowed.is_empty() && !self.has_host_overflow();
        // A write of the guest's may have displaced what nobody has told yet.
        self.each_host(|hosted, _| hosted.miss_the_rest());
        let Some(core) = &mut self.core else { return };
        let mut changed = core.host_leaves(tsc, halted);
        if let Some(hosted) = &mut self.host {
            let ns = hosted.run_ns(ticks, core.hosting().tsc_khz());
            changed |= hosted.advance(ns, 0, core);
            hosted.note_interval(ns, core.idle_ns(halted));
        }
        let mut look = false;
        self.each_host(|hosted, _| look |= hosted.is_to_look_for_room());
        if look {
            self.restore_hosts();
        }
        if changed || look || disarmed {
            self.arrange();
        }
    }

    /// TSC value at which a host context has something to do.
    pub(super) fn host_deadline(&self) -> Option<u64> {
        let core = self.core.as_ref()?;
        let due = |hosted: &Hosted| hosted.due_in(core.hosting().tsc_khz());
        let of_vcpu = self.host.as_deref().and_then(due).zip(self.entered);
        let of_vcpu = of_vcpu.map(|(due, entered)| entered.saturating_add(due));
        [of_vcpu, core.hosting().deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// A core switches the vCPU in: its context looks after its places.
    pub(super) fn return_hosts(&mut self) {
        let Some(core) = &mut self.core else { return };
        if let Some((context, stays)) = self.orphan.take() {
            stays.into_iter().for_each(|stay| core.release(stay));
            core.forget_claim(context);
        }
        if let Some(hosted) = &mut self.host {
            core.adopt(hosted);
        }
        self.each_host(|hosted, core| hosted.line_up(core));
    }

    /// The vCPU goes: counts of its context are those until now.
    pub(super) fn settle_hosts(&mut self) {
        if let (Some(hosted), Some(core)) = (&mut self.host, &mut self.core) {
            hosted.settle(core);
        }
    }

    /// The vCPU leaves `core`, on which it was parked, and its context with it.
    pub(super) fn take_host_off(&mut self, core: &mut CorePmu) {
        if let Some((context, stays)) = self.orphan.take() {
            stays.into_iter().for_each(|stay| core.release(stay));
            core.forget_claim(context);
        }
        if let Some(hosted) = &mut self.host {
            hosted.leave_all(core);
            core.forget_claim(hosted.id());
        }
    }

    /// Tells the core what guests may want of it, if nobody has.
    pub(super) fn introduce(&mut self) {
        if let Some(core) = &self.core
            && !core.hosting().knows_guest()
        {
            self.introduce_anew();
        }
    }

    /// The same after that has changed.
    pub(super) fn introduce_anew(&mut self) {
        let wish = self.wish();
        if let Some(core) = &mut self.core {
            core.hosting_mut().set_guest(wish);
        }
    }

    /// What the guest may want: counters of the model that it was given and that
    /// the hypervisor has not reserved, and each event that has a name.
    fn wish(&self) -> GuestWish {
        let reserved = self.reserved_by(Layer::Hypervisor);
        let counters = self.model.counters();
        let counters = counters.filter(|counter| self.grant.holds(*counter));
        let usable = counters.filter(|counter| !reserved.contains(*counter));
        let usable: CounterSet = usable.collect();
        let events = KnownEvent::ALL.into_iter().filter_map(|event| {
            let event = EventCode::of(self.model.events(), event)?;
            Some(CountRequest::plain(event, true, true))
        });
        let fixed = usable.iter().filter_map(|counter| match counter {
            arbiter::CounterId::Fixed(n) => {
                Some(EventCode::Fixed(pmu_model::FixedFunction::of(n)?))
            }
            arbiter::CounterId::Programmable(_) => None,
        });
        GuestWish {
            counters: usize::try_from(usable.len()).unwrap_or(usize::MAX),
            events: events
                .chain(fixed.map(|event| CountRequest::plain(event, true, true)))
                .collect(),
        }
    }

    /// Whether the hypervisor may yield a counter that it has reserved: what host
    /// contexts on this core rely on has room without it. If the vCPU is on no
    /// core, nobody can tell, and its context is not put at risk.
    #[must_use]
    pub fn hypervisor_can_yield(&self) -> bool {
        match &self.core {
            Some(core) => core.guest_may_have_more(1),
            None => self.host.is_none(),
        }
    }

    fn reserved_by(&self, layer: Layer) -> CounterSet {
        let Some(unit) = self.reservations() else {
            return CounterSet::EMPTY;
        };
        let held = unit.bank().held();
        let is_its = |counter| {
            let reservation = unit.bank().reservation(counter);
            reservation.is_some_and(|reservation| reservation.owner == layer)
        };
        held.iter().filter(|counter| is_its(*counter)).collect()
    }
}
