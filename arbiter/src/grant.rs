//! Which counters the host grants to a guest and how many of them count at a time, and
//! the verdict on an access.

use crate::{Access, CounterId, CounterSet, Layer, PerKind, Tsc};

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

/// How many physical counters the guest of one vCPU may use at a time, for whichever of
/// its own. No access fails for want of one: what is too many takes turns or stands
/// still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// So many for counters of each kind, as an administrator has it.
    pub asked: PerKind,
    /// So many physical counters the VM's lease on those of the host holds now. All where
    /// there is no lease.
    pub lease: PerKind,
    /// How often it was set.
    pub generation: u64,
    /// When it ends, for one that was set for a time.
    pub until: Option<BudgetEnd>,
}

/// The end of a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetEnd {
    /// When it is.
    pub at: Tsc,
    /// What the guest may use from then on.
    pub most: PerKind,
    /// How long before they are taken the holders of reserved counters are told, if
    /// that is less, in milliseconds.
    pub grace_ms: u32,
}

impl Budget {
    /// As many as the guest can use.
    pub const ALL: Budget = Budget {
        asked: PerKind::ALL,
        lease: PerKind::ALL,
        generation: 0,
        until: None,
    };

    /// What the guest may use now.
    #[must_use]
    pub fn most(&self) -> PerKind {
        self.asked.min_of_each(self.lease)
    }

    /// What it may use after the end of a budget that was set for a time.
    #[must_use]
    pub fn later(&self) -> PerKind {
        let asked = self.until.map_or(self.asked, |end| end.most);
        asked.min_of_each(self.lease)
    }
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
    /// How many of them count at a time.
    pub budget: Budget,
}

impl Grant {
    /// A grant of every counter.
    pub const fn everything() -> Self {
        Grant {
            held: CounterSet::from_bits(u64::MAX),
            denial: Denial::Fault,
            budget: Budget::ALL,
        }
    }

    /// The same grant for a VM whose lease holds so many physical counters.
    #[must_use]
    pub const fn leased(mut self, lease: PerKind) -> Self {
        self.budget.lease = lease;
        self
    }

    /// The same grant for so many counters at a time.
    #[must_use]
    pub const fn at_most(mut self, most: PerKind) -> Self {
        self.budget.asked = most;
        self
    }

    /// A grant of `counters`. Accesses to others fail as `denial` says.
    pub fn of(counters: impl IntoIterator<Item = CounterId>, denial: Denial) -> Self {
        Grant {
            held: counters.into_iter().collect(),
            denial,
            budget: Budget::ALL,
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
