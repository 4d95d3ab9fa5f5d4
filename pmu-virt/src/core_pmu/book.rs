//! What host contexts may want of a core, and whether there is room. Without the feature
//! `contexts`, `no_book.rs` has the same calls.

use std::cell::Cell;

use arbiter::{CounterId, CounterSet, NamedEvent};
use perfmon::ContextId;
use perfmon_abi::wire::{Errno, Refusal, Subcode};
use pmu_model::{Constraint, CountRequest, EventFamily, OwnerId, SlotSet};

use super::planner::Planner;
use crate::admission::{
    Claimed, ContextDemand, GuestRoom, NoRoom, Room, admit, fit_together, most_of,
};
use crate::assign::MAX_DEMANDS;
use crate::attached::{AttachedContext, GuestLimit};
use crate::holdings::Holdings;
use crate::policy::{HostPolicy, Standing};

/// What guests may want of a core, before it is known what can count it.
#[derive(Clone, Debug, Default)]
pub(crate) struct GuestClaim {
    pub(crate) counters: usize,
    pub(crate) events: Vec<CountRequest>,
    /// The vocabulary of its event selects.
    pub(crate) family: Option<EventFamily>,
    /// What the vCPUs of the VM have reserved.
    pub(crate) holdings: Option<Holdings>,
}

/// What a context may want of a core, before it is known what can count it.
#[derive(Clone, Debug)]
pub(crate) struct ResourceClaim {
    pub(crate) context: ContextId,
    pub(crate) vcpu: Option<OwnerId>,
    pub(crate) preemptible: bool,
    pub(crate) standing: Standing,
    /// It was told that there is no room for all that it demands.
    pub(crate) overdrawn: bool,
    pub(crate) sets: Vec<Vec<CountRequest>>,
}

impl ResourceClaim {
    pub(super) fn of(hosted: &AttachedContext, vcpu: Option<OwnerId>) -> Self {
        let sets = hosted.context().demands().into_iter();
        let requests = |set: Vec<(u16, CountRequest)>| set.into_iter().map(|(_, request)| request);
        ResourceClaim {
            context: hosted.id(),
            vcpu,
            preemptible: hosted.is_preemptible(),
            standing: Standing::Spare,
            overdrawn: false,
            sets: sets.map(|(_, set)| requests(set).collect()).collect(),
        }
    }
}

/// What guests and host contexts may want of a core, and what of it was promised.
#[derive(Debug, Default)]
pub(crate) struct Book {
    policy: HostPolicy,
    /// Of contexts of the core and of vCPUs that are here or were parked here, the
    /// oldest first.
    claims: Vec<ResourceClaim>,
    /// [`Book::room`], until the claims or what the guest can name change: a scheduler
    /// asks at each timeslice.
    room: Cell<Option<usize>>,
    /// As the vCPU that was here last told it; none before the first.
    guest: Option<GuestClaim>,
    /// Counters that the guest of each vCPU may want, and the generation of its budget.
    wishes: Vec<(OwnerId, u64, usize)>,
}

impl Book {
    /// Notes what a context may want, if there is room.
    pub(super) fn claim(
        &mut self,
        planner: Planner<'_>,
        hosted: &AttachedContext,
        vcpu: Option<OwnerId>,
    ) -> Result<Standing, Refusal> {
        let mut wish = ResourceClaim::of(hosted, vcpu);
        let claimed = self.judge(planner, &wish)?;
        wish.standing = claimed.standing;
        self.note_claim(wish);
        self.room.set(None);
        for claim in &mut self.claims {
            if claimed.preempts.contains(&claim.context) {
                claim.standing = Standing::Spare;
            }
        }
        Ok(claimed.standing)
    }

