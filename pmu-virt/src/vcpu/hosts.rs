//! The host contexts of a vCPU, and those of the core which it is on. Without the feature
//! `contexts`, `no_hosts.rs` has the same calls.

use std::cmp::Reverse;

use perfmon::{ContextId, Quantities, Wish};
use perfmon_abi::wire::{Call, Refusal};
use pmu_model::ibs::IbsSample;
use pmu_model::{IbsKind, OwnerId, Progress, SlotSet, Ticks, Tsc};

use super::claims::Claims;
use super::seat::Seat;
use super::tally::Tally;
use crate::assign::Demand;
use crate::attached::{AttachedContext, ContextGroup, HostEvent};
use crate::core_pmu::{CorePmu, no_context, write_until};
use crate::moment::Moment;
use crate::placement::{Claim, HostClaims};
use crate::policy::Standing;
use crate::slot_bank::{SlotBank, SlotLease};

/// The host contexts of one vCPU.
#[derive(Debug, Default)]
pub struct Hosts {
    group: ContextGroup,
    /// It is on a core, and it or the core has host contexts.
    present: bool,
    /// A tool keeps it out of its guest.
    paused: bool,
    /// Slots of contexts that were unloaded while the vCPU was parked.
    orphans: Vec<(ContextId, Vec<SlotLease>)>,
}

impl Hosts {
    /// The contexts of this vCPU, the oldest first.
    pub fn contexts(&self) -> impl Iterator<Item = &AttachedContext> {
        self.group.iter()
    }

    /// A context of this vCPU.
    #[must_use]
    pub fn context(&self, id: ContextId) -> Option<&AttachedContext> {
        self.group.get(id)
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
        self.paused || self.contexts().any(|hosted| hosted.context().is_blocked())
    }

    /// Whether contexts count where the vCPU is.
    #[inline]
    pub(super) fn are_present(&self) -> bool {
        self.present
    }

    /// The vCPU is on this core, or on none.
    pub(super) fn note(&mut self, core: Option<&CorePmu>) {
        self.present =
            core.is_some_and(|core| !self.group.is_empty() || core.host().has_contexts());
    }

    /// The contexts that are on the vCPU's core.
    fn on<'a>(&'a self, core: Option<&'a CorePmu>) -> impl Iterator<Item = &'a AttachedContext> {
        let of_core = core.into_iter().flat_map(|core| core.host().contexts());
        self.group.iter().chain(of_core)
    }

    /// Whether anything is to be done for one of them while the guest runs.
    pub(super) fn are_active(&self, core: Option<&CorePmu>) -> bool {
        self.on(core).any(AttachedContext::is_active)
    }

    /// Works with each of them.
    fn each(
        &mut self,
        seat: &mut Seat<'_>,
        mut act: impl FnMut(&mut AttachedContext, &mut SlotBank),
    ) {
        let Some(core) = seat.core_mut() else { return };
        let (host, bank) = core.parts_mut();
        for hosted in self.group.iter_mut().chain(host.contexts_mut()) {
            act(hosted, bank);
        }
    }

    /// Works with one of them, and records what came of it.
    fn one(
        &mut self,
        seat: &mut Seat<'_>,
        context: ContextId,
        act: impl Fn(&mut AttachedContext, &mut SlotBank) -> Option<HostEvent>,
    ) {
        let mut event = None;
        self.each(seat, |hosted, bank| {
            if hosted.id() == context {
                event = act(hosted, bank).map(|event| (hosted.vcpu(), event));
            }
        });
        if let (Some((vcpu, event)), Some(core)) = (event, seat.core_mut()) {
            core.host_mut().record(context, vcpu, event);
        }
    }

    /// Refuses one more context, if there are as many as there may be.
    pub(super) fn check_room(&self, core: &CorePmu, owner: OwnerId) -> Result<(), Refusal> {
        core.host().check_group(&owner, &self.group)
    }

    /// A context was attached to this vCPU.
    pub(super) fn add(&mut self, hosted: AttachedContext) {
        self.group.push(hosted);
    }

    /// Detaches a context, with all that it has counted. Its slots on a core where the vCPU
    /// is not are given back when it comes there again.
    pub(super) fn remove(
        &mut self,
        seat: &mut Seat<'_>,
        id: ContextId,
    ) -> Option<Box<AttachedContext>> {
        let mut hosted = self.group.remove(id)?;
        match seat {
            Seat::On(core) => {
                hosted.end(core.bank_mut());
                core.dismiss(&hosted);
            }
            Seat::Away | Seat::Off => self.orphans.push((id, hosted.end_away())),
        }
        Some(hosted)
    }

