//! Commands through the socket: how many a second, and how long each takes.

use std::time::Instant;

use perfmon_abi::Config;
use serde::Serialize;
use umpire_perfmon::Call;

use super::fixture::{Fixture, Program};
use super::guest::busy;
use super::served_guest::{ServedGuest, Setting};
use super::tool::{call, end, start};
use super::{Bench, progress};
use crate::error::BenchError;
use crate::stats::{NANOSECONDS, Percentiles, percentiles};

/// Counters that a READ reads.
const READ: usize = 6;

/// One kind of command.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CommandRow {
    /// The command, and what it was done on.
    pub command: &'static str,
    /// Commands in a second, one after the other, by one client.
    pub per_second: f64,
    /// From the call to its return.
    pub time: Percentiles,
}

/// What kinds of commands there are: the context is loaded or is not.
const KINDS: [&str; 3] = [
    "GET_CONFIG",
    "READ_PMDS of 6, unloaded",
    "READ_PMDS of 6, on a busy vCPU",
];

pub(super) fn measure(bench: &Bench<'_>) -> Result<Vec<CommandRow>, BenchError> {
    let (source, fixture) = bench.clock()?;
    let setting = Setting::busy(bench, &source);
    setting.play(bench.harness, &busy()?, |served| {
        rows(served, &fixture, bench)
    })
}

fn rows(
    served: &ServedGuest,
    fixture: &Fixture,
    bench: &Bench<'_>,
) -> Result<Vec<CommandRow>, BenchError> {
    served.calibrate(bench.tsc_khz)?;
    let client = served.client()?;
    let context = fixture.create(&client, &Program::counting(READ))?;
    let reading = fixture.reading(READ);
    let read = || call(&client, &context, reading.clone()).map(|_| ());
    let ask = || {
        let asked = client.ask(&mut Call::GetConfig(Config::default()));
        asked.map_err(|refusal| BenchError::refused("GET_CONFIG", refusal))
    };
    let mut rows = vec![
        timed(served, KINDS[0], bench.iterations, ask)?,
        timed(served, KINDS[1], bench.iterations, read)?,
    ];
    start(&client, &context, 0)?;
    rows.push(timed(served, KINDS[2], bench.iterations, read)?);
    end(&client, &context)?;
    Ok(rows)
}

/// Does a command again and again.
pub(super) fn timed(
    served: &ServedGuest,
    command: &'static str,
    iterations: u32,
    mut act: impl FnMut() -> Result<(), BenchError>,
) -> Result<CommandRow, BenchError> {
    progress(&format!("{iterations} times {command}"));
    // The first ones warm up.
    for _ in 0..iterations.div_ceil(100) {
        act()?;
    }
    let mut times: Vec<u64> = Vec::new();
    let begun = Instant::now();
    for _ in 0..iterations {
        let at = Instant::now();
        act()?;
        times.push(u64::try_from(at.elapsed().as_nanos()).unwrap_or(u64::MAX));
        served.check_time()?;
    }
    let per_second = f64::from(iterations) / begun.elapsed().as_secs_f64().max(f64::EPSILON);
    let time = percentiles(&mut times, NANOSECONDS);
    Ok(CommandRow {
        command,
        per_second,
        time: time.ok_or_else(|| BenchError::Guest("no command was done".to_owned()))?,
    })
}