    /// What a context wants has changed while it is loaded: it has what is left
    /// over if there is no more room. Why there is none, if that is news.
    pub(super) fn reclaim(
        &mut self,
        planner: Planner<'_>,
        hosted: &AttachedContext,
    ) -> Option<Refusal> {
        let refusal = self.claim(planner, hosted, hosted.vcpu()).err()?;
        let context = hosted.id();
        let mut claims = self.claims.iter();
        let is_known = claims.any(|claim| claim.context == context && claim.overdrawn);
        let mut wish = ResourceClaim::of(hosted, hosted.vcpu());
        wish.overdrawn = true;
        self.note_claim(wish);
        // A tool can write as often as it likes.
        (!is_known).then_some(refusal)
    }

    fn note_claim(&mut self, wish: ResourceClaim) {
        self.room.set(None);
        let known = |claim: &&mut ResourceClaim| claim.context == wish.context;
        match self.claims.iter_mut().find(known) {
            Some(before) => *before = wish,
            None => self.claims.push(wish),
        }
    }

    /// What a wish comes to.
    fn judge(&self, planner: Planner<'_>, wish: &ResourceClaim) -> Result<Claimed, Refusal> {
        let claims = self.claims_beside(planner, wish);
        let applicant = planner.claim_of(wish).ok_or_else(|| {
            let reason = "the event sets demand too many different things; use fewer sets";
            Refusal::new(Errno::EBUSY, reason)
        })?;
        let admitted =
            self.admit_beside(planner, &applicant, &claims, &self.guest_room(planner, 0));
        admitted.map_err(|full| {
            Refusal::new(Errno::EBUSY, full.to_string()).because(Subcode::ResourceUnavailable)
        })
    }

    /// What all contexts but that of `wish` may want.
    fn claims_beside(&self, planner: Planner<'_>, wish: &ResourceClaim) -> Vec<ContextDemand> {
        let others = self.claims.iter();
        let others = others.filter(|claim| claim.context != wish.context);
        others.filter_map(|claim| planner.claim_of(claim)).collect()
    }

    /// What the owners of reserved counters would have to keep to, so that there is room
    /// for a wish, whichever counters they give up: as few as can be.
    pub(super) fn guest_limit(
        &self,
        planner: Planner<'_>,
        wish: &ResourceClaim,
    ) -> Option<GuestLimit> {
        let (applicant, claims) = (planner.claim_of(wish)?, self.claims_beside(planner, wish));
        let guest = self.guest_room(planner, 0);
        let holdings = self.guest.as_ref()?.holdings.as_ref()?;
        let held = holdings.most();
        let beside = |most: u8, fewer: u8| {
            let guest = GuestRoom {
                counters: guest.counters.saturating_sub(fewer.into()),
                reserved: self.reserved(planner, most.into()),
                ..guest.clone()
            };
            let admitted = self.admit_beside(planner, &applicant, &claims, &guest);
            admitted.ok().map(|_| GuestLimit { fewer, most })
        };
        // What is not theirs is promised to the guest's other code under some policies.
        (0..held)
            .rev()
            .find_map(|most| beside(most, 0).or_else(|| beside(most, held - most)))
    }

    /// What guests may want, and so many counters more.
    fn guest_room(&self, planner: Planner<'_>, more: usize) -> GuestRoom {
        let guest = self.guest.as_ref();
        GuestRoom {
            counters: guest.map_or(0, |_| self.guest_counters(None).saturating_add(more)),
            kinds: self.kinds(planner),
            now: planner.guest_now(),
            reserved: self.reserved(planner, usize::MAX),
        }
    }

    fn admit_beside(
        &self,
        planner: Planner<'_>,
        applicant: &ContextDemand,
        claims: &[ContextDemand],
        guest: &GuestRoom,
    ) -> Result<Claimed, NoRoom> {
        let room = Room {
            policy: self.policy,
            slots: planner.slots(),
            guest,
            claims,
        };
        admit(&room, applicant)
    }

    fn kinds(&self, planner: Planner<'_>) -> Vec<Constraint> {
        let mut kinds: Vec<Constraint> = Vec::new();
        let events = self.guest.iter().flat_map(|guest| &guest.events);
        for request in events {
            if let Ok(plan) = planner.plan_for_guest(request)
                && !kinds.contains(&plan.constraint)
            {
                kinds.push(plan.constraint);
            }
        }
        kinds
    }

