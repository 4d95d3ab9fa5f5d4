//! Who gets the physical counters of a core: guests or host contexts.
//!
//! A pure function of what everybody may want. One rule holds for every policy:
//! a context is loaded for good if each of its event sets fits beside what the
//! policy guarantees the guest, whatever the guest will count, and beside all
//! contexts that count at the same time, whichever sets they have active; a
//! preemptible one is also loaded if it fits beside what is counted now.
//! `docs/reference/perfmon-arbitration.md` has the reasons.

use std::fmt;

use perfmon::ContextId;
use pmu_model::{Constraint, OwnerId, SlotSet};
use thiserror::Error;

use crate::assign::MAX_DEMANDS;
use crate::placement::fits;
use crate::policy::{HostPolicy, Standing};

/// What a context may want of a core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextDemand {
    pub context: ContextId,
    /// The vCPU that it is loaded on; none if that is the core. Contexts of two
    /// vCPUs never count at the same time; those of one vCPU and of the core all do.
    pub vcpu: Option<OwnerId>,
    /// Others may take its counters for a time.
    pub preemptible: bool,
    /// What it relies on; of an applicant, nothing yet.
    pub standing: Standing,
    /// What can count for each counter of each of its sets.
    pub sets: Vec<Vec<Constraint>>,
}

/// What guests may want of a core.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestRoom {
    /// Counters that one vCPU's guest can use.
    pub counters: usize,
    /// What can count each event that it may ask for.
    pub kinds: Vec<Constraint>,
    /// What it counts now.
    pub now: Vec<Constraint>,
    /// What can count each of the counters that it has reserved, which it has under
    /// every policy: it may be any of these, and nothing is reserved if there are none.
    pub reserved: Vec<Vec<Constraint>>,
}

/// The counters of a core, and who is there.
#[derive(Clone, Copy, Debug)]
pub struct Room<'a> {
    /// Who comes first.
    pub policy: HostPolicy,
    /// Every slot of the core.
    pub slots: SlotSet,
    pub guest: &'a GuestRoom,
    /// Contexts that are loaded, the oldest first.
    pub claims: &'a [ContextDemand],
}

/// A place was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// What the context may rely on.
    pub standing: Standing,
    /// Preemptible contexts that make room for it, the oldest first. From now on
    /// they have what is left over.
    pub preempts: Vec<ContextId>,
}

/// Nothing is left for a context.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct NoRoom {
    /// Who comes first.
    pub policy: HostPolicy,
    /// Counters that its largest set needs.
    pub needs: usize,
    /// Slots that could serve one of them.
    pub slots: usize,
    /// Counters that are the guest's.
    pub guest: usize,
    /// Counters that it has reserved, whatever the policy.
    pub reserved: usize,
    /// Contexts that count at the same time and keep what they have, with the
    /// counters of their largest sets.
    pub others: Vec<(ContextId, usize)>,
    /// There are more counters to be placed at a time than [`MAX_DEMANDS`].
    pub crowded: bool,
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NoRoom {
            policy,
            needs,
            slots,
            guest,
            reserved,
            others,
            crowded,
        } = self;
        if *crowded {
            write!(
                f,
                "too many counters at a time: all contexts here and the guest together may want \
                 more than {MAX_DEMANDS}; unload one of"
            )?;
            let others = others.iter().map(|(context, _)| context.to_string());
            return write!(f, " {}", others.collect::<Vec<_>>().join(", "));
        }
        write!(
            f,
            "no room: its largest event set needs {needs} of {slots} counters that can count it; \
             --host-policy {policy} keeps {guest} for the guest"
        )?;
        if *reserved > 0 {
            write!(f, ", who has reserved {reserved}")?;
        }
        for (context, counters) in others {
            write!(f, ", {context} has {counters}")?;
        }
        Ok(())
    }
}

/// Whether a context can be loaded.
///
/// # Errors
/// It cannot; who has the counters.
pub fn admit(room: &Room<'_>, applicant: &ContextDemand) -> Result<Claimed, NoRoom> {
    let rivals: Vec<&ContextDemand> = room.rivals(applicant).collect();
    // What is left over is left to firm ones, so those are not in the way.
    let firm = rivals
        .iter()
        .copied()
        .filter(|claim| claim.standing == Standing::Firm);
    let guarantees = room.guarantees();
    if let Some(preempts) = room.clear(applicant, firm.collect(), &guarantees) {
        return Ok(Claimed {
            standing: Standing::Firm,
            preempts,
        });
    }
    if applicant.preemptible
        && let Some(preempts) = room.clear(applicant, rivals, std::slice::from_ref(&room.guest.now))
    {
        return Ok(Claimed {
            standing: Standing::Spare,
            preempts,
        });
    }
    Err(room.no_room(applicant))
}

