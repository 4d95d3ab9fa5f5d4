//! Leases on a host's performance counters: the interface of the host's arbiter
//! (`io.umpire.Arbiter`, varlink), a client of it, and [`Leases`], by which whoever needs some
//! asks an arbiter without seeing where that is.
//!
//! ```no_run
//! use umpire_lease::{Arbiter, Counters, Request};
//!
//! # fn main() -> Result<(), umpire_lease::CallError> {
//! let arbiter = Arbiter::connect(&umpire_lease::default_socket())?;
//! let held = arbiter.acquire(&Request {
//!     counters: vec![Counters::programmable(2)],
//!     cpus: Some("0-3".to_owned()),
//!     ..Request::default()
//! })?;
//! println!("{} counters", held.lease().holds);
//! // They are given back when `held` is dropped, or the process ends.
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

mod client;
mod events;
mod keeper;
mod leases;
mod wire;

use std::path::PathBuf;

pub use arbiter_host::{CounterKind, Fate, LeaseScope, OutsiderKind, Reason, Standing, What};
pub use client::{Arbiter, CallError, Held, Next, wait_readable};
pub use events::Events;
pub use keeper::{AtSocket, Keeper};
pub use leases::{Kept, Leases, News};
pub use wire::{
    AcquireIn, AcquireOut, AuditIn, ClaimIn, Counters, Event, EventReply, EventRequest, ExplainIn,
    ExplainOut, Figure, GroupsOut, Lease, LeasedGroup, Leaving, ListOut, NoReply, Outsider,
    PardonIn, Place, Refusal, RefusedError, ReleaseIn, RenewIn, RenewOut, ReportIn, Request,
    RevokeIn, RevokeOut, WatchOut, WhoIn, WhoOut,
};

/// The interface's name.
pub const INTERFACE: &str = "io.umpire.Arbiter";

/// The interface in varlink's own words.
pub const DESCRIPTION: &str = include_str!("../io.umpire.Arbiter.varlink");

/// What the holder of a lease may report of itself, for the arbiter's metrics: overflow
/// interrupts that the guest got, and those that came late; trapped accesses, and RDPMC among
/// them; exits; switches between vCPUs; accesses that were denied; samples that were lost.
pub const FIGURES: [&str; 8] = [
    "pmis",
    "late_pmis",
    "traps",
    "rdpmc_traps",
    "exits",
    "switches",
    "denied_accesses",
    "lost_samples",
];

/// Most figures of a report.
pub const MOST_FIGURES: usize = 32;

/// Most lines of a call of `Audit`, and most bytes of each.
pub const MOST_LINES: usize = 64;
/// Most bytes of a line of `Audit`.
pub const MOST_LINE: usize = 8 * 1024;

/// The socket's path in the environment.
pub const SOCKET_VARIABLE: &str = "UMPIRE_ARBITER";

/// Where the host's arbiter listens: what [`SOCKET_VARIABLE`] names, or the system's.
#[must_use]
pub fn default_socket() -> PathBuf {
    match std::env::var_os(SOCKET_VARIABLE) {
        Some(path) if !path.is_empty() => path.into(),
        _ => PathBuf::from("/run/umpire/arbiter"),
    }
}
