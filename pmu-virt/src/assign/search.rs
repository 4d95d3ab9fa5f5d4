//! The matching of least cost, and the search for pairs around it.

use pmu_model::{SlotIndex, SlotSet};

use super::{Demand, MAX_DEMANDS};

/// Demands by their index.
pub(super) type Set = u64;

/// Slots by demand.
pub(super) type SlotByDemand = [Option<SlotIndex>; MAX_DEMANDS];

/// A placement with the number of demands that it moves.
#[derive(Clone, Copy)]
struct Assigned {
    slots: SlotByDemand,
    moves: u32,
}

/// Demands and the slots that they may use.
pub(super) struct Search<'a> {
    demands: &'a [Demand],
    free: SlotSet,
}

impl<'a> Search<'a> {
    /// Demands beyond [`MAX_DEMANDS`] are left out.
    pub(super) fn new(demands: &'a [Demand], free: SlotSet) -> Self {
        let count = demands.len().min(MAX_DEMANDS);
        Search {
            demands: &demands[..count],
            free,
        }
    }

    /// Every demand.
    pub(super) fn all(&self) -> Set {
        (0..self.demands.len()).fold(0, |set, index| set | 1 << index)
    }

    /// Places every demand of `set`, moving as few as possible.
    pub(super) fn place(&self, set: Set) -> Option<SlotByDemand> {
        if self.shared_name(set).is_some() {
            return None;
        }
        let pairs: Set = self
            .members(set)
            .filter(|index| self.demands[*index].constraint.paired)
            .fold(0, |pairs, index| pairs | 1 << index);
        // More than there are slots: no place of any pair need be tried.
        if set.count_ones() + pairs.count_ones() > self.free.len() {
            return None;
        }
        let mut best = None;
        let start = Assigned {
            slots: [None; MAX_DEMANDS],
            moves: 0,
        };
        self.place_pairs(pairs, set & !pairs, self.free, start, &mut best);
        best.map(|placed: Assigned| placed.slots)
    }

    /// Whether a demand takes two slots.
    pub(super) fn has_pairs(&self) -> bool {
        self.demands.iter().any(|demand| demand.constraint.paired)
    }

    /// Places as many as fit, those first in `order` before the others; none of them is a
    /// pair. Each is added to the cheapest placement of those before, which stays one.
    pub(super) fn match_most(&self, order: impl Iterator<Item = usize>) -> SlotByDemand {
        let mut slots = [None; MAX_DEMANDS];
        let (mut set, mut left) = (0, self.free);
        for index in order {
            if left.is_empty() {
                break;
            }
            let more = set | 1 << index;
            let clashes = self.demands[index].constraint.exclusive.is_some()
                && self.shared_name(more).is_some();
            if clashes {
                continue;
            }
            let own = self.demands[index].held;
            let own = own.filter(|held| self.demands[index].constraint.allows(*held, left));
            if let Some(own) = own {
                left.remove(own);
                slots[index] = Some(own);
                set = more;
            } else if self.augment(index, more, &mut left, &mut slots).is_some() {
                set = more;
            }
        }
        slots
    }