impl ContextDemand {
    /// Keeps of the sets those that demand something which no other one does.
    /// `None` if too many are left to be judged one by one.
    #[must_use]
    pub fn maximal(
        sets: impl IntoIterator<Item = Vec<Constraint>>,
    ) -> Option<Vec<Vec<Constraint>>> {
        let mut kept: Vec<Vec<Constraint>> = Vec::new();
        for set in sets {
            if kept.iter().any(|other| covers(other, &set)) {
                continue;
            }
            kept.retain(|other| !covers(&set, other));
            kept.push(set);
            if kept.len() > MOST_SETS {
                return None;
            }
        }
        Some(kept)
    }

    /// Counters of the largest set.
    fn needs(&self) -> usize {
        self.sets.iter().map(|set| counters(set)).max().unwrap_or(0)
    }
}

/// Most sets of a context that demand different things. A context has fewer than
/// that by far: sets differ by what they count, and seldom by what can count it.
const MOST_SETS: usize = 16;

/// In how many ways sets of several contexts may be active together, so that each is
/// judged by itself: two contexts always, more of them as long as that is cheap. Beyond
/// it a context counts as the most that any of its sets wants.
fn most_ways(contexts: usize) -> usize {
    if contexts > 2 {
        MOST_SETS
    } else {
        MOST_SETS * MOST_SETS
    }
}

/// The sets of each of several contexts that count at the same time.
pub(crate) type SetsTogether<'a> = Vec<&'a [Vec<Constraint>]>;

/// Whether contexts have room together and beside `guest`, whichever sets are active.
///
/// Takes one assignment if the most that each context may want of each kind fits, and
/// no more than [`most_ways`] otherwise. The answer never becomes "no" by taking a
/// context away.
pub(crate) fn fit_together(
    contexts: &SetsTogether<'_>,
    guest: &[Constraint],
    slots: SlotSet,
) -> bool {
    let at_most: Vec<Vec<Constraint>> = contexts.iter().map(|sets| most_of(sets)).collect();
    if fits(at_most.iter().flatten().chain(guest), slots) {
        return true;
    }
    let ways = contexts
        .iter()
        .try_fold(1usize, |ways, sets| ways.checked_mul(sets.len().max(1)));
    // With a single set each, the maxima are what is wanted.
    let (Some(ways), true) = (ways, contexts.iter().any(|sets| sets.len() > 1)) else {
        return false;
    };
    let fits = |way| fits(chosen(contexts, way).chain(guest), slots);
    ways <= most_ways(contexts.len()) && (0..ways).all(fits)
}

/// What is wanted if the sets of way number `way` are active.
fn chosen<'a>(contexts: &'a SetsTogether<'_>, way: usize) -> impl Iterator<Item = &'a Constraint> {
    let mut rest = way;
    contexts.iter().flat_map(move |sets| {
        let at = rest % sets.len().max(1);
        rest /= sets.len().max(1);
        sets.get(at).into_iter().flatten()
    })
}

/// The most of each kind that any of `sets` demands: what covers each of them.
pub(crate) fn most_of(sets: &[Vec<Constraint>]) -> Vec<Constraint> {
    let Some((first, rest)) = sets.split_first() else {
        return Vec::new();
    };
    let mut most = first.clone();
    for set in rest {
        let mut covering = most.clone();
        for constraint in set {
            match covering.iter().position(|one| one == constraint) {
                Some(at) => drop(covering.swap_remove(at)),
                None => most.push(*constraint),
            }
        }
    }
    most
}

/// Whether `larger` demands all that `smaller` does.
fn covers(larger: &[Constraint], smaller: &[Constraint]) -> bool {
    let mut left = larger.to_vec();
    smaller.iter().all(|constraint| {
        let at = left.iter().position(|one| one == constraint);
        at.map(|at| left.swap_remove(at)).is_some()
    })
}

/// Slots that a set takes.
fn counters(set: &[Constraint]) -> usize {
    set.iter().map(|one| 1 + usize::from(one.paired)).sum()
}

