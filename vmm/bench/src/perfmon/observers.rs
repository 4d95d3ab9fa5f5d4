//! What several contexts of a vCPU cost: an exit, a command, and the load of one more.

use std::num::NonZeroU32;

use perfmon_abi::PmdArg;
use perfmon_abi::wire::Call;
use pmu_virt::perfmon::{AttachedContext, ContextId, HostPolicy};
use pmu_virt::{CorePmu, Grant, OwnerId, Progress, Ticks, Tsc, VcpuPmu};
use serde::Serialize;
use vmm::sys::rdtsc;

use super::fixture::Fixture;
use super::sets::{Nobody, context};
use super::{Bench, progress};
use crate::error::BenchError;
use crate::sources::{LeftOut, Source};
use crate::stats::{median, trimmed_mean};

/// Contexts of the vCPU.
const CONTEXTS: [u32; 3] = [1, 4, 16];
/// Counters of each.
const COUNTERS: usize = 2;
/// The guest's time between two exits, in milliseconds.
const SLICE_MS: u64 = 1;

/// Some number of contexts.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ObserverRow {
    /// Where the counts come from.
    pub backend: &'static str,
    /// Contexts of the vCPU, two counters each.
    pub contexts: u32,
    /// An entry and an exit.
    pub exit: Spent,
    /// PFM_READ_PMDS of both counters of one context, by the vCPU's thread.
    pub read: Spent,
    /// PFM_LOAD_CONTEXT, PFM_START and PFM_UNLOAD_CONTEXT of the last one, likewise.
    pub load: Spent,
}

/// Time of something.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Spent {
    /// Median.
    pub p50_ns: u64,
    /// Mean without the longest hundredth.
    pub mean_ns: u64,
}

pub(super) fn measure(
    bench: &Bench<'_>,
    source: &Source,
) -> Result<Result<Vec<ObserverRow>, LeftOut>, BenchError> {
    let fixture = match bench.fixture(source)? {
        Ok(fixture) => fixture,
        Err(none) => return Ok(Err(none)),
    };
    progress(&format!("{}: several contexts", source.name));
    let row = |contexts| row(bench, &fixture, source, contexts);
    let rows = CONTEXTS.into_iter().map(row).collect::<Result<_, _>>();
    Ok(match rows {
        Err(BenchError::Refused { what, refusal }) => Err(LeftOut {
            source: source.name,
            reason: format!("{what}: {refusal}"),
        }),
        rows => Ok(rows?),
    })
}

fn row(
    bench: &Bench<'_>,
    fixture: &Fixture,
    source: &Source,
    contexts: u32,
) -> Result<ObserverRow, BenchError> {
    let khz = NonZeroU32::new(bench.tsc_khz).unwrap_or(NonZeroU32::MIN);
    let mut core = CorePmu::new(source.open()?);
    core.enable_hosting(HostPolicy::HostFirst, khz);
    let mut pmu = VcpuPmu::detached(OwnerId(0), fixture.model.clone(), Grant::everything());
    pmu.attach(&mut core);
    for id in 1..=contexts {
        load(&mut pmu, &mut core, fixture, ContextId(id))?;
    }
    let mut tsc = rdtsc();
    let exit = timed(bench, || {
        pmu.observe(&mut core, Progress::Entered { tsc: Tsc(tsc) });
        tsc += SLICE_MS * u64::from(khz.get());
        let left = Progress::Left {
            tsc: Tsc(tsc),
            halted: Ticks(0),
            ring: None,
        };
        pmu.observe(&mut core, left);
        Ok(())
    })?;
    let pmd = |&(_, num): &(u16, u16)| PmdArg {
        num,
        ..PmdArg::default()
    };
    let pmds = fixture.counters.iter().take(COUNTERS).map(pmd);
    let pmds: Vec<PmdArg> = pmds.collect();
    let read = timed(bench, || {
        let mut call = Call::ReadPmds(pmds.clone());
        let read = pmu
            .host_side(Some(&mut core))
            .call(ContextId(1), &mut call, &Nobody);
        read.map_err(|refusal| BenchError::refused("reading", refusal))
    })?;
    let last = ContextId(contexts);
    let loading = timed(bench, || {
        pmu.host_side(Some(&mut core)).unload(last);
        load(&mut pmu, &mut core, fixture, last)
    })?;
    Ok(ObserverRow {
        backend: source.name,
        contexts,
        exit,
        read,
        load: loading,
    })
}

/// Makes, loads and starts a context.
fn load(
    pmu: &mut VcpuPmu,
    core: &mut CorePmu,
    fixture: &Fixture,
    id: ContextId,
) -> Result<(), BenchError> {
    let context =
        context(fixture, 1, COUNTERS).map_err(|why| BenchError::refused("a context", why))?;
    let hosted = AttachedContext::new(id, Box::new(context), Box::new(Nobody));
    let loaded = pmu.host_side(Some(core)).load(hosted, 0);
    loaded.map_err(|not| BenchError::refused("loading a context", not.refusal))?;
    let started = pmu
        .host_side(Some(core))
        .call(id, &mut Call::Start(None), &Nobody);
    started.map_err(|refusal| BenchError::refused("starting it", refusal))
}

/// Does something again and again.
fn timed(
    bench: &Bench<'_>,
    mut act: impl FnMut() -> Result<(), BenchError>,
) -> Result<Spent, BenchError> {
    let mut times = Vec::new();
    for _ in 0..bench.iterations {
        let begun = rdtsc();
        act()?;
        times.push(rdtsc().wrapping_sub(begun));
    }
    let none = || BenchError::Guest("nothing was timed".to_owned());
    let ns = |ticks: u64| ticks.saturating_mul(1_000_000) / u64::from(bench.tsc_khz.max(1));
    Ok(Spent {
        p50_ns: ns(median(&mut times).ok_or_else(none)?),
        mean_ns: ns(trimmed_mean(&mut times).ok_or_else(none)?),
    })
}
