//! Whether a guest with a virtual PMU can run here, and what this host's KVM is
//! like.
//!
//! [`check`] is the verdict alone, for commands that are about to start a guest;
//! they refuse for the very reason that a whole [`Diagnosis`] gives.

mod diagnosis;
mod models;
mod sources;

pub use diagnosis::{Diagnosis, EngineFinding, Kvm, Verdict};
pub use models::ModelFinding;
pub use sources::BackendFinding;

use pmu_virt::Sources;
use thiserror::Error;

use crate::kvm::{Host, HostError};
use crate::probe::{HostRefusal, ProbeError, ProbeReport, probe};

/// Why a guest with a virtual PMU cannot run on this host.
#[derive(Debug, Error)]
pub enum Refusal {
    /// `/dev/kvm` cannot be opened, KVM is too old, lacks something, or an ioctl failed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The probe guests did not run.
    #[error("this KVM cannot run the probe guests: {0}")]
    Probe(#[from] ProbeError),
    /// The probe guests ran, and found what rules a virtual PMU out.
    #[error("{0}")]
    Obstacle(#[from] HostRefusal),
    /// Guests can run, but not with this counter backend.
    #[error("the counter backend {name} cannot be used here: {reason}")]
    Backend {
        name: &'static str,
        /// What the report says of it.
        reason: String,
    },
}

/// Opens KVM, with the next step in the error.
///
/// # Errors
/// [`Refusal::Host`].
pub fn open() -> Result<Host, Refusal> {
    Ok(Host::open()?)
}

/// Runs the probe guests once (some ten milliseconds) and says what they found.
///
/// # Errors
/// A guest with a virtual PMU cannot run on `host`, for this reason.
pub fn check(host: &Host) -> Result<ProbeReport, Refusal> {
    host.require_all()?;
    let report = probe()?;
    report.check()?;
    Ok(report)
}

/// Says whether the counter backends can be used on a host with these findings.
///
/// # Errors
/// One cannot, for the reason that the report gives.
pub fn check_backends(probe: &ProbeReport, sources: &Sources) -> Result<(), Refusal> {
    for source in sources.iter() {
        let name = source.name();
        // Physical registers are looked at when they are opened, with its options.
        if name != "msr"
            && let Some(reason) = sources::by_name(name, probe).0
        {
            return Err(Refusal::Backend { name, reason });
        }
    }
    Ok(())
}
