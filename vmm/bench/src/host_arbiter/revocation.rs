//! From a revocation until another lease has the counters.

use std::time::Duration;

use serde::Serialize;
use umpire_lease::{Arbiter, Held, Next, Request, RevokeIn, RevokeOut, What};

use super::daemon::{Daemon, asked, request};
use super::{ArbiterOptions, nanos, summary, timed};
use crate::error::BenchError;
use crate::harness::PATIENCE;
use crate::stats::Percentiles;

/// How long before it loses its counters a holder is told.
pub(super) const GRACE: Duration = Duration::from_millis(20);
/// How much later than that the counters may be another's.
pub(super) const TARGET: Duration = Duration::from_millis(5);

/// Revocations of one kind. The counters are free when the lease that waits for them is
/// told that it holds them.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RevocationRow {
    /// The holder gives back as soon as it is told, and not when the grace ends.
    pub yields: bool,
    /// Notice of the holder, in milliseconds.
    pub grace_ms: u64,
    /// From the revocation to the other lease; without the grace, unless the holder yields.
    pub time: Percentiles,
    /// p99 of 5 ms or less.
    pub met: bool,
}

pub(super) fn measure(options: &ArbiterOptions) -> Result<Vec<RevocationRow>, BenchError> {
    let daemon = Daemon::start(None)?;
    let mut operator = daemon.connect()?;
    let mut rows = Vec::new();
    for yields in [false, true] {
        let mut holder = acquire(&daemon)?;
        let mut times = Vec::new();
        for _ in 0..options.rounds.max(1) {
            let mut waiting = acquire(&daemon)?;
            let lease = holder.lease().id;
            let time = timed(|| {
                revoke(&mut operator, lease)?;
                if yields {
                    expected(&asked("a notice", holder.next(Some(PATIENCE)))?)?;
                    // Its end gives the counters back.
                    drop(holder);
                }
                asked("waiting for the counters", waiting.wait())
            })?;
            holder = waiting;
            times.push(time.saturating_sub(if yields { 0 } else { nanos(GRACE) }));
        }
        let time = summary(&mut times)?;
        rows.push(RevocationRow {
            yields,
            grace_ms: u64::try_from(GRACE.as_millis()).unwrap_or(u64::MAX),
            time,
            met: time.p99_ns <= nanos(TARGET),
        });
    }
    Ok(rows)
}

/// All counters of CPU 0; waits for them if need be.
fn acquire(daemon: &Daemon) -> Result<Held, BenchError> {
    let all = Request {
        counters: vec![umpire_lease::Counters::programmable(6)],
        waits_ms: Some(-1),
        ..request(0)
    };
    asked("Acquire", daemon.connect()?.acquire(&all))
}

fn revoke(operator: &mut Arbiter, lease: u64) -> Result<(), BenchError> {
    let revoke = RevokeIn {
        lease,
        grace_ms: u64::try_from(GRACE.as_millis()).ok(),
    };
    let RevokeOut { .. } = asked("Revoke", operator.call("Revoke", &revoke))?;
    Ok(())
}

fn expected(next: &Next) -> Result<(), BenchError> {
    match next {
        Next::Event(event) if event.what == What::Leaving => Ok(()),
        other => Err(BenchError::Arbiter(format!(
            "the holder of a lease that was revoked heard of {other:?}"
        ))),
    }
}
