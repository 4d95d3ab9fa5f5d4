//! Who gets the physical counters of a core: guests or host contexts.
//!
//! A pure function of what everybody may want. One rule holds for every policy:
//! a context is loaded for good if each of its event sets fits beside what the
//! policy guarantees the guest, whatever the guest will count; a preemptible one
//! is also loaded if it fits beside what is counted now. `docs/perfmon-arbitration.md`
//! has the reasons.

use std::fmt;

use perfmon::ContextId;
use pmu_model::{Constraint, OwnerId, SlotSet};
use thiserror::Error;

use crate::placement::fits;
use crate::policy::{HostPolicy, Standing};

/// What a context may want of a core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextDemand {
    /// The context.
    pub context: ContextId,
    /// The vCPU that it is loaded on; none if that is the core. Contexts of two
    /// vCPUs never count at the same time.
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
    /// every policy.
    pub reserved: Vec<Constraint>,
}

/// The counters of a core, and who is there.
#[derive(Clone, Copy, Debug)]
pub struct Room<'a> {
    /// Who comes first.
    pub policy: HostPolicy,
    /// Every slot of the core.
    pub slots: SlotSet,
    /// The guest.
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
        } = self;
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
    /// Contexts that count at the same time as `applicant`.
    fn rivals(&self, applicant: &ContextDemand) -> impl Iterator<Item = &ContextDemand> {
        let of_vcpu = applicant.vcpu.is_some();
        self.claims
            .iter()
            .filter(move |claim| claim.vcpu.is_some() != of_vcpu)
    }

    /// What the guest may want at once and has to get, for each event.
    fn guarantees(&self) -> Vec<Vec<Constraint>> {
        let reserved = &self.guest.reserved;
        let kinds = self.guest.kinds.iter();
        let beside = |kind: &Constraint| {
            let more = self.guaranteed(kind).saturating_sub(reserved.len());
            let mut all = reserved.clone();
            all.extend(vec![*kind; more]);
            all
        };
        let mut all: Vec<_> = kinds.map(beside).collect();
        // A guest that counts nothing else.
        all.push(reserved.clone());
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
        while !self.fits(applicant, &staying, guests) {
            let oldest = staying.iter().position(|claim| claim.preemptible)?;
            preempts.push(staying.remove(oldest).context);
        }
        Some(preempts)
    }

    /// Whether each set of `applicant` fits beside each set of each of
    /// `staying` and any of `guests`. Those that stay never count together.
    fn fits(
        &self,
        applicant: &ContextDemand,
        staying: &[&ContextDemand],
        guests: &[Vec<Constraint>],
    ) -> bool {
        let nothing: &[Constraint] = &[];
        let others = || {
            let sets = staying.iter().flat_map(|claim| &claim.sets);
            sets.map(Vec::as_slice).chain([nothing])
        };
        applicant.sets.iter().all(|set| {
            others().all(|other| {
                let all = |guest: &Vec<Constraint>| {
                    fits([set, other, guest].into_iter().flatten(), self.slots)
                };
                guests.iter().all(all)
            })
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
            reserved: self.guest.reserved.len(),
            others: self
                .rivals(applicant)
                .filter(|claim| !claim.preemptible)
                .map(|claim| (claim.context, claim.needs()))
                .collect(),
        }
    }
}
