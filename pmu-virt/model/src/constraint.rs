//! Which physical counters can count something, and what stands in the way of
//! counting several things together.

use std::fmt;

use arbiter::CounterSet;
use thiserror::Error;

use crate::ids::{SlotIndex, SlotSet};
use crate::text::list;

/// Which physical counters can count something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constraint {
    /// Slots that can count it.
    pub slots: SlotSet,
    /// It takes two slots, an even one and the odd one after it, both of
    /// `slots`; it is addressed by the even one (AMD's merged counters).
    pub paired: bool,
    /// Only one counter of this name can be assigned at a time (AMD's
    /// northbridge events before Family 15h).
    pub exclusive: Option<&'static str>,
}

impl Constraint {
    /// Any one of a backend's `capacity` slots.
    pub const fn any(capacity: usize) -> Self {
        Constraint::slots(SlotSet::below(capacity))
    }

    /// Any one of `slots`.
    pub const fn slots(slots: SlotSet) -> Self {
        Constraint {
            slots,
            paired: false,
            exclusive: None,
        }
    }

    /// The slots taken by a counter that is addressed by `slot`.
    pub fn taken_at(&self, slot: SlotIndex) -> SlotSet {
        let mut taken = SlotSet::of(slot);
        if self.paired {
            taken.insert(SlotIndex(slot.0.saturating_add(1)));
        }
        taken
    }

    /// Whether a counter may be at `slot`, given the slots that are `free`.
    pub fn allows(&self, slot: SlotIndex, free: SlotSet) -> bool {
        let taken = self.taken_at(slot);
        !taken.is_empty()
            && taken.difference(self.slots.intersection(free)).is_empty()
            && (!self.paired || slot.0.is_multiple_of(2))
    }
}

/// Counters that cannot be assigned together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub struct AssignError {
    /// The counters in conflict. Without any one of them the others could be
    /// assigned, except where [`AssignError::exclusive`] says that only one
    /// of them can.
    pub counters: CounterSet,
    /// Those of them that need a pair of slots.
    pub paired: CounterSet,
    /// The free slots that they compete for.
    pub slots: SlotSet,
    /// What there is only one of, where that is the conflict.
    pub exclusive: Option<&'static str>,
}

impl fmt::Display for AssignError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (noun, s, them) = match self.counters.len() {
            1 => ("counter", "s", "it"),
            _ => ("counters", "", "them"),
        };
        write!(f, "{noun} {} ", list(self.counters.iter()))?;
        if let Some(name) = self.exclusive {
            return write!(f, "exclude each other: only one can count '{name}' events");
        }
        if self.slots.is_empty() {
            write!(f, "find{s} no free slot that can count for {them}")?;
        } else {
            write!(f, "need{s} {}", self.slots)?;
        }
        if !self.paired.is_empty() {
            let paired = list(self.paired.iter());
            write!(f, " ({paired}: an even slot and the next)")?;
        }
        Ok(())
    }
}
