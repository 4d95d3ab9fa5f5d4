//! Who counts on which slot: one pure function from claims, in the order of their precedence,
//! and constraints to slots.
//!
//! [`place`] is asked by whoever changes what is to be counted: a write of the
//! guest's, a command of a host context's, a switch, the end of a timeslice.
//! [`fits`] is asked by who has to promise something: admission, and the return
//! of a preempted context.

use std::ops::Range;

use arbiter::{CounterId, CounterSet, PerKind};
use pmu_model::{AssignError, Constraint, ContextId, SlotSet};

use crate::assign::{Demand, Placement, assign, assign_most, try_assign};
use crate::slot_bank::Claimant;

/// An event to be counted for a claimant, and the slots that can count it.
pub(crate) type Claim = (Claimant, Demand);

/// The claims of host contexts, as whoever knows their standing has put them in order.
#[derive(Debug, Default)]
pub(crate) struct HostClaims {
    /// Of those that come before what the guest has not reserved.
    pub(crate) before_guest: Vec<Claim>,
    /// Of the others.
    pub(crate) behind_guest: Vec<Claim>,
    /// Contexts that make room for all others, if they do not get all they want.
    pub(crate) yielding: Vec<ContextId>,
}

/// The claims of all who count at the same time, by precedence.
#[derive(Debug)]
pub(crate) struct PlaceClaims {
    claimants: Vec<Claimant>,
    demands: Vec<Demand>,
    /// The first are those of the guest that it has reserved.
    reserved: usize,
    /// The guest's others.
    guest: Range<usize>,
    /// Contexts that make room for the others, if they do not get all they want.
    yielding: Vec<ContextId>,
}

/// The slots of a core.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoreSlots {
    /// All of them.
    pub(crate) all: SlotSet,
    /// Those on which no counter is of a vCPU that is away.
    pub(crate) unclaimed: SlotSet,
}

/// Why counters of the guest find no slot.
#[derive(Clone, Debug)]
pub(crate) enum Shortage {
    /// They are in each other's way.
    Conflict(AssignError),
    /// Without host contexts there would be room.
    Hosts,
}

/// What claims come to.
#[derive(Debug)]
pub(crate) enum Placed {
    /// Everybody has a slot.
    All(Placement),
    /// Not everybody has; with the reason if one of the guest's has none.
    Some(Placement, Option<Shortage>),
    /// This context has to be preempted. The others claim anew then.
    Preempts(ContextId),
}

impl PlaceClaims {
    /// First what the guest has reserved; its other counters are among the contexts'.
    pub(crate) fn new(reserved: Vec<Claim>, guest: Vec<Claim>, hosts: HostClaims) -> Self {
        let mut claims = PlaceClaims {
            claimants: Vec::new(),
            demands: Vec::new(),
            reserved: reserved.len(),
            guest: 0..0,
            yielding: hosts.yielding,
        };
        claims.extend(reserved);
        claims.extend(hosts.before_guest);
        let first = claims.claimants.len();
        claims.guest = first..first + guest.len();
        claims.extend(guest);
        claims.extend(hosts.behind_guest);
        claims
    }

    /// The same without those of a context, which makes room.
    pub(crate) fn leave_out(&mut self, context: ContextId) {
        let leaves = |claimant: &Claimant| matches!(claimant, Claimant::Context { context: of, .. } if *of == context);
        let stays: Vec<bool> = self.claimants.iter().map(|one| !leaves(one)).collect();
        // The guest's others are together, with contexts before them or behind.
        let before = stays[..self.guest.start].iter();
        let before = before.filter(|stays| !**stays).count();
        self.guest = self.guest.start - before..self.guest.end - before;
        let mut stay = stays.iter();
        self.claimants.retain(|_| stay.next() == Some(&true));
        let mut stay = stays.iter();
        self.demands.retain(|_| stay.next() == Some(&true));
    }

    fn guests_demands(&self) -> Vec<Demand> {
        [
            &self.demands[..self.reserved],
            &self.demands[self.guest.clone()],
        ]
        .concat()
    }

    fn extend(&mut self, claims: impl IntoIterator<Item = Claim>) {
        for (claimant, demand) in claims {
            self.claimants.push(claimant);
            self.demands.push(demand);
        }
    }

