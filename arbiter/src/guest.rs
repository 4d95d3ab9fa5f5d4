//! Arbiters for the kernel of a guest: the three of the paper (section III.B),
//! each below 200 source lines of code with the bookkeeping that they share.
//!
//! - [`MinimalMaster`] separates the firmware's counters from the kernel's, and
//!   keeps count of who uses the latter. Nobody in the kernel is bound by it.
//! - [`EnforcingMaster`] also locks a counter whenever its users have not
//!   reserved both the counter and its event select.
//! - [`FullMaster`] also hands counters out privately, each with a cookie of its
//!   own.
//!
//! All offer the classic four calls ([`Master`]). The kernel brings a
//! [`PcrPort`], which performs RDMSR and WRMSR on a CPU of the caller's choice,
//! and serialises calls, as they take the arbiter by `&mut`.
//!
//! Counters have the names by which the kernel's legacy registers reach them.
//! Where those are mapped, a name may stand for another counter on each CPU. A
//! programmable counter without a legacy name is left alone.
//!
//! ```
//! use arbiter::guest::{ArbiterError, Discovery, EnforcingMaster, DeniedAccess, Master, PcrPort};
//! use arbiter::CounterId;
//!
//! fn cycles_only<P: PcrPort>(port: P, machine: Discovery) -> Result<(), ArbiterError> {
//!     let mut master = EnforcingMaster::claim(port, machine, DeniedAccess::Drop)?;
//!     let counter = CounterId::Programmable(0);
//!     master.reserve_perfctr(counter)?;
//!     master.reserve_evntsel(counter)?;
//!     // Legacy registers reach the counter from here on.
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

pub use arbiter::{Arbiter, Master, Part};
pub use discovery::Discovery;
pub use enforcing::EnforcingMaster;
pub use error::{ArbiterError, DiscoveryError};
pub use full::{FullMaster, Private};
pub use minimal::MinimalMaster;
pub use port::{Fault, Key, PcrPort};
pub use registers::DeniedAccess;
