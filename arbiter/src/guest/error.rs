//! Errors: why the reservations cannot be used, and why an arbiter refuses.

use core::fmt;

use crate::CounterId;

/// The result of an operation of an arbiter.
pub(super) type Result<T = (), E = ArbiterError> = core::result::Result<T, E>;

/// Why CPUID shows no reservations that an arbiter could use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiscoveryError {
    /// CPUID shows no hypervisor.
    NoHypervisor,
    /// The hypervisor is not Umpire.
    NotUmpire,
    /// The hypervisor is Umpire and runs without reservations.
    NoReservations,
    /// The reservations have a version that this code does not know.
    Version(u32),
}

impl fmt::Display for DiscoveryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DiscoveryError::NoHypervisor => f.write_str("CPUID shows no hypervisor"),
            DiscoveryError::NotUmpire => f.write_str("CPUID has no block of Umpire's"),
            DiscoveryError::NoReservations => f.write_str("Umpire runs without reservations"),
            DiscoveryError::Version(version) => {
                write!(f, "version {version} of the reservations is not known")
            }
        }
    }
}

impl core::error::Error for DiscoveryError {}

/// Why a claim, a reservation or a release failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArbiterError {
    /// The caller is not in the kernel's layer: the firmware's phase is not over.
    NotKernel,
    /// There is no source of random numbers for cookies.
    NoRandom,
    /// The arbiter does not hold the counter on every CPU: firmware or hypervisor
    /// have it on one, the arbiter has lost it, or it does not exist.
    Unavailable(CounterId),
    /// Somebody has reserved the register already.
    InUse(CounterId),
    /// None of the wanted counters is free.
    NoneFree,
    /// The arbiter has just lost the counter: this CPU no longer takes its cookie,
    /// because the reservation has expired or was revoked there.
    Lost {
        counter: CounterId,
        /// The CPU that did not take the cookie.
        cpu: u32,
    },
    /// Nobody holds the counter privately with this key.
    NotYours(CounterId),
}

impl fmt::Display for ArbiterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ArbiterError::NotKernel => f.write_str("the firmware's phase is not over"),
            ArbiterError::NoRandom => f.write_str("there are no random numbers for a cookie"),
            ArbiterError::Unavailable(counter) => write!(f, "{counter} is not available"),
            ArbiterError::InUse(counter) => write!(f, "{counter} is in use"),
            ArbiterError::NoneFree => f.write_str("no counter that would do is free"),
            ArbiterError::Lost { counter, cpu } => write!(f, "{counter} was lost on CPU {cpu}"),
            ArbiterError::NotYours(counter) => write!(f, "{counter} is not held with this key"),
        }
    }
}

impl core::error::Error for ArbiterError {}
