//! A reservation: the state of a counter that a layer holds, the operations on it, and
//! the changes that they make.

use crate::control::Control;
use crate::cookie::Cookie;
use crate::message::NamedEvent;
use crate::reason::Reason;
use crate::time::Tsc;
use crate::{CounterId, CounterSet, Layer};

/// The state of a reserved counter. A free counter has no such state, so nothing
/// about it can be inconsistent.
#[derive(Clone, Copy, Debug)]
pub struct Reservation {
    /// The layer that holds it.
    pub owner: Layer,
    /// What the owner permits at the counter.
    pub control: Control,
    /// The value that a dropped read yields.
    pub drop_value: u64,
    /// When the lease ends, in the caller's ticks.
    pub lease: Option<Tsc>,
    /// How long the lease lasts from each renewal on, in milliseconds.
    pub lease_ms: Option<u32>,
    /// The announced revocation, if there is one.
    pub revocation: Option<Revocation>,
    /// The event for which a physical counter is kept. `None` means any.
    pub event: Option<NamedEvent>,
    management: Cookie,
    access: Cookie,
    masters: bool,
}

/// A revocation that was announced to the holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revocation {
    /// When the revocation takes place, in the caller's ticks.
    pub at: Tsc,
    /// Why the holder loses the counter.
    pub reason: Reason,
    /// The layer that wants the counter. `None`: the administrator of the host wants
    /// it gone.
    pub wanted_by: Option<Layer>,
}

impl Revocation {
    /// Whether nobody gets the counter instead: the administrator takes it.
    pub(crate) fn is_administrators(&self) -> bool {
        self.wanted_by.is_none()
    }

    /// The layer that wants the counter, as notices and records name it. The
    /// administrator counts as the hypervisor.
    pub fn wanted_by_as_shown(&self) -> Layer {
        self.wanted_by.unwrap_or(Layer::Hypervisor)
    }
}

impl Reservation {
    /// A new reservation of `owner`, with the initial control word, the drop value
    /// 0 and no lease.
    pub const fn new(owner: Layer, management: Cookie, access: Cookie) -> Self {
        Reservation {
            owner,
            control: Control::INITIAL,
            drop_value: 0,
            lease: None,
            lease_ms: None,
            revocation: None,
            event: None,
            management,
            access,
            masters: false,
        }
    }

    /// One that the single master has granted to `owner`, who presented `cookie`.
    pub(crate) const fn granted(owner: Layer, cookie: Cookie) -> Self {
        Reservation {
            masters: true,
            ..Reservation::new(owner, cookie, cookie)
        }
    }

    /// Whether `cookie` is the access cookie.
    #[inline]
    pub fn is_access(&self, cookie: Cookie) -> bool {
        self.access.matches(cookie)
    }

    /// Whether `cookie` is the management cookie.
    pub fn is_management(&self, cookie: Cookie) -> bool {
        self.management.matches(cookie)
    }

    /// Whether the single master manages the counter: the management cookie is that of
    /// the grant then, and does not give the counter back.
    pub(crate) fn is_masters(&self) -> bool {
        self.masters
    }

    /// Gives the reservation to `to`, with another management cookie.
    pub(crate) fn hand_over(&mut self, to: Layer, management: Cookie) {
        self.owner = to;
        self.management = management;
    }

    /// Sets another access cookie.
    pub(crate) fn set_access(&mut self, cookie: Cookie) {
        self.access = cookie;
    }

    /// Whether accesses without a cookie are locked out.
    pub fn is_private(&self) -> bool {
        !self.access.is_default()
    }
}

/// What the holder of a management cookie can do to a counter.
#[derive(Clone, Copy, Debug)]
pub enum Operation {
    /// Write of `MANAGEMENT_KEY`.
    Manage(Cookie),
    /// Write of `ACCESS_KEY`.
    SetAccess(Cookie),
    /// Write of `CONTROL`.
    SetControl(Control),
    /// Write of `DROP_VALUE`.
    SetDropValue(u64),
}

/// What an operation changes, if policy admits it.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    /// The counter that changes.
    pub counter: CounterId,
    /// What changes about it.
    pub kind: ChangeKind,
}

/// What a [`Change`] does to its counter.
#[derive(Clone, Copy, Debug)]
pub enum ChangeKind {
    /// Nothing. The operation gave back a counter that nobody had reserved.
    Nothing,
    /// The counter is reserved.
    Reserve(Reservation),
    /// The owner renews the reservation: its lease starts anew.
    Renew,
    /// The counter gets another management cookie, and perhaps another owner.
    HandOver {
        /// The layer that holds the counter from now on.
        to: Layer,
        /// The new management cookie.
        management: Cookie,
    },
    /// The counter becomes free.
    Release,
    /// The counter gets another access cookie.
    SetAccess(Cookie),
    /// The counter gets another control word.
    SetControl(Control),
    /// The counter gets another drop value.
    SetDropValue(u64),
}

/// What the PMU has to do after a change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Effects {
    /// Counters whose select, count and overflow the PMU clears.
    pub cleared: CounterSet,
    /// Counters that a shared control has begun or ceased to reach.
    pub reach: CounterSet,
}

impl Effects {
    /// No effect.
    pub const NONE: Effects = Effects {
        cleared: CounterSet::EMPTY,
        reach: CounterSet::EMPTY,
    };

    /// The effects of both changes.
    pub fn and(self, other: Effects) -> Effects {
        Effects {
            cleared: self.cleared | other.cleared,
            reach: self.reach | other.reach,
        }
    }

    /// Whether the PMU has nothing to do.
    pub fn is_empty(&self) -> bool {
        self.cleared.is_empty() && self.reach.is_empty()
    }
}
