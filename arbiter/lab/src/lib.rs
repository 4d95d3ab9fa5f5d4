//! Experiments with the arbiter: what becomes of generated workloads under each scheme.
//!
//! The decisions are those of [`arbiter::PcrUnit`], the machine that guests get: one for
//! each vCPU. This crate brings what surrounds it: layers and programs that want
//! counters, cores that vCPUs share and move between, and tools of the host
//! ([`Machine`], [`Workload`]). Time is virtual and jumps from one event to the next.
//! A run is determined by its seed, and by nothing else.
//!
//! - [`simulate`] runs one workload under one scheme and policy.
//! - [`sweep`] repeats that over schemes, policies and seeds, and [`estimate`] gives the
//!   mean of a figure with its 95 % interval.
//! - [`guess_cookies`] has a program or a kernel guess a cookie, against the arbiter's
//!   own guard.
//! - [`script`] plays requests of layers against a unit, without a guest.
//! - [`replay`] plays the requests that a real run has recorded.
//!
//! The crate performs no I/O.
#![forbid(unsafe_code)]

mod figures;
mod guess;
mod interval;
mod job;
mod plan;
mod random;
mod replay;
pub mod script;
mod simulate;
mod sweep;

pub use figures::{Class, Figures, Kind, Metric, Who};
pub use guess::{GuessPlan, Guessed, guess_cookies};
pub use interval::{Estimate, estimate};
pub use plan::{Demand, Machine, PlanError, Variant, Workload};

pub use replay::{Recorded, ReplaySetup, Replayed, recorded_results, replay};
pub use simulate::simulate;
pub use sweep::{Cell, Seeds, sweep};
