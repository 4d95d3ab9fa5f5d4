//! Arbiters for the kernel of a guest: the three of the paper (section III.B). Each
//! is below 200 source lines of code with the bookkeeping that they share.
//!
//! - [`MinimalMaster`] separates the firmware's counters from the kernel's, and
//!   notes who uses the latter. It binds nobody in the kernel.
//! - [`EnforcingMaster`] also locks a counter while its users have not reserved both
//!   the counter and its event select.
//! - [`FullMaster`] also hands out counters privately, each with a cookie of its own.
//!
//! All offer the classic four calls of Linux ([`Master`]). The kernel implements a
//! [`PcrPort`], which performs RDMSR and WRMSR on a CPU of the caller's choice. The
//! kernel serialises the calls, because they take the arbiter by `&mut`.
//!
//! A counter goes by the name of the legacy registers that reach it. Where names are
//! mapped, a name may stand for another counter on each CPU. The arbiters leave a
//! programmable counter without a legacy name alone.
//!
//! ```
//! use arbiter::guest::{ArbiterError, DeniedAccess, Discovery, EnforcingMaster, Master, PcrPort};
//! use arbiter::CounterId;
//!
//! fn cycles_only<P: PcrPort>(port: P, machine: Discovery) -> Result<(), ArbiterError> {
//!     let mut master = EnforcingMaster::claim(port, machine, DeniedAccess::Drop)?;
//!     let counter = CounterId::Programmable(0);
//!     master.reserve_perfctr(counter)?;
//!     master.reserve_evntsel(counter)?;
//!     // Legacy registers reach the counter now.
//!     master.release_evntsel(counter);
//!     master.release_perfctr(counter);
//!     Ok(())
//! }
//! ```

mod arbiter;
mod discovery;
mod enforcing;
mod error;
mod full;
mod minimal;
mod port;
mod registers;
mod rule;

pub use arbiter::{Arbiter, Master, Part};
pub use discovery::Discovery;
pub use error::{ArbiterError, DiscoveryError};
pub use full::Private;
pub use port::{Fault, Key, PcrPort};
pub use registers::DeniedAccess;

/// Separates the counters of firmware and kernel, and notes their users in the
/// kernel. It binds none of them: the access cookie of its counters is always
/// `PCR_DEFAULT_COOKIE`.
pub type MinimalMaster<P> = Arbiter<P, minimal::Minimal>;

/// Separates the counters of firmware and kernel, and holds users in the kernel to
/// what they have reserved: legacy registers reach a counter only while both its
/// registers are reserved.
pub type EnforcingMaster<P> = Arbiter<P, enforcing::Enforcing>;

/// Enforces reservations as [`EnforcingMaster`] does, and
/// hands out counters privately. The classic calls find those in use.
pub type FullMaster<P> = Arbiter<P, full::Full>;