    /// What is firm and counts while `vcpu` does.
    pub(crate) fn firm_beside(&self, planner: Planner<'_>, vcpu: OwnerId) -> FirmDemands {
        let claims = self.claims.iter();
        let firm = claims.filter(|one| one.standing == Standing::Firm);
        let beside = firm.filter(|one| one.vcpu.is_none_or(|of| of == vcpu));
        FirmDemands {
            sets: beside
                .filter_map(|one| Some(planner.claim_of(one)?.sets))
                .collect(),
            slots: planner.slots(),
        }
    }

    /// What is firm of `vcpu` alone.
    pub(crate) fn firm_of(&self, planner: Planner<'_>, vcpu: OwnerId) -> FirmDemands {
        let claims = self.claims.iter();
        let own = claims.filter(|one| one.standing == Standing::Firm && one.vcpu == Some(vcpu));
        FirmDemands {
            sets: own
                .filter_map(|one| Some(planner.claim_of(one)?.sets))
                .collect(),
            slots: planner.slots(),
        }
    }

    /// How many counters of a vCPU that comes have a slot here beside what the core's
    /// own contexts rely on, going by the events that its guest can name.
    pub(super) fn room(&self, planner: Planner<'_>) -> usize {
        let known = self.room.get();
        known.unwrap_or_else(|| {
            let room = self.find_room(planner);
            self.room.set(Some(room));
            room
        })
    }

    fn find_room(&self, planner: Planner<'_>) -> usize {
        let mut of_core = self.claims.iter().filter(|one| one.vcpu.is_none());
        let guest = self.guest.as_ref();
        let any = guest.and_then(|guest| planner.any_event(&guest.events));
        let (Some(any), true) = (any, of_core.any(|one| one.standing == Standing::Firm)) else {
            return usize::MAX;
        };
        let firm = self.firm_beside(planner, NOBODY);
        let fit = |count: &usize| firm.leave_room_for(&vec![any; count + 1]);
        (0..MAX_DEMANDS).take_while(fit).count()
    }

    /// How many counters `vcpu`, which is here or was parked here, relies on: those
    /// that it `holds`, and those of its contexts that were promised them.
    pub(crate) fn relied_on(&self, vcpu: OwnerId, holds: CounterSet) -> usize {
        let mut claims = self.claims.iter();
        let firm = claims
            .by_ref()
            .filter(|one| one.vcpu == Some(vcpu) && one.standing == Standing::Firm);
        let of_context = firm.map(|one| one.sets.iter().map(Vec::len).max().unwrap_or(0));
        usize::try_from(holds.len()).unwrap_or(usize::MAX) + of_context.sum::<usize>()
    }

    /// Whether what contexts rely on here has room if the guest of `vcpu` may want so many
    /// `counters`.
    pub(crate) fn guest_may_have(
        &self,
        planner: Planner<'_>,
        vcpu: OwnerId,
        counters: usize,
    ) -> bool {
        let known = self.guest_counters(None);
        let wanted = self.guest_counters(Some(vcpu));
        let more = wanted.max(counters).saturating_sub(known);
        more == 0 || self.guest_may_have_more(planner, more)
    }

    /// Whether what contexts rely on here has room beside a guest with so many
    /// counters more.
    pub(crate) fn guest_may_have_more(&self, planner: Planner<'_>, counters: usize) -> bool {
        let claims = self.claims.iter();
        let firm = claims.filter(|wish| wish.standing == Standing::Firm);
        let firm: Option<Vec<ContextDemand>> = firm.map(|wish| planner.claim_of(wish)).collect();
        let Some(firm) = firm else { return false };
        let guest = self.guest_room(planner, counters);
        (0..firm.len()).all(|index| {
            let mut others = firm.clone();
            let one = others.remove(index);
            let claimed = self.admit_beside(planner, &one, &others, &guest);
            claimed.is_ok_and(|claimed| claimed.standing == Standing::Firm)
        })
    }

