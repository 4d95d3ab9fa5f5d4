//! Firmware for the guest: what `--firmware` and `--firmware-counter` ask for,
//! and which counters that sets aside.
//!
//! [`CounterSpec`] is one `--firmware-counter` as given. [`FirmwarePlan`]
//! resolves all of them for one PMU model, before there are vCPUs. The loader
//! ([`crate::boot`]) puts the plan into the guest's memory, and the crate
//! `firmware` has the program that acts on it.

mod outcome;
mod plan;
mod spec;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

pub use outcome::Expected;
pub use plan::{FirmwarePlan, PlanError, SetAside};
pub use spec::{CounterSpec, ErrorMode, SpecError, WantedCounter};

/// `--firmware`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum FirmwareChoice {
    /// The kernel is entered directly.
    #[default]
    None,
    /// The firmware that was built with this program.
    Builtin,
    /// This image.
    File(PathBuf),
}
