//! The host's arbiter: its core by itself, and `umpire arbiterd` as a process with a journal
//! on disk.

mod daemon;
mod decisions;
mod groups;
mod requests;
mod restart;
mod revocation;
mod text;
mod traps;

pub use decisions::CoreRow;
pub use groups::{GroupsCoreRow, GroupsReport, GroupsRow};
pub use requests::RequestsRow;
pub use restart::{Memory, RestartReport};
pub use revocation::RevocationRow;
pub use traps::LoadedTraps;

use std::io::{Write, stderr};
use std::time::{Duration, Instant};

use serde::Serialize;

use self::daemon::{Daemon, Holders};
use super::error::BenchError;
use super::harness::{self, Harness};
use super::perfmon::Failure;
use super::stats::{NANOSECONDS, Percentiles, percentiles};

/// A part of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArbiterPart {
    /// Decisions of the core on one thread.
    Core,
    /// Requests of many clients over the socket.
    Requests,
    /// From a revocation until another lease has the counters.
    Revocation,
    /// Restarts with many leases, and their memory.
    Restart,
    /// Leases of control groups.
    Groups,
    /// Trapped accesses of a guest while the arbiter decides.
    Traps,
}

impl ArbiterPart {
    /// All of them, in their order.
    pub const ALL: [Self; 6] = [
        Self::Core,
        Self::Requests,
        Self::Revocation,
        Self::Restart,
        Self::Groups,
        Self::Traps,
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Core => "core",
            Self::Requests => "requests",
            Self::Revocation => "revocation",
            Self::Restart => "restart",
            Self::Groups => "groups",
            Self::Traps => "traps",
        }
    }
}

/// What is measured of the arbiter, and how long.
#[derive(Clone, Debug)]
pub struct ArbiterOptions {
    /// The parts; without any all of them.
    pub parts: Vec<ArbiterPart>,
    /// Milliseconds in which clients make requests, for each row.
    pub load_ms: u32,
    /// Clients that make requests at the same time.
    pub clients: u32,
    /// Leases of the large host, and groups that have some.
    pub leases: u32,
    /// Revocations, leases of a group and restarts measured are this many, and a tenth.
    pub rounds: u32,
    /// How often each access of the guest is measured on each side.
    pub iterations: u32,
}

/// The whole measurement. A part that was not asked for, or failed, is empty.
#[derive(Clone, Debug, Serialize)]
pub struct ArbiterReport {
    /// The host's processor.
    pub processor: Option<String>,
    /// The core by itself, on one thread.
    pub core: Vec<CoreRow>,
    /// Clients at the socket.
    pub requests: Vec<RequestsRow>,
    /// One `fdatasync` of 4 KiB in the journal's folder, with nothing else on the disk.
    pub sync: Option<Percentiles>,
    /// From a revocation until another lease has the counters.
    pub revocation: Vec<RevocationRow>,
    /// Killed and started anew with many leases.
    pub restart: Option<RestartReport>,
    /// Leases of control groups.
    pub groups: Option<GroupsReport>,
    /// Trapped accesses with and without an arbiter that decides; guest and arbiter on two
    /// CPUs, and the other way round.
    pub traps: Vec<LoadedTraps>,
    /// Parts that failed.
    pub failures: Vec<Failure>,
}

/// Shows on standard error what is being measured.
fn progress(what: &str) {
    // Nobody may read it.
    let _ = writeln!(stderr(), "bench arbiter: {what}");
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Percentiles of nanoseconds.
fn summary(times: &mut [u64]) -> Result<Percentiles, BenchError> {
    percentiles(times, NANOSECONDS).ok_or(BenchError::NoSamples)
}

/// What needs a host that can run guests.
pub(super) type WithHarness<'a> = &'a mut dyn FnMut(&Harness<'_>) -> Result<(), BenchError>;

/// Measures the parts that `options` names. `harness` is asked for by the part that runs a
/// guest.
pub(super) fn measure(
    options: &ArbiterOptions,
    with_harness: impl Fn(WithHarness<'_>) -> Result<(), BenchError>,
) -> ArbiterReport {
    let mut report = ArbiterReport {
        processor: harness::processor(),
        core: Vec::new(),
        requests: Vec::new(),
        sync: None,
        revocation: Vec::new(),
        restart: None,
        groups: None,
        traps: Vec::new(),
        failures: Vec::new(),
    };
    for part in ArbiterPart::ALL {
        if !options.parts.is_empty() && !options.parts.contains(&part) {
            continue;
        }
        progress(part.name());
        let done = match part {
            ArbiterPart::Core => {
                report.core = decisions::measure(options);
                Ok(())
            }
            ArbiterPart::Requests => report.requests(options),
            ArbiterPart::Revocation => {
                revocation::measure(options).map(|rows| report.revocation = rows)
            }
            ArbiterPart::Restart => restart::measure(options).map(|it| report.restart = Some(it)),
            ArbiterPart::Groups => groups::measure(options).map(|it| report.groups = Some(it)),
            ArbiterPart::Traps => with_harness(&mut |harness| {
                report.traps = traps::measure(harness, options)?;
                Ok(())
            }),
        };
        if let Err(error) = done {
            progress(&format!("{} failed: {error}", part.name()));
            report.failures.push(Failure {
                part: part.name(),
                reason: error.to_string(),
            });
        }
    }
    report
}

impl ArbiterReport {
    fn requests(&mut self, options: &ArbiterOptions) -> Result<(), BenchError> {
        let daemon = Daemon::start(None)?;
        self.sync = Some(daemon.sync()?);
        self.requests.push(requests::measure(&daemon, options, 0)?);
        progress(&format!("{} leases", options.leases));
        let holders = Holders::fill(&daemon, options.leases)?;
        let beside = requests::measure(&daemon, options, options.leases)?;
        self.requests.push(beside);
        drop(holders);
        Ok(())
    }

    /// Every part that was asked for has its figures.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.failures.is_empty()
    }
}

/// How long `act` takes, in nanoseconds.
fn timed(act: impl FnOnce() -> Result<(), BenchError>) -> Result<u64, BenchError> {
    let begun = Instant::now();
    act()?;
    Ok(nanos(begun.elapsed()))
}
