//! What a switch between two vCPUs on one core costs.
//!
//! One schedule is played by Umpire's core PMUs and by the naive way, on backends
//! of the same kind and through the same trait. Guest time is made up; only the
//! switches are timed. At the end all must have counted the same.

mod schedule;
mod ways;

use std::io::{self, Write};

use pmu_virt::{PmuModel, Progress, Ring, Ticks, Tsc};
use serde::Serialize;
use vmm::sys::rdtsc;

use self::schedule::{Scenario, Slice};
use self::ways::{Naive, Umpire, Way, selects};
use super::error::BenchError;
use super::harness::{self, ratio};
use super::report::{Report, table, verdict};
use super::sources::{LeftOut, Source, USR_OS_ENABLE, countable};
use super::stats::{median, trimmed_mean};

/// Eight counters of one kind, the most that a vCPU of the scenarios uses.
pub(super) const MODEL: &str = "intel-v2,counters=8,fixed=0";

/// One way to switch.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cost {
    /// Operations on physical counters for each return of a vCPU.
    pub operations: f64,
    /// Median time of a switch, out and in.
    pub p50_ns: u64,
    /// Mean time of a switch, out and in, without the longest hundredth.
    pub mean_ns: u64,
}

/// One scenario on one source.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SwitchRow {
    /// What runs.
    pub scenario: &'static str,
    /// Where the counts come from.
    pub backend: &'static str,
    /// Physical counters of a core.
    pub capacity: usize,
    /// Switches timed.
    pub switches: usize,
    /// Umpire's core PMU.
    pub umpire: Cost,
    /// Every select and counter of the model saved and restored each time.
    pub naive: Cost,
    /// The selects and counters that the two vCPUs use saved and restored each time.
    pub naive_used: Cost,
    /// The target of the scenario was reached, against `naive`.
    pub met: bool,
}

/// The whole measurement.
#[derive(Clone, Debug, Serialize)]
pub struct SwitchReport {
    /// The host's processor.
    pub processor: Option<String>,
    /// PMU model of the vCPUs.
    pub model: &'static str,
    /// One for each scenario and source.
    pub rows: Vec<SwitchRow>,
    /// Sources without figures.
    pub left_out: Vec<LeftOut>,
}

/// Plays every scenario with `slices` slices on each of `sources`.
pub(super) fn measure(
    sources: &[Source],
    mut left_out: Vec<LeftOut>,
    slices: u32,
    tsc_khz: u32,
) -> Result<SwitchReport, BenchError> {
    let model = PmuModel::parse(MODEL)?;
    let slices = usize::try_from(slices).unwrap_or(usize::MAX);
    let mut rows = Vec::new();
    for source in sources {
        match codes(&model, source)? {
            Ok(codes) => {
                for scenario in schedule::all(slices) {
                    rows.push(play(&model, source, &codes, &scenario, tsc_khz)?);
                }
            }
            Err(none) => left_out.push(none),
        }
    }
    Ok(SwitchReport {
        processor: harness::processor(),
        model: MODEL,
        rows,
        left_out,
    })
}

/// Event codes with flags that a source counts, or why it cannot serve.
pub(super) fn codes(
    model: &PmuModel,
    source: &Source,
) -> Result<Result<Vec<u64>, LeftOut>, BenchError> {
    let backend = source.open()?;
    let left_out = |reason: String| LeftOut {
        source: source.name,
        reason,
    };
    if backend.capacity() < usize::from(model.programmable()) {
        let capacity = backend.capacity();
        let reason = format!("it has {capacity} counters, and a vCPU uses more");
        return Ok(Err(left_out(reason)));
    }
    let events = countable(model, backend.as_ref());
    Ok(if events.is_empty() {
        Err(left_out(format!("it counts no event of {}", model.name())))
    } else {
        Ok(events
            .iter()
            .map(|event| event.code | USR_OS_ENABLE)
            .collect())
    })
}

fn play(
    model: &PmuModel,
    source: &Source,
    codes: &[u64],
    scenario: &Scenario,
    tsc_khz: u32,
) -> Result<SwitchRow, BenchError> {
    let vcpus: Vec<_> = scenario
        .counters
        .iter()
        .map(|counters| selects(codes, *counters))
        .collect();
    let backends = || source.open_cores(scenario.cores);
    let capacity = source.open()?.capacity();
    let mut umpire = Umpire::new(model, &vcpus, backends()?);
    let mut naive = Naive::new(model, &vcpus, backends()?, true);
    let mut used = Naive::new(model, &vcpus, backends()?, false);
    let mut ways: [&mut dyn Way; 3] = [&mut umpire, &mut naive, &mut used];
    let costs = race(&mut ways, scenario, tsc_khz)?;
    if source.is_repeatable() {
        agree(&mut ways, scenario)?;
    }
    let [umpire, naive, naive_used] = costs;
    let few = scenario.most.is_none_or(|most| umpire.operations <= most);
    let fewer = scenario.factor.is_none_or(|factor| {
        umpire.operations * factor <= naive.operations && umpire.mean_ns < naive.mean_ns
    });
    Ok(SwitchRow {
        scenario: scenario.name,
        backend: source.name,
        capacity,
        switches: scenario.slices.len(),
        umpire,
        naive,
        naive_used,
        met: few && fewer,
    })
}

