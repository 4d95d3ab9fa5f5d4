//! The counters that a guest holds, and what happens at the others.

use crate::{Access, CounterId, CounterSet, Layer};

/// What an access to a counter comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The access reaches the counter.
    Permit,
    /// The access vanishes: a read yields `read_as`, a write changes nothing.
    Drop {
        /// Value that a dropped read yields.
        read_as: u64,
    },
    /// The access raises #GP.
    Fault,
}

/// What the guest sees at a counter that it does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Denial {
    /// Reads yield a fixed value, writes vanish.
    Drop {
        /// The fixed value.
        read_as: u64,
    },
    /// Reads and writes raise #GP, as at an absent register.
    Fault,
}

/// Which counters were granted to the guest of one vCPU, and what happens at
/// an access to another one.
///
/// A grant binds the layers of the guest (firmware, kernel, user). The
/// hypervisor and host tools reach every counter: they are the ones who gave
/// the grant, and must be able to save and restore what it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    held: CounterSet,
    denial: Denial,
}

impl Grant {
    /// Every counter.
    pub const fn everything() -> Self {
        Grant {
            held: CounterSet::from_bits(u64::MAX),
            denial: Denial::Fault,
        }
    }

    /// The counters named, and `denial` at all others.
    pub fn of(counters: impl IntoIterator<Item = CounterId>, denial: Denial) -> Self {
        Grant {
            held: counters.into_iter().collect(),
            denial,
        }
    }

    /// Whether the guest may use `counter`; only then may it count.
    pub fn holds(&self, counter: CounterId) -> bool {
        self.held.contains(counter)
    }

    /// What an access of `layer` to `counter`, or to its control, comes to.
    #[inline]
    pub fn check(&self, layer: Layer, counter: CounterId, access: Access) -> Verdict {
        // Reading and writing are denied alike today; the argument is part of
        // the question because reservations tell them apart.
        let _ = access;
        if !layer.is_guest() || self.holds(counter) {
            return Verdict::Permit;
        }
        match self.denial {
            Denial::Drop { read_as } => Verdict::Drop { read_as },
            Denial::Fault => Verdict::Fault,
        }
    }
}
