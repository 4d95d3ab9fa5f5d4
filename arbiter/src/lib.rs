//! Who may use which performance counter.
//!
//! Several layers of software want the counters of one PMU: the firmware of a guest,
//! its kernel, its programs, the hypervisor, and tools of the host. This crate decides
//! among them. It touches no hardware and performs no I/O. The caller traps the
//! accesses, brings the time, and acts on the answers.
//!
//! - [`Grant`] says which counters the host gives to a guest.
//! - [`PcrUnit`] keeps the reservations of one vCPU. It holds the policy, leases, the
//!   scheme of arbitration and the registers that guests see. `docs/reference/pcr.md` describes
//!   them.
//! - [`guest`] has arbiters for the kernel inside a guest.
//! - [`abi`] has the numbers that guest and host share.
//!
//! An access has a [`Layer`], a [`Cookie`], a [`CounterId`] and an [`Access`]. Its answer
//! is a [`Verdict`]: it is permitted, it is dropped, or it raises #GP. Every decision
//! leaves a [`Record`] with an [`Auditor`].
//!
//! ```
//! # #[cfg(feature = "alloc")] {
//! use arbiter::{
//!     Access, Context, Cookie, CounterId, GuardLimits, Layer, NoAudit, NoEntropy, PcrConfig,
//!     PcrUnit, PerKind, Phase, Policy, Scheme, Tsc, Verdict,
//! };
//! use std::sync::Arc;
//!
//! let mut unit = PcrUnit::new(PcrConfig {
//!     counters: PerKind { programmable: 4, fixed: 3 },
//!     widths: PerKind { programmable: 48, fixed: 48 },
//!     policy: Policy::default(),
//!     scheme: Scheme::Independent,
//!     guard: GuardLimits::with_ticks_per_ms(1),
//!     ticks_per_ms: 1,
//!     phase: Arc::new(Phase::new(false)),
//!     legacy: None,
//!     smm: false,
//! });
//!
//! // The hypervisor reserves a counter with a cookie of its own choice.
//! let counter = CounterId::Programmable(3);
//! let cookie = Cookie::new(0x1234).expect("48 bits");
//! let cx = &mut Context { now: Tsc(0), entropy: &mut NoEntropy, audit: &mut NoAudit };
//! let effects = unit.reserve_for_hypervisor(counter, cookie, cx).expect("it is free");
//! assert!(effects.cleared.contains(counter), "the PMU has to stop and clear it");
//!
//! // An unmodified kernel presents no cookie, and its access is dropped.
//! let caller = (Layer::GuestKernel, Cookie::DEFAULT);
//! let verdict = unit.check(caller, counter, Access::Read, Tsc(0));
//! assert_eq!(verdict, Verdict::Drop { read_as: 0 });
//! # }
//! ```
//!
//! The program below `examples/` shows the life of a reservation.
//!
//! # Features
//!
//! The crate needs no `std`. The feature `alloc`, which is on by default, adds everything
//! that keeps reservations. Without it only what guest software needs is left: the
//! constants of the ABI, the types of its registers, and the arbiters of [`guest`].
#![no_std]
#![forbid(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;

pub mod abi;
#[cfg(feature = "alloc")]
mod account;
#[cfg(feature = "alloc")]
mod admin;
#[cfg(feature = "alloc")]
mod arbitration;
mod audit;
#[cfg(feature = "alloc")]
mod backing;
#[cfg(feature = "alloc")]
mod bank;
#[cfg(feature = "alloc")]
mod broker;
mod control;
mod cookie;
mod counter;
#[cfg(feature = "alloc")]
mod firmware;
#[cfg(feature = "alloc")]
mod grant;
#[cfg(feature = "alloc")]
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
mod requests;
#[cfg(feature = "alloc")]
mod reservation;
#[cfg(feature = "alloc")]
mod rules;
mod time;
#[cfg(feature = "alloc")]
mod unit;

#[cfg(feature = "alloc")]
pub use account::GuardLimits;
#[cfg(feature = "alloc")]
pub use admin::{AdminAct, AdminError};
#[cfg(feature = "alloc")]
pub use arbitration::Context;
#[cfg(feature = "alloc")]
pub use audit::{Ask, AskRecord, AskResult, Presented};
pub use audit::{Auditor, Entropy, Event, NoAudit, NoEntropy, Record};
#[cfg(feature = "alloc")]
pub use backing::{Backing, EventRoom};
#[cfg(feature = "alloc")]
pub use bank::Bank;
pub use control::{Control, Shared};
pub use cookie::Cookie;
pub use counter::{CounterId, CounterSet, IbsKind, MAX_FIXED, MAX_PROGRAMMABLE, PerKind};
#[cfg(feature = "alloc")]
pub use firmware::SmramSource;
#[cfg(feature = "alloc")]
pub use grant::{Budget, BudgetEnd, Denial, Grant, Verdict};
#[cfg(feature = "alloc")]
pub use guard::{Guard, Penalty};
pub use layer::{Access, Layer, Phase};
#[cfg(feature = "alloc")]
pub use map::LegacyMap;
pub use message::{Answer, NamedEvent, Notice, NoticeKind, Outcome, Reply, Request, Wanted};
#[cfg(feature = "alloc")]
pub use policy::{Policy, PolicyError, Scheme, Share};
pub use reason::Reason;
pub use register::PcrRegister;
#[cfg(feature = "alloc")]
pub use requests::AskedEvents;
#[cfg(feature = "alloc")]
pub use reservation::{Change, ChangeKind, Effects, Operation, Reservation, Revocation};
pub use time::{Nanos, Ticks, Tsc};
#[cfg(feature = "alloc")]
pub use unit::{Caller, PcrConfig, PcrUnit};
