//! Which physical counter counts for which logical one: a pure function of
//! what each counter needs and of the slots that are free.
//!
//! Assignment is a bipartite matching of least cost, so it fails only where
//! none exists, and moves as few counters as any assignment could. Counters
//! that take two slots are placed by a search around that matching, as there
//! are few of them. Nothing here allocates.

mod search;

use arbiter::{CounterId, CounterSet};
use pmu_model::{AssignError, Constraint, SlotIndex, SlotSet};

use search::Search;

/// Most demands of one assignment: more than any model has counters, together
/// with those of a vCPU's and a core's host context.
pub const MAX_DEMANDS: usize = 64;

/// A logical counter that wants a physical one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    pub counter: CounterId,
    /// What can count for it.
    pub constraint: Constraint,
    /// Where it is at present. It stays there unless that stands in the way.
    pub held: Option<SlotIndex>,
}

/// Where the demands of one call were placed, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    slots: [Option<SlotIndex>; MAX_DEMANDS],
}

impl Default for Placement {
    fn default() -> Self {
        Placement {
            slots: [None; MAX_DEMANDS],
        }
    }
}

impl Placement {
    /// Slot of the demand at `index`; the even one of a pair. `None` where it
    /// was not placed.
    pub fn slot(&self, index: usize) -> Option<SlotIndex> {
        self.slots.get(index).copied().flatten()
    }

    /// Number of demands that were placed.
    pub fn placed(&self) -> usize {
        self.slots.iter().flatten().count()
    }
}

/// Places every demand. `free` are the slots that may be used: a slot held
/// by somebody else is not among them, those in [`Demand::held`] are.
///
/// No placement moves fewer of the demands that hold a slot.
///
/// # Errors
/// There is no placement; the counters that are in each other's way are
/// named. Demands beyond [`MAX_DEMANDS`] find no slot.
pub fn assign(demands: &[Demand], free: SlotSet) -> Result<Placement, AssignError> {
    if let Some(surplus @ [_, ..]) = demands.get(MAX_DEMANDS..) {
        return Err(AssignError {
            counters: surplus.iter().map(|demand| demand.counter).collect(),
            paired: CounterSet::EMPTY,
            slots: SlotSet::EMPTY,
            exclusive: None,
        });
    }
    try_assign(demands, free).ok_or_else(|| conflict(demands, &Search::new(demands, free), free))
}

/// As [`assign`], for who need not know what stands in the way: naming that takes longer
/// than the placement.
pub fn try_assign(demands: &[Demand], free: SlotSet) -> Option<Placement> {
    if demands.len() > MAX_DEMANDS {
        return None;
    }
    let search = Search::new(demands, free);
    let slots = search.place(search.all())?;
    Some(Placement { slots })
}

/// Places as many demands as fit, by priority: the demand at `first` (modulo
/// their number), those after it, and then those before it. A demand is left
/// out only where it cannot be placed together with all that were placed
/// before it; a later one never displaces it. Demands beyond [`MAX_DEMANDS`]
/// are left out.
pub fn assign_most(demands: &[Demand], free: SlotSet, first: usize) -> Placement {
    let search = Search::new(demands, free);
    let count = demands.len().min(MAX_DEMANDS);
    let order = (0..count).map(|step| (first % count + step) % count);
    if !search.has_pairs() {
        return Placement {
            slots: search.match_most(order),
        };
    }
    let mut set = 0;
    let mut slots = Placement::default().slots;
    for index in order {
        if let Some(placed) = search.place(set | 1 << index) {
            set |= 1 << index;
            slots = placed;
        }
    }
    Placement { slots }
}

/// Names the conflict in demands that cannot all be placed: what is left when
/// every demand was taken out without which the rest still cannot be placed.
fn conflict(demands: &[Demand], search: &Search<'_>, free: SlotSet) -> AssignError {
    let mut set = search.all();
    for index in 0..demands.len() {
        let without = set & !(1 << index);
        if search.place(without).is_none() {
            set = without;
        }
    }
    let exclusive = search.shared_name(set);
    let mut error = AssignError {
        counters: CounterSet::EMPTY,
        paired: CounterSet::EMPTY,
        slots: SlotSet::EMPTY,
        exclusive,
    };
    for (index, demand) in demands.iter().enumerate() {
        let Demand {
            counter,
            constraint,
            ..
        } = demand;
        // A name is told with everybody who asks for it, not just with two.
        let concerned = match exclusive {
            Some(_) => constraint.exclusive == exclusive,
            None => set & (1 << index) != 0,
        };
        if !concerned {
            continue;
        }
        error.counters.insert(*counter);
        if constraint.paired {
            error.paired.insert(*counter);
        }
        error.slots = error.slots.union(constraint.slots.intersection(free));
    }
    error
}
