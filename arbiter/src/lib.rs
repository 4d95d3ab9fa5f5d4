//! Who may use which performance counter.
//!
//! The crate answers one question on the path of every trapped access: may
//! this [`Layer`] touch this [`CounterId`], and if not, what does it see? It
//! holds no file descriptor, performs no I/O and needs no `std`, so firmware
//! and guests can link it.
#![no_std]
#![forbid(unsafe_code)]

pub mod abi;
mod counter;
mod grant;
mod layer;

pub use counter::{CounterId, CounterSet, MAX_FIXED, MAX_PROGRAMMABLE};
pub use grant::{Denial, Grant, Verdict};
pub use layer::{Access, Layer};
