//! Which counters the host grants to a guest, and the verdict on an access.

use crate::{Access, CounterId, CounterSet, Layer};

/// The decision about one access to a counter.
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

/// How the guest's accesses to a counter fail that was not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Denial {
    /// Reads yield a fixed value, and writes vanish.
    Drop {
        /// The value that reads yield.
        read_as: u64,
    },
    /// Reads and writes raise #GP, as those of an absent register do.
    Fault,
}

/// The counters that the guest of one vCPU may use, and how accesses to others fail.
///
/// A grant binds the layers of the guest (firmware, kernel, user). Hypervisor and
/// host tools reach every counter: they give the grant, and they save and restore
/// what it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    held: CounterSet,
    denial: Denial,
}

impl Grant {
    /// A grant of every counter.
    pub const fn everything() -> Self {
        Grant {
            held: CounterSet::from_bits(u64::MAX),
            denial: Denial::Fault,
        }
    }

    /// A grant of `counters`. Accesses to others fail as `denial` says.
    pub fn of(counters: impl IntoIterator<Item = CounterId>, denial: Denial) -> Self {
        Grant {
            held: counters.into_iter().collect(),
            denial,
        }
    }

    /// Whether the guest may use `counter`. A counter that is not granted must not
    /// count.
    pub fn holds(&self, counter: CounterId) -> bool {
        self.held.contains(counter)
    }

    /// The verdict on an access of `layer` to `counter` or to its control.
    #[inline]
    pub fn check(&self, layer: Layer, counter: CounterId, access: Access) -> Verdict {
        // A grant denies reads and writes alike. The argument is part of the
        // question because reservations distinguish them.
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
