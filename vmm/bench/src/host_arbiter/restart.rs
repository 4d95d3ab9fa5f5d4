//! The arbiter is killed and started anew while there are many leases; and what a lease
//! costs it in memory.

use std::time::Duration;

use serde::Serialize;

use super::daemon::{Daemon, Holders};
use super::{ArbiterOptions, nanos, progress, summary, timed};
use crate::error::BenchError;
use crate::harness::resident;
use crate::stats::Percentiles;

/// The longest start that is wanted.
pub(super) const TARGET: Duration = Duration::from_secs(1);

/// Memory of the arbiter's process (VmRSS), in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Memory {
    /// Before the first lease.
    pub empty: u64,
    /// With all of them, on 64 connections.
    pub full: u64,
    pub per_lease: u64,
    /// After a start with all of them, when all were claimed.
    pub restarted: u64,
}

/// A kill and a start, again and again.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RestartReport {
    /// Leases: two counters of a thread on 16 CPUs each.
    pub leases: u32,
    pub starts: u32,
    /// From the start of the process until a first holder has its lease again.
    pub answers: Percentiles,
    /// From there until all have, asking on 64 connections at the same time.
    pub all_back: Percentiles,
    /// p99 of `answers` is 1 s or less.
    pub met: bool,
    pub memory: Memory,
}

pub(super) fn measure(options: &ArbiterOptions) -> Result<RestartReport, BenchError> {
    let mut daemon = Daemon::start(None)?;
    let empty = resident(&daemon.process())?;
    progress(&format!("{} leases", options.leases));
    let mut holders = Holders::fill(&daemon, options.leases)?;
    let full = resident(&daemon.process())?;
    let (mut answers, mut all_back) = (Vec::new(), Vec::new());
    let starts = (options.rounds / 10).max(1);
    for start in 0..starts {
        progress(&format!("start {} of {starts}", start + 1));
        daemon.kill()?;
        answers.push(timed(|| {
            daemon.start_anew()?;
            holders.claim_first(&daemon)
        })?);
        all_back.push(timed(|| holders.claim_others(&daemon))?);
    }
    let restarted = resident(&daemon.process())?;
    let answers = summary(&mut answers)?;
    Ok(RestartReport {
        leases: options.leases,
        starts,
        answers,
        all_back: summary(&mut all_back)?,
        met: answers.p99_ns <= nanos(TARGET),
        memory: Memory {
            empty,
            full,
            per_lease: full.saturating_sub(empty) / u64::from(options.leases.max(1)),
            restarted,
        },
    })
}
