//! What counters a host has, and who has them.
//!
//! The host arbiter may promise only what can be had. The kernel has no call that says how
//! many counters are free, so this module finds out:
//!
//! - [`discover`] lists the PMUs of the kernel and the CPUs that each counts for.
//! - [`measure`] pins events until one finds no counter: what is free on one CPU, with
//!   everything in place that is held now. [`measure_each`] looks at many CPUs at once.
//!   [`can_be_had`] asks for a list of events.
//! - [`holders`] names who holds counters and is not ours; [`unexplained`] is the rest.
//! - [`Handed`] opens an event for another process, and [`Lineage`] tells when all have ended that
//!   may have inherited it.
//! - [`Watchdog`] gives the NMI watchdog's counter back, and restores it after a crash.
//!
//! Whatever reads files does so below a root folder, `/` on a real host. The system calls of a
//! measurement are behind [`ProbeCalls`]. So tests fake both.
//!
//! ```no_run
//! use std::path::Path;
//!
//! for pmu in umpire_arbiterd::budget::discover(Path::new("/"))? {
//!     for cpu in pmu.measured_on().iter() {
//!         match umpire_arbiterd::budget::measure(&pmu, cpu, umpire_arbiterd::budget::MAX_TIME) {
//!             Ok(budget) => println!("{} on CPU {cpu}: {}", pmu.name, budget.programmable),
//!             Err(why) => println!("{} on CPU {cpu}: {why}", pmu.name),
//!         }
//!     }
//! }
//! # Ok::<(), umpire_arbiterd::budget::FileError>(())
//! ```
mod calls;
mod capacity;
mod file;
mod handed;
mod holders;
mod lineage;
mod pmu;
mod probe;
#[allow(unsafe_code)]
mod sys;
mod watchdog;

pub use arbiter_host::CpuSet;
pub use calls::{
    CpuidLeaf, Errno, EventFd, EventSpec, Follows, HandedEvent, ProbeCalls, ProbeEvent, Rings,
    Target, Times,
};
pub use capacity::{Capacity, Fixed};
pub use file::FileError;
pub use handed::Handed;
pub use holders::{Deficit, Holder, Holders, UNEXPLAINED, holders, unexplained};
pub use lineage::{Lineage, Lineages};
pub use pmu::{Domain, Pmu, Scope, discover};
pub use probe::{
    Budget, FixedState, Free, MAX_EVENTS, MAX_TIME, NotMeasured, can_be_had, can_be_had_with,
    measure, measure_each, measure_each_with, measure_with,
};
pub use watchdog::{GivenBack, Restored, Watchdog};
