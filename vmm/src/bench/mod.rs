//! `umpire bench`: measurements of this host.

mod bare;
mod guest;
mod neighbour;
mod report;
mod stats;
mod storm;
mod traps;

pub use guest::Access;
pub use neighbour::{NeighbourReport, NeighbourRow};
pub(crate) use report::micros;
pub use report::{write_neighbours, write_report};
pub use stats::{Percentiles, percentiles};
pub use traps::{BenchError, TrapReport, TrapRow, measure};

use std::io;

use crate::config::{ExitStatus, UserError};
use crate::doctor;

/// Measures round trips of trapped PMU accesses, `iterations` of each kind, and
/// prints the report on standard output.
///
/// # Errors
/// This host cannot run a guest with a virtual PMU, the guest did not do what it
/// should, or standard output cannot be written to.
pub fn traps(json: bool, iterations: u32) -> Result<ExitStatus, UserError> {
    let host = doctor::open().map_err(UserError::bad_input)?;
    let probe = doctor::check(&host).map_err(UserError::bad_input)?;
    let failed = |error: Box<dyn std::error::Error + Send + Sync>| {
        UserError::with_status(error, ExitStatus::HOST_FAILURE)
    };
    let report = measure(&host, &probe, iterations).map_err(|error| failed(error.into()))?;
    write_report(&report, json, &mut io::stdout().lock()).map_err(UserError::unwritable)?;
    Ok(ExitStatus::SUCCESS)
}

/// Measures what a hostile neighbour costs the trap path of another VM, with
/// `iterations` of each kind of access beside each neighbour.
///
/// # Errors
/// As [`traps`], or there is one host CPU only.
pub fn neighbour(json: bool, iterations: u32) -> Result<ExitStatus, UserError> {
    let host = doctor::open().map_err(UserError::bad_input)?;
    let probe = doctor::check(&host).map_err(UserError::bad_input)?;
    let failed = |error: Box<dyn std::error::Error + Send + Sync>| {
        UserError::with_status(error, ExitStatus::HOST_FAILURE)
    };
    let report =
        neighbour::measure(&host, &probe, iterations).map_err(|error| failed(error.into()))?;
    write_neighbours(&report, json, &mut io::stdout().lock()).map_err(UserError::unwritable)?;
    Ok(ExitStatus::SUCCESS)
}
