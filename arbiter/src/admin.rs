//! What the administrator of the host can do to the reservations of a vCPU while its
//! guest runs. Nobody can refuse it, and each act is recorded.

use core::fmt;

use crate::counter::PerKind;
use crate::policy::{Policy, PolicyError, Scheme};
use crate::{CounterId, Layer};

/// An act of the administrator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminAct {
    /// Takes a counter from its holder, whatever minimum the holder has.
    Revoke {
        counter: CounterId,
        /// How long before that the holder gets a notice, in milliseconds. With 0 the
        /// counter is taken at once.
        grace_ms: u32,
    },
    /// Bars a layer from reserving, or lets it reserve again. What it holds stays.
    Bar {
        layer: Layer,
        /// Whether it is barred from now on.
        barred: bool,
    },
    /// Sets how many counters each layer may hold. Who holds more keeps it. The time
    /// for answers stays as it is.
    SetPolicy(Policy),
    /// Sets the scheme. Who holds counters keeps them.
    SetScheme(Scheme),
    /// Sets how many counters of each kind the layers of the guest may hold together.
    /// What they hold beyond it is revoked, of the lowest priority first, whatever
    /// minimum its holder has; what an earlier budget was to take and this one leaves
    /// is spared.
    SetBudget {
        /// The most of each kind.
        most: PerKind,
        /// As for [`AdminAct::Revoke`].
        grace_ms: u32,
    },
}

/// An act that makes no sense. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminError {
    /// The machine has no such counter.
    NoCounter(CounterId),
    /// Nobody holds the counter.
    Unreserved(CounterId),
    /// The layer cannot hold counters.
    Layer(Layer),
    /// The policy cannot be kept.
    Policy(PolicyError),
}

impl fmt::Display for AdminError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AdminError::NoCounter(counter) => write!(f, "there is no counter {counter}"),
            AdminError::Unreserved(counter) => write!(f, "nobody has reserved {counter}"),
            AdminError::Layer(layer) => write!(f, "the {layer} holds no counters"),
            AdminError::Policy(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for AdminError {}
