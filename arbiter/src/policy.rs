//! The host's rules for the layers: how many counters each may hold and for how
//! long ([`Policy`]), and how layers come by each other's ([`Scheme`]).

use crate::bank::Bank;
use crate::reason::Reason;
use crate::{CounterId, CounterSet, Layer};
use core::fmt;

/// How the layers of a machine arbitrate among themselves: the three schemes of
/// the paper's section II.C. `docs/arbitration.md` describes what each does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// The hypervisor manages every counter for the life of the machine, and
    /// all layers ask it.
    SingleMaster,
    /// Each layer reserves for itself, and first come is first served.
    #[default]
    Independent,
    /// As independent, and a layer that is short has the others asked.
    Interacting,
}

impl Scheme {
    /// All schemes, in declaration order.
    pub const ALL: [Scheme; 3] = [
        Scheme::SingleMaster,
        Scheme::Independent,
        Scheme::Interacting,
    ];

    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Scheme::SingleMaster => "single",
            Scheme::Independent => "independent",
            Scheme::Interacting => "interacting",
        }
    }

    /// The scheme that goes by this word.
    pub fn named(name: &str) -> Option<Scheme> {
        Self::ALL.into_iter().find(|scheme| scheme.name() == name)
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A number for each kind of counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerKind {
    /// Of programmable counters.
    pub programmable: u8,
    /// Of fixed-function counters.
    pub fixed: u8,
}

impl PerKind {
    /// As many of each kind as any PMU has.
    pub const ALL: PerKind = PerKind {
        programmable: u8::MAX,
        fixed: u8::MAX,
    };

    /// How many counters of each kind a set has.
    pub fn count(set: CounterSet) -> PerKind {
        let bits = |bits: u64| u8::try_from(bits.count_ones()).unwrap_or(u8::MAX);
        PerKind {
            programmable: bits(set.bits() & u64::from(u32::MAX)),
            fixed: bits(set.bits() >> 32),
        }
    }

    /// The number for the kind that `counter` is of.
    pub fn of(self, counter: CounterId) -> u8 {
        match counter {
            CounterId::Programmable(_) => self.programmable,
            CounterId::Fixed(_) => self.fixed,
        }
    }
}

/// What one layer may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Counters that no other layer can take from it: free ones, or its own.
    pub min: PerKind,
    /// Counters that it may hold at once.
    pub max: PerKind,
    /// A layer of higher priority can have counters of a lower one revoked.
    pub priority: u8,
    /// How long a reservation lasts if it is not renewed, in milliseconds.
    pub lease_ms: Option<u32>,
}

impl Share {
    /// No minimum, no maximum, no lease.
    pub const FREE: Share = Share {
        min: PerKind {
            programmable: 0,
            fixed: 0,
        },
        max: PerKind::ALL,
        priority: 0,
        lease_ms: None,
    };
}

/// The shares of all layers that can hold counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Of the firmware.
    pub firmware: Share,
    /// Of the hypervisor, and the host's tools.
    pub hypervisor: Share,
    /// Of the guest's kernel.
    pub kernel: Share,
    /// How long a holder is given to answer, or to prepare for a revocation,
    /// in milliseconds.
    pub grace_ms: u32,
}

impl Default for Policy {
    /// One programmable counter is always left to the kernel.
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
        /// Whose.
        layer: Layer,
        /// Its minimum.
        min: u8,
        /// Its maximum.
        max: u8,
    },
    /// A layer's leases would be over as soon as they start.
    NoTime {
        /// Whose.
        layer: Layer,
    },
    /// There are not as many counters as the layers' minima add up to.
    TooFew {
        /// What the minima add up to.
        wanted: u16,
        /// Counters that there are.
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

impl Policy {
    /// The layers that can hold counters.
    pub const LAYERS: [Layer; 3] = [Layer::Firmware, Layer::Hypervisor, Layer::GuestKernel];

    /// The share of a layer; `None` for one that cannot hold counters.
    pub fn share(&self, layer: Layer) -> Option<&Share> {
        match layer {
            Layer::Firmware => Some(&self.firmware),
            Layer::Hypervisor | Layer::HostTool => Some(&self.hypervisor),
            Layer::GuestKernel => Some(&self.kernel),
            Layer::GuestUser => None,
        }
    }

    /// Whether a PMU with so many counters can keep the policy.
    ///
    /// # Errors
    /// It cannot, and why.
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

    /// Whether `layer` may take `counter`, which is free or another layer's.
    ///
    /// # Errors
    /// It may not, and why.
    pub fn admit(&self, bank: &Bank, layer: Layer, counter: CounterId) -> Result<(), Reason> {
        let share = self.share(layer).ok_or(Reason::Layer)?;
        if PerKind::count(bank.held_by(layer)).of(counter) >= share.max.of(counter) {
            return Err(Reason::Maximum);
        }
        let free = PerKind::count(bank.free()).of(counter);
        // A counter that is handed over was not free before, and is not after.
        let left = match bank.reservation(counter) {
            None => free.saturating_sub(1),
            Some(_) => free,
        };
        let owed = Self::LAYERS
            .into_iter()
            .filter(|other| other.code() != layer.code());
        let owed: u16 = owed
            .map(|other| {
                let min = self.share(other).map_or(0, |share| share.min.of(counter));
                let mut held = bank.held_by(other);
                held.remove(counter);
                u16::from(min.saturating_sub(PerKind::count(held).of(counter)))
            })
            .sum();
        match u16::from(left) < owed {
            true => Err(Reason::Minimum),
            false => Ok(()),
        }
    }
}
