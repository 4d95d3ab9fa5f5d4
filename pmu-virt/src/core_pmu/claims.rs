//! What host contexts may want of a core, and whether there is room.

use arbiter::CounterSet;
use perfmon::ContextId;
use perfmon_abi::wire::{Errno, Refusal, Subcode};
use pmu_model::{Constraint, CountRequest, EventFamily, OwnerId, SlotSet};

use super::{CorePmu, not_countable};
use crate::admission::{Claimed, ContextDemand, GuestRoom, NoRoom, Room, admit, fit_together};
use crate::assign::MAX_DEMANDS;
use crate::attached::{AttachedContext, GuestLimit, HostEvent, NotLoaded};
use crate::holdings::Holdings;
use crate::policy::Standing;

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
    fn of(hosted: &AttachedContext, vcpu: Option<OwnerId>) -> Self {
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

/// What guests may want of a core, likewise.
#[derive(Clone, Debug, Default)]
pub(crate) struct GuestClaim {
    pub(crate) counters: usize,
    pub(crate) events: Vec<CountRequest>,
    /// The vocabulary of its event selects.
    pub(crate) family: Option<EventFamily>,
    /// What the vCPUs of the VM have reserved.
    pub(crate) holdings: Option<Holdings>,
}

impl CorePmu {
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
            .and_then(|()| self.claim(&hosted, vcpu));
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
                    Errno::EBUSY => self.guest_limit(&ResourceClaim::of(&hosted, vcpu)),
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

    /// Notes what a context may want, if there is room.
    fn claim(
        &mut self,
        hosted: &AttachedContext,
        vcpu: Option<OwnerId>,
    ) -> Result<Standing, Refusal> {
        let mut wish = ResourceClaim::of(hosted, vcpu);
        let claimed = self.judge(&wish)?;
        wish.standing = claimed.standing;
        self.note_claim(wish);
        self.host.room.set(None);
        for claim in &mut self.host.claims {
            if claimed.preempts.contains(&claim.context) {
                claim.standing = Standing::Spare;
            }
        }
        Ok(claimed.standing)
    }

    fn note_claim(&mut self, wish: ResourceClaim) {
        self.host.room.set(None);
        let known = |claim: &&mut ResourceClaim| claim.context == wish.context;
        match self.host.claims.iter_mut().find(known) {
            Some(before) => *before = wish,
            None => self.host.claims.push(wish),
        }
    }

    /// What a wish comes to.
    fn judge(&self, wish: &ResourceClaim) -> Result<Claimed, Refusal> {
        let claims = self.claims_beside(wish);
        let applicant = self.claim_of(wish).ok_or_else(|| {
            let reason = "the event sets demand too many different things; use fewer sets";
            Refusal::new(Errno::EBUSY, reason)
        })?;
        let admitted = self.admit_beside(&applicant, &claims, &self.guest_room(0));
        admitted.map_err(|full| {
            Refusal::new(Errno::EBUSY, full.to_string()).because(Subcode::ResourceUnavailable)
        })
    }

    /// What all contexts but that of `wish` may want.
    fn claims_beside(&self, wish: &ResourceClaim) -> Vec<ContextDemand> {
        let others = self.host.claims.iter();
        let others = others.filter(|claim| claim.context != wish.context);
        others.filter_map(|claim| self.claim_of(claim)).collect()
    }

    /// What the owners of reserved counters would have to keep to, so that there is room
    /// for a wish, whichever counters they give up: as few as can be.
    fn guest_limit(&self, wish: &ResourceClaim) -> Option<GuestLimit> {
        let (applicant, claims) = (self.claim_of(wish)?, self.claims_beside(wish));
        let guest = self.guest_room(0);
        let holdings = self.host.guest.as_ref()?.holdings.as_ref()?;
        let held = holdings.most();
        let beside = |most: u8, fewer: u8| {
            let guest = GuestRoom {
                counters: guest.counters.saturating_sub(fewer.into()),
                reserved: self.reserved(most.into()),
                ..guest.clone()
            };
            let admitted = self.admit_beside(&applicant, &claims, &guest);
            admitted.ok().map(|_| GuestLimit { fewer, most })
        };
        // What is not theirs is promised to the guest's other code under some policies.
        (0..held)
            .rev()
            .find_map(|most| beside(most, 0).or_else(|| beside(most, held - most)))
    }

    /// What guests may want, and so many counters more.
    fn guest_room(&self, more: usize) -> GuestRoom {
        let guest = self.host.guest.as_ref();
        GuestRoom {
            counters: guest.map_or(0, |_| self.host.guest_counters(None).saturating_add(more)),
            kinds: self.kinds(),
            now: self.guest_now(),
            reserved: self.reserved(usize::MAX),
        }
    }

    fn admit_beside(
        &self,
        applicant: &ContextDemand,
        claims: &[ContextDemand],
        guest: &GuestRoom,
    ) -> Result<Claimed, NoRoom> {
        let room = Room {
            policy: self.host.policy,
            slots: self.bank.slots(),
            guest,
            claims,
        };
        admit(&room, applicant)
    }

    /// What can count a wish's events. What cannot be counted takes no slot.
    fn claim_of(&self, wish: &ResourceClaim) -> Option<ContextDemand> {
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

    fn kinds(&self) -> Vec<Constraint> {
        let mut kinds: Vec<Constraint> = Vec::new();
        let events = self.host.guest.iter().flat_map(|guest| &guest.events);
        for request in events {
            if let Ok(plan) = self.plan_for_guest(request)
                && !kinds.contains(&plan.constraint)
            {
                kinds.push(plan.constraint);
            }
        }
        kinds
    }

    /// What can count most of the events that the guest may ask for: what is held for
    /// a counter that is reserved and has no event yet.
    pub(crate) fn any_event(&self, events: &[CountRequest]) -> Option<Constraint> {
        let plan = |request| Some(self.plan_for_guest(request).ok()?.constraint);
        let all: Vec<Constraint> = events.iter().filter_map(plan).collect();
        let served = |one: &&Constraint| all.iter().filter(|other| other == one).count();
        // Of those alike the first.
        all.iter().rev().max_by_key(served).copied()
    }

    /// What is firm and counts while `vcpu` does.
    pub(crate) fn firm_beside(&self, vcpu: OwnerId) -> FirmDemands {
        let claims = self.host.claims.iter();
        let firm = claims.filter(|one| one.standing == Standing::Firm);
        let beside = firm.filter(|one| one.vcpu.is_none_or(|of| of == vcpu));
        FirmDemands {
            sets: beside
                .filter_map(|one| Some(self.claim_of(one)?.sets))
                .collect(),
            slots: self.bank.slots(),
        }
    }

    /// What is firm of `vcpu` alone.
    pub(crate) fn firm_of(&self, vcpu: OwnerId) -> FirmDemands {
        let claims = self.host.claims.iter();
        let own = claims.filter(|one| one.standing == Standing::Firm && one.vcpu == Some(vcpu));
        FirmDemands {
            sets: own
                .filter_map(|one| Some(self.claim_of(one)?.sets))
                .collect(),
            slots: self.bank.slots(),
        }
    }

    /// How many counters of a vCPU that comes have a slot here beside what the core's
    /// own contexts rely on, going by the events that its guest can name.
    #[must_use]
    pub fn room(&self) -> usize {
        let known = self.host.room.get();
        known.unwrap_or_else(|| {
            let room = self.find_room();
            self.host.room.set(Some(room));
            room
        })
    }

    fn find_room(&self) -> usize {
        let mut of_core = self.host.claims.iter().filter(|one| one.vcpu.is_none());
        let guest = self.host.guest.as_ref();
        let any = guest.and_then(|guest| self.any_event(&guest.events));
        let (Some(any), true) = (any, of_core.any(|one| one.standing == Standing::Firm)) else {
            return usize::MAX;
        };
        let firm = self.firm_beside(NOBODY);
        let fit = |count: &usize| firm.leave_room_for(&vec![any; count + 1]);
        (0..MAX_DEMANDS).take_while(fit).count()
    }

    /// How many counters `vcpu`, which is here or was parked here, relies on: those
    /// that it `holds`, and those of its contexts that were promised them.
    pub(crate) fn relied_on(&self, vcpu: OwnerId, holds: CounterSet) -> usize {
        let mut claims = self.host.claims.iter();
        let firm = claims
            .by_ref()
            .filter(|one| one.vcpu == Some(vcpu) && one.standing == Standing::Firm);
        let of_context = firm.map(|one| one.sets.iter().map(Vec::len).max().unwrap_or(0));
        usize::try_from(holds.len()).unwrap_or(usize::MAX) + of_context.sum::<usize>()
    }

    /// What the attached vCPU's guest counts.
    fn guest_now(&self) -> Vec<Constraint> {
        self.bank
            .holders()
            .iter()
            .filter(|report| report.counting && report.holder.is_guest())
            .filter_map(|report| Some(self.bank.backend().plan(&report.request).ok()?.constraint))
            .collect()
    }

    /// Whether what contexts rely on here has room if the guest of `vcpu` may want so many
    /// `counters`.
    pub(crate) fn guest_may_have(&self, vcpu: OwnerId, counters: usize) -> bool {
        let known = self.host.guest_counters(None);
        let wanted = self.host.guest_counters(Some(vcpu));
        let more = wanted.max(counters).saturating_sub(known);
        more == 0 || self.guest_may_have_more(more)
    }

    /// Whether what contexts rely on here has room beside a guest with so many
    /// counters more.
    pub(crate) fn guest_may_have_more(&self, counters: usize) -> bool {
        let claims = self.host.claims.iter();
        let firm = claims.filter(|wish| wish.standing == Standing::Firm);
        let firm: Option<Vec<ContextDemand>> = firm.map(|wish| self.claim_of(wish)).collect();
        let Some(firm) = firm else { return false };
        let guest = self.guest_room(counters);
        (0..firm.len()).all(|index| {
            let mut others = firm.clone();
            let one = others.remove(index);
            let claimed = self.admit_beside(&one, &others, &guest);
            claimed.is_ok_and(|claimed| claimed.standing == Standing::Firm)
        })
    }

    /// A vCPU comes with its context. What it may rely on here.
    pub(crate) fn adopt(&mut self, hosted: &mut AttachedContext) {
        if self.standing_of(hosted.id()).is_none() {
            hosted.choose_for_samplers(self.bank.backend());
            self.reclaim(hosted);
        }
    }

    /// What a context wants has changed while it is loaded: it has what is left
    /// over if there is no more room.
    pub(super) fn reclaim(&mut self, hosted: &AttachedContext) {
        let Err(refusal) = self.claim(hosted, hosted.vcpu()) else {
            return;
        };
        let (context, vcpu) = (hosted.id(), hosted.vcpu());
        let mut claims = self.host.claims.iter();
        let is_known = claims.any(|claim| claim.context == context && claim.overdrawn);
        let mut wish = ResourceClaim::of(hosted, vcpu);
        wish.overdrawn = true;
        self.note_claim(wish);
        // A tool can write as often as it likes.
        if !is_known {
            log::info!("{context}: {refusal}");
            self.host.record(context, vcpu, HostEvent::Overdrawn);
        }
    }

    /// A context goes: what it had is the others', which may rely on more now.
    pub(crate) fn dismiss(&mut self, hosted: &AttachedContext) {
        let vcpu = hosted.vcpu();
        self.forget_claim(hosted.id());
        self.host.record(hosted.id(), vcpu, HostEvent::Unloaded);
    }

    /// The same of one that goes on elsewhere.
    pub(crate) fn forget_claim(&mut self, context: ContextId) {
        self.host.claims.retain(|claim| claim.context != context);
        self.host.room.set(None);
        let claims = &self.host.claims;
        if claims.iter().all(|claim| claim.standing == Standing::Firm) {
            return;
        }
        let demands: Vec<_> = claims.iter().map(|claim| self.claim_of(claim)).collect();
        let mut known: Vec<ContextDemand> = demands.iter().flatten().cloned().collect();
        let guest = self.guest_room(0);
        for (index, demand) in demands.into_iter().enumerate() {
            let claim = &self.host.claims[index];
            let Some(demand) = demand.filter(|_| claim.standing != Standing::Firm) else {
                continue;
            };
            let at = known.iter().position(|one| one.context == demand.context);
            let Some(mut own) = at.map(|at| known.remove(at)) else {
                continue;
            };
            if let Ok(claimed) = self.admit_beside(&demand, &known, &guest)
                && claimed.preempts.is_empty()
            {
                own.standing = claimed.standing;
                self.host.claims[index].standing = claimed.standing;
                self.host.claims[index].overdrawn = false;
            }
            // In its place: the oldest are asked first to make room.
            known.insert(at.unwrap_or(0), own);
        }
    }

    /// What a claim has come to; contexts ask before places are given out.
    pub(crate) fn standing_of(&self, context: ContextId) -> Option<Standing> {
        let claim = self
            .host
            .claims
            .iter()
            .find(|claim| claim.context == context);
        claim.map(|claim| claim.standing)
    }

    /// How old a claim is: the oldest are at 0.
    pub(crate) fn age_of(&self, context: ContextId) -> Option<usize> {
        let claims = &self.host.claims;
        claims.iter().position(|claim| claim.context == context)
    }
}

/// No vCPU has this number: contexts of vCPUs go with them.
pub(super) const NOBODY: OwnerId = OwnerId(u32::MAX);

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
