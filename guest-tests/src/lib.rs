//! Guests and machines for the tests.
//!
//! - [`micro`]: guests that are nothing but a test, and the suite that plays
//!   them on this machine's KVM or in L1.
//! - [`l1`]: a machine with a KVM whose behaviour is known, behind `cargo l1`.
//! - [`linux`]: an unmodified Linux with `perf`, for tests end to end.
//! - [`passing`]: what programs inside of a guest hold a counter backend to the contract with.
//! - [`umpire`]: where the program under test is, and what this machine lacks for a test.
//! - [`vm`]: a VM that the tools of a test look at.
//!
//! `docs/internals/testing.md` says how they are used.
#![deny(unsafe_code)]

pub mod hostile;
pub mod kernel;
pub mod l1;
pub mod linux;
pub mod micro;
pub mod passing;
pub mod umpire;
pub mod vm;