    /// The same of one that goes on elsewhere.
    pub(crate) fn forget(&mut self, planner: Planner<'_>, context: ContextId) {
        self.claims.retain(|claim| claim.context != context);
        self.room.set(None);
        let claims = &self.claims;
        if claims.iter().all(|claim| claim.standing == Standing::Firm) {
            return;
        }
        let demands: Vec<_> = claims.iter().map(|claim| planner.claim_of(claim)).collect();
        let mut known: Vec<ContextDemand> = demands.iter().flatten().cloned().collect();
        let guest = self.guest_room(planner, 0);
        for (index, demand) in demands.into_iter().enumerate() {
            let claim = &self.claims[index];
            let Some(demand) = demand.filter(|_| claim.standing != Standing::Firm) else {
                continue;
            };
            let at = known.iter().position(|one| one.context == demand.context);
            let Some(mut own) = at.map(|at| known.remove(at)) else {
                continue;
            };
            if let Ok(claimed) = self.admit_beside(planner, &demand, &known, &guest)
                && claimed.preempts.is_empty()
            {
                own.standing = claimed.standing;
                self.claims[index].standing = claimed.standing;
                self.claims[index].overdrawn = false;
            }
            // In its place: the oldest are asked first to make room.
            known.insert(at.unwrap_or(0), own);
        }
    }

    /// What a claim has come to; contexts ask before places are given out.
    pub(crate) fn standing_of(&self, context: ContextId) -> Option<Standing> {
        let claim = self.claims.iter().find(|claim| claim.context == context);
        claim.map(|claim| claim.standing)
    }

    /// How old a claim is: the oldest are at 0.
    pub(crate) fn age_of(&self, context: ContextId) -> Option<usize> {
        let claims = &self.claims;
        claims.iter().position(|claim| claim.context == context)
    }

    /// What the core keeps for the reserved counters of whichever vCPU comes: one of
    /// these. None of them has more than `most` programmable ones.
    fn reserved(&self, planner: Planner<'_>, most: usize) -> Vec<Vec<Constraint>> {
        let Some(guest) = &self.guest else {
            return Vec::new();
        };
        let Some(holdings) = &guest.holdings else {
            return Vec::new();
        };
        let any = planner.any_event(&guest.events);
        let (programmable, fixed) = holdings.largest();
        let fixed = fixed
            .iter()
            .filter_map(|counter| planner.promise(counter, None, any));
        let many = any.map(|any| vec![any; programmable.min(most)]);
        let plain = many.into_iter().flatten().chain(fixed).collect();
        let named = holdings.named().into_iter().map(|(_, mut held)| {
            // Which of them an owner gives up is not known. Those that are hard to place
            // count as kept.
            held.sort_by_key(|(counter, event)| {
                (matches!(counter, CounterId::Fixed(_)), event.is_none())
            });
            let is_programmable =
                |held: &&(CounterId, _)| held.0.is_like(CounterId::Programmable(0));
            let programmable = held.iter().take_while(is_programmable).count();
            let kept = programmable.min(most);
            held.drain(kept..programmable);
            planner.promises(guest.family, &held, any)
        });
        let all: Vec<Vec<Constraint>> = std::iter::once(plain).chain(named).collect();
        // Of too many different ones the most that any of them wants of each kind.
        ContextDemand::maximal(all.clone()).unwrap_or_else(|| vec![most_of(&all)])
    }

    /// The vCPUs of the VM, by bit, for whose named events the core's own contexts leave no
    /// room.
    pub(super) fn refuses(&self, planner: Planner<'_>) -> u64 {
        let guest = self.guest.as_ref();
        let named = guest.and_then(|guest| Some((guest, guest.holdings.as_ref()?.named())));
        let Some((guest, named)) = named.filter(|(_, named)| !named.is_empty()) else {
            return 0;
        };
        let any = planner.any_event(&guest.events);
        let firm = self.firm_beside(planner, NOBODY);
        let refused = named.iter().filter(|(_, held)| {
            let promises = planner.promises(guest.family, held, any);
            !firm.leave_room_for(&promises)
        });
        refused.fold(0, |bits, (vcpu, _)| bits | 1 << vcpu.0)
    }

