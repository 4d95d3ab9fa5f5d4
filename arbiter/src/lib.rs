//! Who may use which performance counter.
//!
//! The crate answers one question on the path of every trapped access: may
//! this [`Layer`] touch this [`CounterId`], and if not, what does it see? A
//! [`Grant`] says what the host gave to a guest; a [`PcrUnit`] is Platform
//! Counter Reservation among the layers of that guest, as `docs/pcr.md`
//! describes it. It holds no file descriptor, performs no I/O and needs no
//! `std`, so firmware and guests can link it.
//!
//! Without the feature `alloc`, which is on by default, only what guest software
//! needs is there: the ABI's constants, the words of its registers, and the
//! arbiters of [`guest`].
#![no_std]
#![forbid(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;

pub mod abi;
mod audit;
#[cfg(feature = "alloc")]
mod bank;
#[cfg(feature = "alloc")]
mod broker;
mod control;
mod cookie;
mod counter;
mod grant;
mod guard;
pub mod guest;
mod layer;
#[cfg(feature = "alloc")]
mod mailbox;
#[cfg(feature = "alloc")]
mod map;
mod message;
#[cfg(feature = "alloc")]
mod policy;
mod reason;
mod register;
#[cfg(feature = "alloc")]
pub mod script;
#[cfg(feature = "alloc")]
mod unit;

pub use audit::{Auditor, Entropy, Event, NoAudit, NoEntropy, Record};
#[cfg(feature = "alloc")]
pub use bank::{Bank, Change, ChangeKind, Effects, Operation, Reservation, Revocation};
pub use control::{Control, Shared};
pub use cookie::Cookie;
pub use counter::{CounterId, CounterSet, MAX_FIXED, MAX_PROGRAMMABLE};
pub use grant::{Denial, Grant, Verdict};
pub use guard::{Guard, GuardLimits, Penalty};
pub use layer::{Access, Layer, Phase};
#[cfg(feature = "alloc")]
pub use map::LegacyMap;
pub use message::{Answer, Notice, NoticeKind, Outcome, Reply, Request, Wanted};
#[cfg(feature = "alloc")]
pub use policy::{PerKind, Policy, PolicyError, Scheme, Share};
pub use reason::Reason;
pub use register::PcrRegister;
#[cfg(feature = "alloc")]
pub use unit::{Caller, Context, PcrConfig, PcrUnit};