impl Room<'_> {
    /// Contexts that may count at the same time as `applicant`.
    fn rivals(&self, applicant: &ContextDemand) -> impl Iterator<Item = &ContextDemand> {
        let vcpu = applicant.vcpu;
        self.claims
            .iter()
            .filter(move |claim| vcpu.is_none() || claim.vcpu.is_none() || claim.vcpu == vcpu)
    }

    /// What the guest may want at once and has to get, for each event.
    fn guarantees(&self) -> Vec<Vec<Constraint>> {
        // A guest that counts nothing else.
        let mut all = self.guest.reserved.clone();
        if all.is_empty() {
            all.push(Vec::new());
        }
        for reserved in 0..all.len() {
            for kind in &self.guest.kinds {
                let reserved = all[reserved].as_slice();
                let more = self.guaranteed(kind).saturating_sub(reserved.len());
                if more > 0 {
                    all.push([reserved, &vec![*kind; more]].concat());
                }
            }
        }
        all
    }

    /// How many counters of a kind the guest is guaranteed.
    fn guaranteed(&self, kind: &Constraint) -> usize {
        let slots = kind.slots.intersection(self.slots).len();
        let slots = usize::try_from(slots).unwrap_or(0);
        self.policy.guest_share(slots).min(self.guest.counters)
    }

    /// Which of `staying` have to make room, the oldest first, so that
    /// `applicant` fits beside the others and any of `guests`. `None` if it does
    /// not even if all do that may.
    fn clear(
        &self,
        applicant: &ContextDemand,
        mut staying: Vec<&ContextDemand>,
        guests: &[Vec<Constraint>],
    ) -> Option<Vec<ContextId>> {
        let mut preempts = Vec::new();
        // Who makes room is in nobody's way any more, so what fitted before still does.
        for vcpu in spots(applicant, &staying) {
            while !self.fits(applicant, &staying, vcpu, guests) {
                let oldest = staying.iter().position(|claim| claim.preemptible)?;
                preempts.push(staying.remove(oldest).context);
            }
        }
        Some(preempts)
    }

    /// Whether `applicant` fits beside those of `staying` that count while `vcpu` is
    /// on the core, and any of `guests`.
    fn fits(
        &self,
        applicant: &ContextDemand,
        staying: &[&ContextDemand],
        vcpu: Option<OwnerId>,
        guests: &[Vec<Constraint>],
    ) -> bool {
        let together = together(applicant, staying, vcpu);
        let mut guests = guests.iter();
        guests.all(|guest| fit_together(&together, guest, self.slots))
    }

    /// Whether contexts that make no room for `applicant`, and the guest, may want more
    /// counters at a time than are ever placed together.
    fn is_crowded(&self, applicant: &ContextDemand) -> bool {
        // Fewer slots than that are what is short.
        if usize::try_from(self.slots.len()).unwrap_or(0) <= MAX_DEMANDS {
            return false;
        }
        let staying: Vec<_> = self.rivals(applicant).collect();
        let staying: Vec<_> = staying.into_iter().filter(|one| !one.preemptible).collect();
        let guest = self.guarantees().iter().map(Vec::len).max().unwrap_or(0);
        spots(applicant, &staying).into_iter().any(|vcpu| {
            let together = together(applicant, &staying, vcpu);
            let wanted: usize = together.iter().map(|sets| most_of(sets).len()).sum();
            wanted + guest > MAX_DEMANDS
        })
    }

    fn no_room(&self, applicant: &ContextDemand) -> NoRoom {
        let of_sets = applicant.sets.iter().flatten();
        let usable = of_sets.fold(SlotSet::EMPTY, |all, one| all.union(one.slots));
        let slots = usable.intersection(self.slots);
        let kinds = self.guest.kinds.iter();
        let reached = kinds.filter(|kind| !kind.slots.intersection(slots).is_empty());
        NoRoom {
            policy: self.policy,
            needs: applicant.needs(),
            slots: usize::try_from(slots.len()).unwrap_or(0),
            guest: reached.map(|kind| self.guaranteed(kind)).max().unwrap_or(0),
            reserved: self.guest.reserved.iter().map(Vec::len).max().unwrap_or(0),
            crowded: self.is_crowded(applicant),
            others: self
                .rivals(applicant)
                .filter(|claim| !claim.preemptible)
                .map(|claim| (claim.context, claim.needs()))
                .collect(),
        }
    }
}

/// The vCPUs with contexts beside which `applicant` counts, one after the other; none
/// stands for any other.
fn spots(applicant: &ContextDemand, staying: &[&ContextDemand]) -> Vec<Option<OwnerId>> {
    if applicant.vcpu.is_some() {
        return vec![applicant.vcpu];
    }
    let mut spots = vec![None];
    for claim in staying {
        if !spots.contains(&claim.vcpu) {
            spots.push(claim.vcpu);
        }
    }
    spots
}

/// The sets of `applicant` and of those that count with it while `vcpu` is there.
fn together<'a>(
    applicant: &'a ContextDemand,
    staying: &[&'a ContextDemand],
    vcpu: Option<OwnerId>,
) -> SetsTogether<'a> {
    let counts = |claim: &&&ContextDemand| claim.vcpu.is_none() || claim.vcpu == vcpu;
    let others = staying
        .iter()
        .filter(counts)
        .map(|claim| claim.sets.as_slice());
    std::iter::once(applicant.sets.as_slice())
        .chain(others)
        .collect()
}
