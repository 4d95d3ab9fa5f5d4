//! The host's rules for the layers: how many counters each may hold and for how
//! long ([`Policy`]), and how layers come by each other's ([`Scheme`]).

use core::fmt;

use crate::bank::Bank;
use crate::reason::Reason;
use crate::{CounterId, Layer, PerKind};

/// How the layers of a machine arbitrate among themselves. These are the three
/// schemes of the paper's section II.C; `docs/guide/arbitration.md` describes each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// The hypervisor manages every counter for the life of the machine, and
    /// all layers ask it.
    SingleMaster,
    /// Each layer reserves for itself, and first come is first served.
    #[default]
    Independent,
    /// Each layer reserves for itself, and the arbiter asks the others when a layer is
    /// short.
    Interacting,
}

impl Scheme {
    /// All schemes, in declaration order.
    pub const ALL: [Scheme; 3] = [
        Scheme::SingleMaster,
        Scheme::Independent,
        Scheme::Interacting,
    ];

    /// The scheme's word on a command line and in a file.
    pub const fn name(self) -> &'static str {
        match self {
            Scheme::SingleMaster => "single",
            Scheme::Independent => "independent",
            Scheme::Interacting => "interacting",
        }
    }

    /// The scheme with this word.
    pub fn named(name: &str) -> Option<Scheme> {
        Self::ALL.into_iter().find(|scheme| scheme.name() == name)
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What one layer may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Share {
    /// Counters that no other layer can take from this one, free ones or its own.
    pub min: PerKind,
    /// Counters that the layer may hold at once.
    pub max: PerKind,
    /// The priority. A layer can have counters of a layer of lower priority revoked.
    pub priority: u8,
    /// How long a reservation lasts without renewal, in milliseconds. `None` means
    /// without end.
    pub lease_ms: Option<u32>,
}

impl Share {
    /// The share without minimum, maximum and lease.
    pub const FREE: Share = Share {
        min: PerKind {
            programmable: 0,
            fixed: 0,
        },
        max: PerKind::ALL,
        priority: 0,
        lease_ms: None,
    };

    /// So many of the counters like `of` are the layer's own. No minimum is one of samplers.
    pub(crate) fn least(&self, of: CounterId) -> u8 {
        match of {
            CounterId::Ibs(_) => 0,
            _ => self.min.of(of),
        }
    }
}

/// The shares of all layers that can hold counters, and the time for answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The firmware's share.
    pub firmware: Share,
    /// The share of the hypervisor and the host's tools.
    pub hypervisor: Share,
    /// The guest kernel's share.
    pub kernel: Share,
    /// How long a holder has to answer, or to prepare for a revocation, in
    /// milliseconds.
    pub grace_ms: u32,
}

impl Default for Policy {
    /// The policy that leaves one programmable counter to the kernel and has no other
    /// limit.
    fn default() -> Self {
        Policy {
            firmware: Share::FREE,
            hypervisor: Share::FREE,
            kernel: Share {
                min: PerKind {
                    programmable: 1,
                    fixed: 0,
                },
                ..Share::FREE
            },
            grace_ms: 100,
        }
    }
}

/// A policy that cannot be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyError {
    /// A layer's minimum is more than its maximum.
    MinOverMax {
        layer: Layer,
        /// Its minimum.
        min: u8,
        /// Its maximum.
        max: u8,
    },
    /// A layer's leases would end as soon as they start.
    NoTime { layer: Layer },
    /// The PMU has fewer counters than the layers' minima add up to.
    TooFew {
        /// The sum of the minima.
        wanted: u16,
        /// The number of counters.
        there: u8,
        /// "programmable" or "fixed".
        kind: &'static str,
    },
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PolicyError::MinOverMax { layer, min, max } => write!(
                f,
                "the {layer} is to have at least {min} and at most {max} counters: lower the minimum"
            ),
            PolicyError::NoTime { layer } => write!(
                f,
                "the {layer}'s leases are to last 0 ms: give at least 1, or none for no lease"
            ),
            PolicyError::TooFew {
                wanted,
                there,
                kind,
            } => write!(
                f,
                "the layers' minima add up to {wanted} {kind} counters and the PMU has {there}: \
                 lower them"
            ),
        }
    }
}