    /// The claims with the slots that `placement` found for them.
    pub(crate) fn moves<'a>(
        &'a self,
        placement: &'a Placement,
    ) -> impl Iterator<Item = (Claimant, Option<SlotSet>)> + 'a {
        let claims = self.claimants.iter().zip(&self.demands).enumerate();
        let claims =
            claims.map(|(index, (claimant, demand))| (claimant, demand, placement.slot(index)));
        claims
            .filter(|(_, demand, slot)| slot.is_none() || *slot != demand.held)
            .map(|(claimant, demand, slot)| {
                (*claimant, slot.map(|slot| demand.constraint.taken_at(slot)))
            })
    }

    /// Whether all of them find a slot, and `more` as well.
    pub(crate) fn fit_with(&self, more: &[Demand], slots: SlotSet) -> bool {
        try_assign(&[self.demands.as_slice(), more].concat(), slots).is_some()
    }

    /// Places as many as fit, the guest's counter of number `first` (modulo their
    /// number) before its others. What is reserved takes no turns.
    pub(crate) fn rotated(&mut self, slots: CoreSlots, first: usize) -> Placement {
        let guest = self.guest.clone();
        let first = first % guest.len().max(1);
        self.claimants[guest.clone()].rotate_left(first);
        self.demands[guest].rotate_left(first);
        assign_most(&self.demands, slots.all, 0)
    }

    /// The context that yields and was left without, of the least precedence.
    fn loser(&self, placement: &Placement) -> Option<ContextId> {
        let lost = self.claimants.iter().enumerate().rev();
        lost.filter(|(index, _)| placement.slot(*index).is_none())
            .find_map(|(_, claimant)| match *claimant {
                Claimant::Context { context, .. } if self.yielding.contains(&context) => {
                    Some(context)
                }
                Claimant::Context { .. } | Claimant::Guest { .. } => None,
            })
    }
}

/// Places claims. Where there are too few slots, the guest's counters that have
/// one keep it; where they take turns, [`PlaceClaims::rotated`] places them anew.
pub(crate) fn place(claims: &PlaceClaims, slots: CoreSlots) -> Placed {
    // No other vCPU's counter is moved while there is room beside it.
    let all = try_assign(&claims.demands, slots.unclaimed);
    if let Some(placement) = all.or_else(|| try_assign(&claims.demands, slots.all)) {
        return Placed::All(placement);
    }
    let placement = assign_most(&claims.demands, slots.all, 0);
    if let Some(loser) = claims.loser(&placement) {
        return Placed::Preempts(loser);
    }
    let mut guest = (0..claims.reserved).chain(claims.guest.clone());
    if guest.all(|index| placement.slot(index).is_some()) {
        return Placed::Some(placement, None);
    }
    let shortage = match assign(&claims.guests_demands(), slots.all) {
        Ok(_) => Shortage::Hosts,
        Err(conflict) => Shortage::Conflict(conflict),
    };
    Placed::Some(placement, Some(shortage))
}

/// Which counters of `guest`, the last ones, are too many for a budget beside those that
/// are `reserved`. These have their places until they are revoked.
pub(crate) fn beyond(most: PerKind, reserved: &[Claim], guest: &[Claim]) -> Vec<CounterId> {
    let counter = |(_, demand): &Claim| demand.counter;
    let mut taken: CounterSet = reserved.iter().map(counter).collect();
    let mut beyond = Vec::new();
    for counter in guest.iter().map(counter) {
        if PerKind::count(taken).of(counter) < most.of(counter) {
            taken.insert(counter);
        } else {
            beyond.push(counter);
        }
    }
    beyond
}

/// Takes them out of `guest`, and yields them.
pub(crate) fn keep_to(most: PerKind, reserved: &[Claim], guest: &mut Vec<Claim>) -> Vec<CounterId> {
    let beyond = beyond(most, reserved, guest);
    guest.retain(|(_, demand)| !beyond.contains(&demand.counter));
    beyond
}

/// Whether all of this can be counted at once.
pub(crate) fn fits<'a>(constraints: impl Iterator<Item = &'a Constraint>, slots: SlotSet) -> bool {
    let demand = |constraint: &Constraint| Demand {
        counter: CounterId::Programmable(0),
        constraint: *constraint,
        held: None,
    };
    let demands: Vec<_> = constraints.map(demand).collect();
    try_assign(&demands, slots).is_some()
}
