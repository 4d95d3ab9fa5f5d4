//! The service of a host's arbiter: programs ask it for leases on performance counters
//! by the varlink interface `io.umpire.Arbiter`.
//!
//! ```text
//! socket → connections → service: call → arbiter_host: decide → changes
//!        → journal: written → replies and events → socket
//! ```
//!
//! One thread does all of it. It takes what many clients have sent, decides, writes what
//! has changed to the journal once, and answers only then: so an answer that was sent
//! survives this process. Another thread has the disk take it later: only the end of the
//! host could lose it before, and that ends all leases.
#![deny(unsafe_code)]

#[doc(hidden)]
pub mod any_bytes;
mod audit;
mod broker;
pub mod budget;
mod commit;
mod config;
mod connections;
mod convert;
mod event_loop;
mod group_watch;
mod groups;
mod host;
mod http;
mod journal;
mod manager;
mod metrics;
mod own;
mod peer;
#[cfg(test)]
mod played;
mod probe;
mod room;
mod scrape;
mod service;
#[cfg(test)]
mod simulation;
mod store;
mod sync;
mod sysfs;
mod task;
mod threads;
mod unseen;
mod watchdog;
mod words;

pub use audit::{AuditConfig, unix_ms};
pub use config::{ArbiterConfig, ConfigError, PmuConfig, hierarchies};
pub use event_loop::{Arbiterd, ServeError};
pub use own::OwnLeases;
pub use scrape::MetricsAddress;
pub use service::explain;