    /// Carries out a command on a context. `check` says of each sampler whether it is free.
    /// True if it may want something else now.
    pub(super) fn call(
        &mut self,
        seat: &mut Seat<'_>,
        id: ContextId,
        call: &mut Call,
        values: &dyn Quantities,
        check: impl Fn(IbsKind, &Hosts) -> Result<(), Refusal>,
    ) -> (bool, Result<(), Refusal>) {
        let hosted = self.group.get(id);
        let refused =
            hosted.and_then(|hosted| hosted.refused_sampler(call, |kind| check(kind, self)));
        let Some(hosted) = self.group.get_mut(id) else {
            return (false, Err(no_context("vCPU", id)));
        };
        let only_reads = hosted.is_only_read_by(call);
        let result = match seat {
            Seat::On(core) => core.call_hosted(hosted, call, values, refused),
            // Its counts were settled when it was parked.
            Seat::Away | Seat::Off => {
                let done = match refused {
                    Some((at, refusal)) => write_until(at, refusal, hosted, call, values),
                    None => hosted.carry_out(call, values),
                };
                hosted.keep_to_lease();
                done
            }
        };
        (!only_reads, result)
    }

    /// A context may use so many counters at a time from now on; false if there is none. On
    /// no core it has nothing to leave: it looks again when its vCPU is back.
    pub(super) fn lease(&mut self, seat: &mut Seat<'_>, id: ContextId, counters: usize) -> bool {
        let Some(hosted) = self.group.get_mut(id) else {
            return false;
        };
        hosted.set_lease(counters);
        if let (true, Some(core)) = (hosted.is_to_leave(), seat.core_mut()) {
            core.host_mut()
                .record(id, hosted.vcpu(), HostEvent::Preempted);
        }
        true
    }

    /// Whether a counter of one of them has overflowed, or of one of the core's, and
    /// [`VcpuPmu::take_samples`](super::VcpuPmu::take_samples) is to be called before the
    /// guest runs on.
    #[inline]
    #[must_use]
    pub fn has_overflow(&self, core: &CorePmu) -> bool {
        self.present && self.overflow_waits(Some(core))
    }

    pub(super) fn overflow_waits(&self, core: Option<&CorePmu>) -> bool {
        let mut hosts = self.on(core);
        hosts.any(|hosted| hosted.context().has_pending_overflow())
    }

    /// Handles the overflows of those that have one, by what `moment` tells; whether it did,
    /// also if that failed afterwards.
    pub(super) fn take_samples<M: Moment>(
        &mut self,
        seat: &mut Seat<'_>,
        moment: &mut M,
    ) -> (bool, Result<(), M::Error>) {
        let Some(core) = seat.core().filter(|core| self.has_overflow(core)) else {
            return (false, Ok(()));
        };
        let all = self.on(Some(core)).map(AttachedContext::context);
        let sampling = all.filter(|context| context.has_pending_overflow());
        // What they record of the guest's memory.
        let wish = sampling.fold(Wish::default(), |wish, context| wish.and(context.wish()));
        let mut sampled = false;
        let told = moment.host(wish, &mut |place, values| {
            self.each(seat, |hosted, bank| {
                if hosted.context().has_pending_overflow() {
                    // What is recorded with it is told as of now.
                    hosted.settle(bank);
                    hosted.sample(place, values);
                    sampled = true;
                }
            });
        });
        (sampled, told)
    }

    /// Brings their places in line with what they want. Counts were settled before.
    pub(super) fn reconcile(&mut self, seat: &mut Seat<'_>) {
        self.each(seat, AttachedContext::reconcile);
    }

    /// Gives them the places that they miss; true if that is not enough.
    pub(super) fn place_missing(&mut self, seat: &mut Seat<'_>) -> bool {
        let mut short = false;
        self.each(seat, |hosted, bank| {
            hosted.place_missing(bank);
            short |= hosted.is_short(bank);
        });
        short
    }

    /// Nobody counts for what is still missing.
    pub(super) fn miss_the_rest(&mut self, seat: &mut Seat<'_>) {
        self.each(seat, |hosted, _| hosted.miss_the_rest());
    }

