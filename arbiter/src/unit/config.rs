//! What a unit is made of, and what an operation is given.

use crate::Layer;
use crate::abi;
use crate::audit::{Auditor, Entropy};
use crate::cookie::Cookie;
use crate::guard::GuardLimits;
use crate::layer::Phase;
use crate::policy::{PerKind, Policy, Scheme};
use alloc::sync::Arc;
use core::fmt;

/// What a unit is made of.
#[derive(Clone, Debug)]
pub struct PcrConfig {
    /// Counters that there are.
    pub counters: PerKind,
    /// Bits of the counters.
    pub widths: PerKind,
    /// Who may hold how many; one that the counters can keep ([`Policy::fits`]).
    pub policy: Policy,
    /// Who reserves, and how layers come by each other's counters.
    pub scheme: Scheme,
    /// What too many wrong cookies cost.
    pub guard: GuardLimits,
    /// Ticks of the caller's clock in a millisecond; at least 1.
    pub ticks_per_ms: u64,
    /// The machine's phase.
    pub phase: Arc<Phase>,
    /// Counters that legacy names reach once the firmware's phase is over;
    /// `None`: each has its own name.
    pub legacy: Option<PerKind>,
    /// SMM exists and counts as firmware.
    pub smm: bool,
}

/// What an operation can ask for and report to.
#[derive(Debug)]
pub struct Context<'a> {
    /// The caller's clock, in ticks.
    pub now: u64,
    /// Random bits.
    pub entropy: &'a mut dyn Entropy,
    /// Receives decisions.
    pub audit: &'a mut dyn Auditor,
}

/// Who performs an access, and with which cookie.
#[derive(Clone, Copy)]
pub struct Caller {
    /// The layer.
    pub layer: Layer,
    /// The register that carries the cookie, as it is. Registers that take no
    /// cookie do not look at it.
    pub presented: u64,
}

impl Caller {
    /// One that presents `PCR_DEFAULT_COOKIE`.
    pub const fn legacy(layer: Layer) -> Self {
        Caller {
            layer,
            presented: abi::DEFAULT_COOKIE,
        }
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller")
            .field("layer", &self.layer)
            // Its own `Debug` tells nothing of a cookie.
            .field("presented", &Cookie::new(self.presented))
            .finish()
    }
}