    /// The exclusive name that two of `set` ask for.
    pub(super) fn shared_name(&self, set: Set) -> Option<&'static str> {
        let name = |index: usize| self.demands[index].constraint.exclusive;
        self.members(set)
            .filter_map(|index| Some((index, name(index)?)))
            .find(|(index, wanted)| {
                self.members(set)
                    .any(|i| i < *index && name(i) == Some(wanted))
            })
            .map(|(_, wanted)| wanted)
    }

    fn members(&self, set: Set) -> impl Iterator<Item = usize> {
        (0..self.demands.len()).filter(move |index| set & (1 << index) != 0)
    }

    /// Whether placing `index` at `slot` moves it. What holds a slot that it
    /// may no longer use has to move anyhow, and so moves at no cost.
    fn moves(&self, index: usize, slot: SlotIndex) -> bool {
        let demand = &self.demands[index];
        demand
            .held
            .is_some_and(|held| held != slot && demand.constraint.allows(held, self.free))
    }

    /// Tries every place of every pair, and the others around them. The pair
    /// with the fewest places is tried first, and a branch ends where the
    /// others can no longer be placed or nothing is left to be gained.
    fn place_pairs(
        &self,
        pairs: Set,
        singles: Set,
        free: SlotSet,
        so_far: Assigned,
        best: &mut Option<Assigned>,
    ) {
        let is_better = |placed: &Assigned, best: &Option<Assigned>| {
            best.as_ref().is_none_or(|best| placed.moves < best.moves)
        };
        let Some(placed) = self.match_singles(singles, free, so_far) else {
            return;
        };
        if !is_better(&placed, best) {
            return;
        }
        let places = |index: usize| {
            let constraint = self.demands[index].constraint;
            (0..SlotSet::CAPACITY)
                .step_by(2)
                .map(SlotIndex)
                .filter(move |slot| constraint.allows(*slot, free))
        };
        let Some(index) = self
            .members(pairs)
            .min_by_key(|index| places(*index).count())
        else {
            *best = Some(placed);
            return;
        };
        let rest = pairs & !(1 << index);
        let held = self.demands[index].held;
        let mut tried: [Option<Kind>; MAX_DEMANDS] = [None; MAX_DEMANDS];
        let mut kinds = 0;
        let candidates = held
            .into_iter()
            .filter(|slot| places(index).any(|place| place == *slot))
            .chain(places(index).filter(|slot| Some(*slot) != held));
        for slot in candidates {
            // Places which are alike for everyone lead to the same result.
            let kind = self.kind(slot, rest | singles);
            if tried[..kinds].contains(&Some(kind)) {
                continue;
            }
            if kinds < tried.len() && Some(slot) != held {
                tried[kinds] = Some(kind);
                kinds += 1;
            }
            let mut next = so_far;
            next.slots[index] = Some(slot);
            next.moves += u32::from(self.moves(index, slot));
            let left = free.difference(self.demands[index].constraint.taken_at(slot));
            self.place_pairs(rest, singles, left, next, best);
            if best.as_ref().is_some_and(|best| best.moves == placed.moves) {
                return;
            }
        }
    }

    /// Who of `set` could be placed at `slot` and after it, and who holds one
    /// of the two.
    fn kind(&self, slot: SlotIndex, set: Set) -> Kind {
        let odd = SlotIndex(slot.0.saturating_add(1));
        let mut kind = Kind::default();
        for index in self.members(set) {
            let Demand {
                constraint, held, ..
            } = &self.demands[index];
            let bit = 1 << index;
            if constraint.slots.contains(slot) {
                kind.even |= bit;
            }
            if constraint.slots.contains(odd) {
                kind.odd |= bit;
            }
            if *held == Some(slot) {
                kind.even_held |= bit;
            }
            if *held == Some(odd) {
                kind.odd_held |= bit;
            }
        }
        kind
    }

    /// Adds the demands of `set`, one slot each, to a placement.
    fn match_singles(&self, set: Set, free: SlotSet, mut placed: Assigned) -> Option<Assigned> {
        let mut left = free;
        // Holders first: who keeps its slot costs nothing.
        for index in self.members(set) {
            let demand = &self.demands[index];
            if let Some(held) = demand.held
                && demand.constraint.allows(held, left)
            {
                placed.slots[index] = Some(held);
                left.remove(held);
            }
        }
        for index in self.members(set) {
            if placed.slots[index].is_none() {
                self.augment(index, set, &mut left, &mut placed.slots)?;
            }
        }
        placed.moves += self
            .members(set)
            .filter_map(|index| Some((index, placed.slots[index]?)))
            .map(|(index, slot)| u32::from(self.moves(index, slot)))
            .sum::<u32>();
        Some(placed)
    }

    /// Places one more demand, along the augmenting path that moves fewest.
    ///
    /// A cheapest path (Bellman-Ford, as a step back to the held slot has a
    /// negative cost) keeps the placement one of least cost; so the order in
    /// which demands are added does not matter for the number of moves.
    fn augment(
        &self,
        start: usize,
        set: Set,
        left: &mut SlotSet,
        slots: &mut SlotByDemand,
    ) -> Option<()> {
        let usable = |index: usize| self.demands[index].constraint.slots;
        let cost = |index: usize, slot| i32::from(self.moves(index, slot));
        // By demand: cost of the cheapest way to push it off its slot, and who pushes.
        let mut reach: [Option<(i32, usize)>; MAX_DEMANDS] = [None; MAX_DEMANDS];
        reach[start] = Some((0, start));
        for _ in 0..self.demands.len() {
            let mut changed = false;
            for from in self.members(set) {
                let Some((so_far, _)) = reach[from] else {
                    continue;
                };
                for to in self.members(set).filter(|to| *to != start && *to != from) {
                    let Some(slot) = slots[to].filter(|slot| usable(from).contains(*slot)) else {
                        continue;
                    };
                    let pushed = so_far + cost(from, slot) - cost(to, slot);
                    if reach[to].is_none_or(|(known, _)| pushed < known) {
                        reach[to] = Some((pushed, from));
                        changed = true;
                    }
                }
            }
            if !changed {
                break;
            }
        }
        let (_, mut index, mut slot) = self
            .members(set)
            .filter_map(|index| {
                let (so_far, _) = reach[index]?;
                let slot = self.end(index, usable(index).intersection(*left))?;
                Some((so_far + cost(index, slot), index, slot))
            })
            .min_by_key(|(total, index, _)| (*total, *index != start))?;
        left.remove(slot);
        while let Some(was) = slots[index].replace(slot) {
            slot = was;
            index = reach[index].map_or(start, |(_, from)| from);
        }
        Some(())
    }

    /// The best of the free slots of a demand: its own, else one that nobody
    /// holds, else any.
    fn end(&self, index: usize, free: SlotSet) -> Option<SlotIndex> {
        let own = self.demands[index].held.filter(|held| free.contains(*held));
        let held: SlotSet = self
            .demands
            .iter()
            .filter_map(|demand| demand.held)
            .collect();
        own.or_else(|| free.difference(held).iter().next())
            .or_else(|| free.iter().next())
    }
}

/// What tells two places of a pair apart.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Kind {
    even: Set,
    odd: Set,
    even_held: Set,
    odd_held: Set,
}