/// Plays the schedule on every way at once, slice by slice, so that noise hits
/// all alike; the first round through all vCPUs warms up.
fn race<const N: usize>(
    ways: &mut [&mut dyn Way; N],
    scenario: &Scenario,
    tsc_khz: u32,
) -> Result<[Cost; N], BenchError> {
    let warm = scenario.slices.len() / 10;
    let mut ticks: [Vec<u64>; N] = std::array::from_fn(|_| Vec::new());
    let mut before = [0; N];
    let mut tsc = 0;
    for (number, slice) in scenario.slices.iter().enumerate() {
        if number == warm {
            before = std::array::from_fn(|way| ways[way].operations());
            ticks.iter_mut().for_each(Vec::clear);
        }
        for place in 0..N {
            // Which comes first goes round.
            let way = (number + place) % N;
            ticks[way].push(switch(ways[way], *slice, tsc));
        }
        tsc += slice.ticks;
    }
    let switches = u64::try_from(scenario.slices.len() - warm).unwrap_or(u64::MAX);
    let after: [u64; N] = std::array::from_fn(|way| ways[way].operations());
    let mut costs = Vec::new();
    for (way, ticks) in ticks.iter_mut().enumerate() {
        let ns = |ticks: u64| ticks.saturating_mul(1_000_000) / u64::from(tsc_khz.max(1));
        costs.push(Cost {
            operations: ratio((after[way] - before[way]) * scenario.per_return, switches),
            p50_ns: ns(median(ticks).unwrap_or_default()),
            mean_ns: ns(trimmed_mean(ticks).unwrap_or_default()),
        });
    }
    costs
        .try_into()
        .map_err(|_| BenchError::Miscount("a way to switch has no cost".to_owned()))
}

/// One slice; the ticks of switching in and out.
fn switch(way: &mut dyn Way, slice: Slice, tsc: u64) -> u64 {
    let Slice { core, vcpu, ticks } = slice;
    let begin = rdtsc();
    way.enter(core, vcpu);
    let entered = rdtsc();
    way.run(core, vcpu, Progress::Entered { tsc: Tsc(tsc) });
    let left = Progress::Left {
        tsc: Tsc(tsc + ticks),
        halted: Ticks(0),
        ring: Some(Ring::Kernel),
    };
    way.run(core, vcpu, left);
    let leaving = rdtsc();
    way.leave(core, vcpu);
    let end = rdtsc();
    entered.saturating_sub(begin) + end.saturating_sub(leaving)
}

/// All ways must have counted the same, else their times mean nothing. Only
/// repeatable sources can show that.
fn agree<const N: usize>(
    ways: &mut [&mut dyn Way; N],
    scenario: &Scenario,
) -> Result<(), BenchError> {
    let counts: Vec<_> = ways.iter_mut().map(|way| way.counts()).collect();
    let differ = |pair: &[Vec<Vec<u64>>]| pair[0] != pair[1];
    if counts.windows(2).any(differ) {
        Err(BenchError::Miscount(format!(
            "the ways to switch counted differently in '{}': {counts:?}",
            scenario.name
        )))
    } else {
        Ok(())
    }
}

impl Report for SwitchReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "Switches between vCPUs on a core, out and in\n{}, model {}\n",
            self.processor.as_deref().unwrap_or("unknown processor"),
            self.model
        )?;
        let cost =
            |cost: Cost| format!("{:.2} {} / {}", cost.operations, cost.p50_ns, cost.mean_ns);
        let rows = self.rows.iter().map(|row| {
            [
                row.scenario.to_string(),
                format!("{} {}", row.backend, row.capacity),
                cost(row.umpire),
                cost(row.naive),
                cost(row.naive_used),
                verdict(Some(row.met)).to_owned(),
            ]
        });
        let titles = [
            "operations per return, p50 / mean [ns]",
            "",
            "umpire",
            "naive",
            "naive, used only",
            "",
        ];
        table(titles, 2..=4, rows, out)?;
        writeln!(
            out,
            "\nwanted: 0 operations where nothing counts; at most 2 for a return; for the 16 vCPUs at\n\
             most a third of the naive operations, and less time. The number behind a backend is its\n\
             physical counters. naive: all 8 selects and counters out and in each time."
        )?;
        LeftOut::text(&self.left_out, out)
    }
}

#[cfg(test)]
mod tests;