impl core::error::Error for PolicyError {}

/// Layers that can hold counters, and so have a mailbox.
pub(crate) const LAYERS: usize = Policy::LAYERS.len();

impl Policy {
    /// The layers that can hold counters.
    pub const LAYERS: [Layer; 3] = [Layer::Firmware, Layer::Hypervisor, Layer::GuestKernel];

    /// The share of a layer. `None` means that the layer cannot hold counters.
    pub fn share(&self, layer: Layer) -> Option<&Share> {
        match layer {
            Layer::Firmware => Some(&self.firmware),
            Layer::Hypervisor | Layer::HostTool => Some(&self.hypervisor),
            Layer::GuestKernel => Some(&self.kernel),
            Layer::GuestUser => None,
        }
    }

    /// The priority of a layer; the lowest if it cannot hold counters.
    pub(crate) fn priority(&self, layer: Layer) -> u8 {
        self.share(layer).map_or(0, |share| share.priority)
    }

    /// Checks that a PMU with these numbers of counters can keep the policy.
    ///
    /// # Errors
    /// The PMU cannot keep it, for this reason.
    pub fn fits(&self, programmable: u8, fixed: u8) -> Result<(), PolicyError> {
        let sums = [CounterId::Programmable(0), CounterId::Fixed(0)].map(|of_kind| {
            let minima = Self::LAYERS.iter().filter_map(|layer| self.share(*layer));
            let wanted = minima.map(|share| u16::from(share.min.of(of_kind))).sum();
            (of_kind, wanted)
        });
        for layer in Self::LAYERS {
            let Some(Share {
                min, max, lease_ms, ..
            }) = self.share(layer)
            else {
                continue;
            };
            if *lease_ms == Some(0) {
                return Err(PolicyError::NoTime { layer });
            }
            for (of_kind, _) in sums {
                let (min, max) = (min.of(of_kind), max.of(of_kind));
                if min > max {
                    return Err(PolicyError::MinOverMax { layer, min, max });
                }
            }
        }
        for ((_, wanted), (there, kind)) in sums
            .into_iter()
            .zip([(programmable, "programmable"), (fixed, "fixed")])
        {
            if wanted > u16::from(there) {
                return Err(PolicyError::TooFew {
                    wanted,
                    there,
                    kind,
                });
            }
        }
        Ok(())
    }

    /// Checks that `layer` may take `counter`, which is free or another layer's.
    ///
    /// # Errors
    /// The layer may not, for this reason.
    pub fn admit(&self, bank: &Bank, layer: Layer, counter: CounterId) -> Result<(), Reason> {
        let share = self.share(layer).ok_or(Reason::Layer)?;
        if PerKind::count(bank.held_by(layer)).of(counter) >= share.max.of(counter) {
            return Err(Reason::Maximum);
        }
        let free = PerKind::count(bank.free().counters()).of(counter);
        // A counter that is handed over is free neither before nor after.
        let left = match bank.reservation(counter) {
            None => free.saturating_sub(1),
            Some(_) => free,
        };
        let owed = Self::LAYERS
            .into_iter()
            .filter(|other| other.code() != layer.code());
        let owed: u16 = owed
            .map(|other| {
                let min = self.share(other).map_or(0, |share| share.least(counter));
                let mut held = bank.held_by(other);
                held.remove(counter);
                u16::from(min.saturating_sub(PerKind::count(held.counters()).of(counter)))
            })
            .sum();
        if u16::from(left) < owed {
            Err(Reason::Minimum)
        } else {
            Ok(())
        }
    }
}
