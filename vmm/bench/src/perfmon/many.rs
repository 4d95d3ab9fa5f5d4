//! A thousand contexts on a machine with 64 vCPUs.

use std::time::{Duration, Instant};

use serde::Serialize;
use umpire_perfmon::{Client, ContextHandle};
use vmm::sched::CorePlan;

use super::commands::{CommandRow, timed};
use super::fixture::{Fixture, Program};
use super::guest::measuring;
use super::served_guest::{ServedGuest, Setting};
use super::tool::{call, start};
use super::traps::{TimesByAccess, TrapsRow};
use super::{Bench, progress};
use crate::error::BenchError;
use crate::guest::BATCH;
use crate::harness::resident;
use crate::sources::first_countable;
use crate::stats::{NANOSECONDS, Percentiles, percentiles};

/// vCPUs, each with a loaded context at the end.
const VCPUS: u8 = 64;
const CORES: u8 = 2;
/// Long enough that few accesses are timed across the end of a slice.
const SLICE: Duration = Duration::from_millis(20);
/// Counters of each context; one is left for the guest.
const EVENTS: usize = 4;
/// Commands to each kind of context are fewer than to one: each may have to wait
/// for its vCPU's core.
const FEWER: u32 = 10;

/// What the contexts cost.
#[derive(Clone, Debug, Serialize)]
pub struct ManyReport {
    /// Contexts that are attached to nothing.
    pub unloaded: u32,
    /// Contexts on vCPUs.
    pub loaded: u32,
    /// Time of a creation: PFM_CREATE_CONTEXT and PFM_WRITE_PMCS.
    pub creation: Percentiles,
    /// Time of PFM_LOAD_CONTEXT and PFM_START.
    pub loading: Percentiles,
    /// Resident memory of this process, which is VMM and tool in one, in bytes:
    /// before.
    pub memory_before: u64,
    /// With the unloaded contexts.
    pub memory_unloaded: u64,
    /// With all.
    pub memory_loaded: u64,
    /// Bytes for each unloaded context.
    pub per_unloaded: u64,
    /// Bytes for each loaded context beyond that.
    pub per_loaded: u64,
    pub commands: Vec<CommandRow>,
    /// Accesses of the guest without contexts and with them.
    pub traps: Vec<TrapsRow>,
    /// Those without contexts at the end against those at the beginning: what this host
    /// makes of a ratio where nothing is different.
    pub same: Vec<TrapsRow>,
    /// Accesses timed of each kind.
    pub accesses: u32,
}

pub(super) fn measure(bench: &Bench<'_>) -> Result<ManyReport, BenchError> {
    let (source, fixture) = bench.clock()?;
    let event = first_countable(&fixture.model, source.open()?.as_ref());
    let event = event.map_err(|none| BenchError::Guest(none.reason))?;
    let setting = Setting {
        vcpus: VCPUS.into(),
        cores: Some(CorePlan {
            cores: CORES,
            slice: SLICE,
        }),
        ..Setting::measuring(bench, &source)
    };
    let guest = measuring(&fixture.model, event.code, VCPUS)?;
    setting.play(bench.harness, &guest, |served| run(served, &fixture, bench))
}

fn run(
    served: &ServedGuest,
    fixture: &Fixture,
    bench: &Bench<'_>,
) -> Result<ManyReport, BenchError> {
    let client = served.client()?;
    let loaded = u32::from(VCPUS);
    let unloaded = bench.contexts.saturating_sub(loaded);
    let rounds = (bench.iterations / 2).div_ceil(BATCH);
    let [mut quiet, mut with, mut again] = std::array::from_fn(|_| TimesByAccess::default());
    progress("64 vCPUs without contexts");
    quiet.take(served, rounds)?;

    let program = Program::counting(EVENTS);
    let (mut idle, mut busy) = (Vec::new(), Vec::new());
    // What the tool itself keeps is there before the first look.
    idle.reserve(usize::try_from(unloaded).unwrap_or(0));
    drop(fixture.create(&client, &program)?);
    let memory_before = resident("self")?;
    progress(&format!("{unloaded} contexts"));
    let mut creations = Vec::new();
    for _ in 0..unloaded {
        served.check_time()?;
        idle.push(clocked(&mut creations, || {
            fixture.create(&client, &program)
        })?);
    }
    let memory_unloaded = resident("self")?;
    progress(&format!("{loaded} loaded contexts"));
    let mut loadings = Vec::new();
    for vcpu in 0..usize::from(VCPUS) {
        served.check_time()?;
        let context = clocked(&mut creations, || fixture.create(&client, &program))?;
        clocked(&mut loadings, || start(&client, &context, vcpu))?;
        busy.push(context);
    }
    let memory_loaded = resident("self")?;
    let commands = commands(served, fixture, bench, &client, (&idle, &busy))?;
    progress("64 vCPUs with contexts");
    with.take(served, rounds)?;
    drop((idle, busy));
    // They end when the server has seen that their last descriptor is closed.
    client
        .hello()
        .map_err(|refusal| BenchError::refused("HELLO", refusal))?;
    // The machine as it was, once more: what the host did meanwhile hits both.
    progress("64 vCPUs without contexts again");
    again.take(served, rounds)?;
    let same = again.clone().against(quiet.clone(), bench.tsc_khz)?;
    quiet.extend(again);
    let none = || BenchError::Guest("it has no contexts".to_owned());
    let each = |bytes: u64, count: u32| bytes / u64::from(count.max(1));
    let per_unloaded = each(memory_unloaded.saturating_sub(memory_before), unloaded);
    let of_loaded = each(memory_loaded.saturating_sub(memory_unloaded), loaded);
    Ok(ManyReport {
        unloaded,
        loaded,
        creation: percentiles(&mut creations, NANOSECONDS).ok_or_else(none)?,
        loading: percentiles(&mut loadings, NANOSECONDS).ok_or_else(none)?,
        memory_before,
        memory_unloaded,
        memory_loaded,
        per_unloaded,
        per_loaded: of_loaded.saturating_sub(per_unloaded),
        commands,
        traps: with.against(quiet, bench.tsc_khz)?,
        same,
        accesses: rounds * BATCH,
    })
}

/// Commands to all contexts in turn.
fn commands(
    served: &ServedGuest,
    fixture: &Fixture,
    bench: &Bench<'_>,
    client: &Client,
    (idle, busy): (&[ContextHandle], &[ContextHandle]),
) -> Result<Vec<CommandRow>, BenchError> {
    let reading = fixture.reading(EVENTS);
    let each = |name, contexts: &[ContextHandle], iterations| {
        let mut all = contexts.iter().cycle();
        timed(served, name, iterations, || match all.next() {
            Some(context) => call(client, context, reading.clone()).map(|_| ()),
            None => Ok(()),
        })
    };
    Ok(vec![
        each("READ_PMDS of 4, unloaded, in turn", idle, bench.iterations)?,
        each(
            "READ_PMDS of 4, on vCPUs, in turn",
            busy,
            bench.iterations / FEWER,
        )?,
    ])
}

fn clocked<T>(
    times: &mut Vec<u64>,
    act: impl FnOnce() -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    let begun = Instant::now();
    let done = act()?;
    times.push(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
    Ok(done)
}
