//! Firmware for the guest: what `--firmware` and `--firmware-counter` ask for,
//! and which counters that sets aside.
//!
//! [`CounterSpec`] is one `--firmware-counter` in words; [`FirmwarePlan`] is what
//! all of them come to for one PMU model, known before there are vCPUs. The
//! loader puts it into the guest's memory ([`crate::boot`]), and the program that
//! acts on it is the crate `firmware`.

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
