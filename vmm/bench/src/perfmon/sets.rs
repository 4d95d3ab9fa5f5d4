//! What a switch of event sets costs: the same made-up guest time with one set,
//! and with two in turn.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use perfmon_abi::consts::PFM_SETFL_TIME_SWITCH;
use perfmon_abi::wire::{Call, Refusal};
use perfmon_abi::{Message, PmcArg, SetDesc, Timespec};
use pmu_virt::perfmon::{
    AttachedContext, Context, ContextId, HostPolicy, LogicalPmu, MessageQueue, Quantities,
    VirtualPmd,
};
use pmu_virt::{CorePmu, Grant, OwnerId, Progress, Ticks, Tsc, VcpuPmu};
use serde::Serialize;
use vmm::sys::rdtsc;

use super::fixture::Fixture;
use super::{Bench, progress};
use crate::error::BenchError;
use crate::harness::ratio;
use crate::sources::{LeftOut, Source};
use crate::stats::{median, trimmed_mean};

/// Counters of a set.
const COUNTERS: [usize; 3] = [1, 4, 6];
/// Time of a set, and of the made-up guest between two exits.
const SLICE: Duration = Duration::from_millis(1);

/// Sets with some number of counters.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SetRow {
    /// Where the counts come from.
    pub backend: &'static str,
    /// Counters of each set.
    pub counters: usize,
    /// An entry and an exit with a switch at the end of it.
    pub switching: SetCost,
    /// An entry and an exit with one set.
    pub staying: SetCost,
    /// Switches in the run.
    pub switches: u64,
}

/// Costs of an entry and an exit.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SetCost {
    /// Median time.
    pub p50_ns: u64,
    /// Mean time without the longest hundredth.
    pub mean_ns: u64,
    /// Operations on physical counters.
    pub operations: f64,
}

/// A tool that is not there.
#[derive(Debug)]
pub(super) struct Nobody;

impl Quantities for Nobody {
    fn read(&self, _: VirtualPmd) -> Option<u64> {
        None
    }
}

impl MessageQueue for Nobody {
    fn waiting(&self) -> usize {
        0
    }

    fn post(&mut self, _: Option<&Message>) {}
}

pub(super) fn measure(
    bench: &Bench<'_>,
    source: &Source,
) -> Result<Result<Vec<SetRow>, LeftOut>, BenchError> {
    let fixture = match bench.fixture(source)? {
        Ok(fixture) => fixture,
        Err(none) => return Ok(Err(none)),
    };
    progress(&format!("{}: switches of event sets", source.name));
    let row = |counters| {
        let (staying, _) = cost(bench, &fixture, source, (1, counters))?;
        let (switching, switches) = cost(bench, &fixture, source, (2, counters))?;
        Ok(SetRow {
            backend: source.name,
            counters,
            switching,
            staying,
            switches,
        })
    };
    let rows = COUNTERS.into_iter().map(row).collect::<Result<_, _>>();
    Ok(match rows {
        Err(BenchError::Refused { what, refusal }) => Err(LeftOut {
            source: source.name,
            reason: format!("{what}: {refusal}"),
        }),
        rows => Ok(rows?),
    })
}

/// Costs of an exit, and how often the set changed.
fn cost(
    bench: &Bench<'_>,
    fixture: &Fixture,
    source: &Source,
    (sets, counters): (u16, usize),
) -> Result<(SetCost, u64), BenchError> {
    let khz = NonZeroU32::new(bench.tsc_khz).unwrap_or(NonZeroU32::MIN);
    let mut core = CorePmu::new(source.open()?);
    core.enable_hosting(HostPolicy::HostFirst, khz);
    let mut pmu = VcpuPmu::detached(OwnerId(0), fixture.model.clone(), Grant::everything());
    pmu.attach(&mut core);
    let context =
        context(fixture, sets, counters).map_err(|why| BenchError::refused("a set", why))?;
    let hosted = AttachedContext::new(ContextId(1), Box::new(context), Box::new(Nobody));
    let loaded = pmu.host_side(Some(&mut core)).load(hosted, 0);
    loaded.map_err(|not| BenchError::refused("loading a context", not.refusal))?;
    let started =
        pmu.host_side(Some(&mut core))
            .call(ContextId(1), &mut Call::Start(None), &Nobody);
    started.map_err(|refusal| BenchError::refused("starting it", refusal))?;
    // A little more than the time of a set, which the interface gives in whole nanoseconds.
    let slice = u64::try_from(SLICE.as_millis()).unwrap_or(1) * u64::from(khz.get());
    let slice = slice + slice / 1000;
    let (mut tsc, mut switches, mut times) = (rdtsc(), 0, Vec::new());
    let before = core.operations();
    let active = |pmu: &VcpuPmu| {
        pmu.hosts()
            .context(ContextId(1))
            .map(|hosted| hosted.context().active_set())
    };
    for _ in 0..bench.iterations {
        let set = active(&pmu);
        let begun = rdtsc();
        pmu.observe(&mut core, Progress::Entered { tsc: Tsc(tsc) });
        tsc += slice;
        pmu.observe(
            &mut core,
            Progress::Left {
                tsc: Tsc(tsc),
                halted: Ticks(0),
                ring: None,
            },
        );
        times.push(rdtsc().wrapping_sub(begun));
        switches += u64::from(active(&pmu) != set);
    }
    let operations = core.operations() - before;
    let none = || BenchError::Guest("no exit was timed".to_owned());
    let ns = |ticks: u64| ticks.saturating_mul(1_000_000) / u64::from(khz.get());
    let cost = SetCost {
        p50_ns: ns(median(&mut times).ok_or_else(none)?),
        mean_ns: ns(trimmed_mean(&mut times).ok_or_else(none)?),
        operations: ratio(operations, bench.iterations.into()),
    };
    let expected = if sets > 1 {
        u64::from(bench.iterations)
    } else {
        0
    };
    if expected == switches {
        Ok((cost, switches))
    } else {
        Err(BenchError::Miscount(format!(
            "{sets} sets changed {switches} times in {} slices",
            bench.iterations
        )))
    }
}

/// A context with so many sets of so many counters.
pub(super) fn context(fixture: &Fixture, sets: u16, counters: usize) -> Result<Context, Refusal> {
    let pmu = Arc::new(LogicalPmu::new(fixture.model.clone()));
    let mut context = Context::new(pmu, 0, None)?;
    let selects: Vec<u64> = fixture
        .selects
        .iter()
        .copied()
        .cycle()
        .take(counters)
        .collect();
    for set in 0..sets {
        if sets > 1 {
            let slice = u64::try_from(SLICE.as_nanos()).unwrap_or(u64::MAX);
            let description = SetDesc {
                id: set,
                flags: PFM_SETFL_TIME_SWITCH,
                timeout: Timespec::from_ns(slice),
                ..SetDesc::default()
            };
            context.call(&mut Call::CreateEvtsets(vec![description]), &Nobody)?;
        }
        let pmc = |(&(num, _), &value): (&(u16, u16), &u64)| PmcArg {
            num,
            set,
            value,
            ..PmcArg::default()
        };
        let pmcs = fixture.counters.iter().zip(&selects).map(pmc).collect();
        context.call(&mut Call::WritePmcs(pmcs), &Nobody)?;
    }
    Ok(context)
}
