//! Requests of many clients at the same time, over the socket.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::daemon::{Daemon, acquire, at_once, cpu_time, release, request};
use super::{ArbiterOptions, nanos, summary};
use crate::error::BenchError;
use crate::stats::Percentiles;

/// Requests in a second that are wanted.
pub(super) const TARGET: f64 = 20_000.0;
/// The longest 99th percentile that is wanted.
pub(super) const TARGET_P99: Duration = Duration::from_millis(5);
/// Before anything is counted.
const WARMING: Duration = Duration::from_millis(250);

/// Clients that acquire two counters and give them back, each on a connection and a thread
/// of its own.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RequestsRow {
    pub clients: u32,
    /// Leases of others that are there.
    pub leases: u32,
    /// Requests that were answered in a second.
    pub per_second: f64,
    /// From a request to its answer.
    pub time: Percentiles,
    /// Time of the arbiter's process on a CPU for each request, in microseconds.
    pub arbiter_cpu_us: f64,
    /// The same of all clients together.
    pub clients_cpu_us: f64,
    /// 20,000 requests in a second or more, and p99 of 5 ms or less.
    pub met: bool,
}

pub(super) fn measure(
    daemon: &Daemon,
    options: &ArbiterOptions,
    leases: u32,
) -> Result<RequestsRow, BenchError> {
    let process = daemon.process();
    let spent = || [cpu_time(&process), cpu_time("self")].map(Option::unwrap_or_default);
    let before = spent();
    let whole = Instant::now();
    let counts_from = whole + WARMING;
    let ends = counts_from + Duration::from_millis(options.load_ms.into());
    let each = at_once(options.clients, |n| {
        let mut arbiter = daemon.connect()?;
        let (mut times, mut made) = (Vec::new(), 0_u32);
        let mut ask = |act: &mut dyn FnMut() -> Result<(), BenchError>| {
            let begun = Instant::now();
            act()?;
            made += 1;
            let ended = Instant::now();
            if begun >= counts_from && ended <= ends {
                times.push(nanos(ended - begun));
            }
            Ok::<_, BenchError>(())
        };
        while Instant::now() < ends {
            let mut lease = 0;
            ask(&mut || {
                lease = acquire(&mut arbiter, request(n))?;
                Ok(())
            })?;
            ask(&mut || release(&mut arbiter, lease))?;
        }
        Ok((times, made))
    })?;
    let after = spent();
    let made: u32 = each.iter().map(|(_, made)| made).sum();
    let mut times: Vec<u64> = each.into_iter().flat_map(|(times, _)| times).collect();
    let counted = u32::try_from(times.len()).unwrap_or(u32::MAX);
    let time = summary(&mut times)?;
    let per_second = f64::from(counted) / (f64::from(options.load_ms) / 1000.0);
    let cpu = |at: usize| {
        let spent = after[at].saturating_sub(before[at]);
        spent.as_secs_f64() * 1e6 / f64::from(made.max(1))
    };
    Ok(RequestsRow {
        clients: options.clients,
        leases,
        per_second,
        time,
        arbiter_cpu_us: cpu(0),
        clients_cpu_us: cpu(1),
        met: per_second >= TARGET && time.p99_ns <= nanos(TARGET_P99),
    })
}