    /// What they want counted: those whom the policy puts first before the guest, then the
    /// others, then the contexts that have what is left over. Of contexts alike the oldest is
    /// last, for it makes room first.
    pub(super) fn claims(&self, core: &CorePmu) -> HostClaims {
        let present = self.on(Some(core)).filter(|_| self.present);
        let mut contexts: Vec<&AttachedContext> = present.collect();
        let (book, bank) = (core.book(), core.bank());
        contexts.sort_by_key(|hosted| Reverse(book.age_of(hosted.id())));
        let of = |standing| {
            let stands =
                move |hosted: &&&AttachedContext| book.standing_of(hosted.id()) == Some(standing);
            contexts.iter().filter(stands)
        };
        let yielding = of(Standing::Spare).filter(|hosted| hosted.is_preemptible());
        let claims = |hosted: &&AttachedContext| hosted.claims(bank);
        let firm: Vec<Claim> = of(Standing::Firm).flat_map(claims).collect();
        let spare: Vec<Claim> = of(Standing::Spare).flat_map(claims).collect();
        let (before_guest, behind_guest) = if book.policy().places_hosts_first() {
            (firm, spare)
        } else {
            (Vec::new(), [firm, spare].concat())
        };
        HostClaims {
            before_guest,
            behind_guest,
            yielding: yielding.map(|hosted| hosted.id()).collect(),
        }
    }

    /// A context makes room.
    pub(super) fn preempt(&mut self, seat: &mut Seat<'_>, context: ContextId) {
        self.one(seat, context, AttachedContext::preempt);
    }

    /// A PMD of a context leaves its slot.
    pub(super) fn displace(&mut self, seat: &mut Seat<'_>, context: ContextId, pmd: u16) {
        self.one(seat, context, |hosted, bank| {
            hosted.displace(pmd, bank);
            None
        });
    }

    /// A PMD of a context comes onto slots. Without them it stays missing, and its context
    /// loses it in the end.
    pub(super) fn come(
        &mut self,
        seat: &mut Seat<'_>,
        context: ContextId,
        pmd: u16,
        slots: Option<SlotSet>,
    ) {
        let Some(slots) = slots else { return };
        self.one(seat, context, |hosted, bank| {
            hosted.bind_slot(pmd, slots, bank);
            None
        });
    }

    /// Time in the guest begins.
    pub(super) fn enter(&mut self, seat: &mut Seat<'_>, tsc: Tsc) {
        if let (true, Some(core)) = (self.present, seat.core_mut()) {
            core.host_enters(tsc);
        }
    }

    /// Settles those whose overflow was told; which slots these are.
    pub(super) fn settle_overflows(&mut self, seat: &mut Seat<'_>) -> SlotSet {
        let Some(core) = seat.core_mut() else {
            return SlotSet::EMPTY;
        };
        let overflowed = core.bank_mut().take_host_overflows();
        if !overflowed.is_empty() {
            self.each(seat, |hosted, bank| hosted.settle_slots(overflowed, bank));
        }
        overflowed
    }

    /// The guest was left after it `ran` so long. Whether that has brought a switch of
    /// sets, and whether one of them is to look for room again.
    pub(super) fn leave(
        &mut self,
        seat: &mut Seat<'_>,
        progress: &Progress,
        ran: Ticks,
    ) -> (bool, bool) {
        let (Progress::Left { tsc, halted, .. }, Some(core)) = (*progress, seat.core_mut()) else {
            return (false, false);
        };
        let mut changed = core.host_leaves(tsc, halted);
        let halted = core.idle_time(halted);
        for hosted in self.group.iter_mut() {
            let tsc_khz = core.host().tsc_khz();
            changed |= hosted.vcpu_leaves(ran, halted, tsc_khz, core.bank_mut());
        }
        let mut look = false;
        self.each(seat, |hosted, _| look |= hosted.is_to_look_for_room());
        (changed, look)
    }