    /// What the guest of `vcpu` may want of this core, by its budget of `generation`. The
    /// core keeps room for whichever vCPU wants most.
    pub(crate) fn set_guest(&mut self, vcpu: OwnerId, generation: u64, guest: GuestClaim) {
        let wish = (vcpu, generation, guest.counters);
        match self.wishes.iter_mut().find(|(of, ..)| *of == vcpu) {
            Some(known) => *known = wish,
            None => self.wishes.push(wish),
        }
        let named = self.guest.as_ref().map(|known| &known.events);
        if named != Some(&guest.events) {
            self.room.set(None);
        }
        self.guest = Some(guest);
    }

    /// The most counters that the guest of a vCPU which was here may want, by what its
    /// vCPU wants now; of all but `without`.
    pub(crate) fn guest_counters(&self, without: Option<OwnerId>) -> usize {
        let holdings = self
            .guest
            .as_ref()
            .and_then(|guest| guest.holdings.as_ref());
        let others = self.wishes.iter().filter(|(of, ..)| Some(*of) != without);
        let wish = |(of, _, counters): &(OwnerId, u64, usize)| {
            let now = holdings.and_then(|holdings| holdings.wish(*of));
            now.unwrap_or(*counters)
        };
        others.map(wish).max().unwrap_or(0)
    }

    /// Whether that is known.
    #[inline]
    pub(crate) fn knows_guest(&self, vcpu: OwnerId, generation: u64) -> bool {
        let mut wishes = self.wishes.iter();
        wishes.any(|(of, as_of, _)| (*of, *as_of) == (vcpu, generation))
    }

    pub(crate) fn policy(&self) -> HostPolicy {
        self.policy
    }

    /// Who comes first on this core from now on.
    pub(super) fn set_policy(&mut self, policy: HostPolicy) {
        self.policy = policy;
    }
}

/// No vCPU has this number: contexts of vCPUs go with them.
const NOBODY: OwnerId = OwnerId(u32::MAX);

/// What the firm contexts beside one vCPU rely on.
pub(crate) struct FirmDemands {
    sets: Vec<Vec<Vec<Constraint>>>,
    slots: SlotSet,
}

impl FirmDemands {
    /// Whether all of `wanted` has a place beside them, whichever sets they have active.
    pub(crate) fn leave_room_for(&self, wanted: &[Constraint]) -> bool {
        let together = self.sets.iter().map(Vec::as_slice).collect();
        fit_together(&together, wanted, self.slots)
    }
}

impl Planner<'_> {
    /// What can count a wish's events. What cannot be counted takes no slot.
    fn claim_of(self, wish: &ResourceClaim) -> Option<ContextDemand> {
        let sets = wish.sets.iter().map(|set| {
            let constraint = |request| Some(self.bank.backend().plan(request).ok()?.constraint);
            set.iter().filter_map(constraint).collect()
        });
        Some(ContextDemand {
            context: wish.context,
            vcpu: wish.vcpu,
            preemptible: wish.preemptible,
            standing: wish.standing,
            sets: ContextDemand::maximal(sets)?,
        })
    }

    /// What the attached vCPU's guest counts.
    fn guest_now(self) -> Vec<Constraint> {
        self.bank
            .holders()
            .iter()
            .filter(|report| report.counting && report.holder.is_guest())
            .filter_map(|report| Some(self.bank.backend().plan(&report.request).ok()?.constraint))
            .collect()
    }

    /// What has to count for each of the counters that a vCPU holds.
    fn promises(
        self,
        family: Option<EventFamily>,
        held: &[(CounterId, Option<NamedEvent>)],
        any: Option<Constraint>,
    ) -> Vec<Constraint> {
        let promise = |(counter, event): &(CounterId, Option<NamedEvent>)| {
            self.promise(*counter, family.zip(*event), any)
        };
        held.iter().filter_map(promise).collect()
    }
}
