//! Guests and machines for the tests.
//!
//! - [`micro`]: guests that are nothing but a test, and the suite that plays
//!   them on this machine's KVM or in L1.
//! - [`l1`]: a machine with a KVM whose behaviour is known, behind `cargo l1`.
//! - [`linux`]: an unmodified Linux with `perf`, for tests end to end.
//! - [`mod@firmware`]: whether there is firmware for the guest.
//! - [`umpire`]: where the program under test is.
//!
//! `docs/testing.md` says how they are used.

pub mod firmware;
pub mod hostile;
pub mod kernel;
pub mod l1;
pub mod linux;
pub mod micro;
pub mod umpire;