    /// TSC value at which one of them has something to do.
    pub(super) fn deadline(&self, core: Option<&CorePmu>, entered: Option<Tsc>) -> Option<Tsc> {
        let core = core.filter(|_| self.present)?;
        let due = |hosted: &AttachedContext| hosted.due_in(core.host().tsc_khz());
        let of_vcpu = self.group.iter().filter_map(due).min().zip(entered);
        let of_vcpu = of_vcpu.map(|(due, entered)| entered + due);
        [of_vcpu, core.host().deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// A core switches the vCPU in: its contexts look after their places.
    pub(super) fn come_back(&mut self, seat: &mut Seat<'_>) {
        if !self.present && self.orphans.is_empty() {
            return;
        }
        self.bury_orphans(seat);
        if let Some(core) = seat.core_mut() {
            for hosted in self.group.iter_mut() {
                core.adopt(hosted);
            }
        }
        self.reconcile(seat);
    }

    /// The vCPU is switched out: counts of its contexts are those until now.
    pub(super) fn park(&mut self, seat: &mut Seat<'_>) {
        if let Some(bank) = seat.bank().filter(|_| self.present) {
            for hosted in self.group.iter_mut() {
                hosted.settle(bank);
            }
        }
        self.present = false;
    }

    /// The vCPU leaves the core on which it was parked, and its contexts with it.
    pub(super) fn leave_core(&mut self, seat: &mut Seat<'_>) {
        self.bury_orphans(seat);
        let Some(core) = seat.core_mut() else { return };
        for hosted in self.group.iter_mut() {
            hosted.leave_all(core.bank_mut());
            core.forget_claim(hosted.id());
        }
    }

    /// Gives back what contexts held on the core that were unloaded while the vCPU was
    /// parked there.
    fn bury_orphans(&mut self, seat: &mut Seat<'_>) {
        let Some(core) = seat.core_mut() else { return };
        for (context, leases) in self.orphans.drain(..) {
            leases
                .iter()
                .for_each(|lease| core.bank_mut().release(lease));
            core.forget_claim(context);
        }
    }

    /// The context of this vCPU that uses a sampler. What it counts is counted on slots as
    /// its counters are; only who takes the sample is the same for guest and contexts.
    pub(super) fn user_of(&self, kind: IbsKind) -> Option<ContextId> {
        let user = self
            .contexts()
            .find(|one| one.context().uses_sampler(kind))?;
        Some(user.id())
    }

    /// Whether one of them uses a sampler.
    pub(super) fn uses_sampler(&self, kind: IbsKind) -> bool {
        self.user_of(kind).is_some()
    }

    /// The sampler of a context whose sample is to be taken.
    #[inline]
    pub(super) fn sample_due(&self) -> Option<IbsKind> {
        let mut hosts = self.contexts().filter(|_| self.present);
        hosts.find_map(|hosted| hosted.context().sample_due())
    }

    /// Whether a sample of a context may fall due while the guest runs.
    #[inline]
    pub(super) fn may_sample(&self) -> bool {
        self.present && self.contexts().any(|hosted| hosted.context().may_sample())
    }

    /// Takes in a sample for the context that waits for it; its sampler stands until that
    /// has been dealt with.
    pub(super) fn take_sample(&mut self, sample: &IbsSample) -> bool {
        let waits = |hosted: &mut AttachedContext| hosted.take_in_sample(sample);
        self.group.iter_mut().any(waits)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.group.is_empty()
    }

    /// Restores the first that was preempted and would find all that it demands by `fits`;
    /// it has no places yet. One at a time: each takes room.
    pub(super) fn restore(&mut self, seat: &mut Seat<'_>, fits: impl Fn(&[Demand]) -> bool) {
        if let Some(context) = seat.core().and_then(|core| self.restorable(core, fits)) {
            self.one(seat, context, |hosted, _| hosted.restore());
        }
    }

    fn restorable(&self, core: &CorePmu, fits: impl Fn(&[Demand]) -> bool) -> Option<ContextId> {
        let preempted = self
            .on(Some(core))
            .filter(|hosted| hosted.is_preempted() && !hosted.is_beyond_lease());
        let mut restored =
            preempted.filter(|hosted| fits(&hosted.demands_if_restored(core.bank())));
        restored.next().map(AttachedContext::id)
    }

    /// What cannot count for another vCPU goes before one sits down on the core.
    pub(super) fn leave_private(seat: &mut Seat<'_>) {
        let Some(core) = seat.core_mut() else { return };
        let (host, bank) = core.parts_mut();
        for hosted in host.contexts_mut() {
            hosted.leave_where(bank, SlotBank::is_private);
        }
    }
}

/// Whether the core takes contexts, so that it has to hear of each change of what the guest may
/// want.
pub(super) fn are_taken(core: Option<&CorePmu>) -> bool {
    core.is_some_and(|core| core.host().is_enabled())
}

/// Tells the core what the guest of a vCPU may want of it, if nobody has: contexts are promised
/// no more than that leaves.
pub(super) fn introduce(seat: &mut Seat<'_>, tally: &Tally, claims: &Claims) {
    let (owner, generation) = (tally.owner(), claims.budget().generation);
    let knows = |core: &CorePmu| core.book().knows_guest(owner, generation);
    if !seat.core().is_none_or(knows) {
        introduce_anew(seat, tally, claims);
    }
}

/// The same after that has changed.
pub(super) fn introduce_anew(seat: &mut Seat<'_>, tally: &Tally, claims: &Claims) {
    if let Some(core) = seat.core_mut() {
        let generation = claims.budget().generation;
        let wish = claims.wish(tally.model(), tally.terms());
        core.set_guest(tally.owner(), generation, wish);
    }
}
