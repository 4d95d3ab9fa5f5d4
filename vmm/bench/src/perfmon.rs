//! What host tools cost: the perfmon2 interface, measured by a tool of it through
//! the control socket of a real guest.

mod callers;
mod commands;
mod fixture;
mod flood;
mod guest;
mod hostile;
mod loading;
mod many;
mod observers;
mod reporter;
mod samples;
mod served_guest;
mod sets;
mod slowdown;
mod text;
mod tool;
mod traps;

pub use callers::CallersRow;
pub use commands::CommandRow;
pub use flood::FloodReport;
pub use many::ManyReport;
pub use observers::{ObserverRow, Spent};
pub use samples::SampleRow;
pub use sets::{SetCost, SetRow};
pub use slowdown::SlowRow;
pub use tool::Format;
pub use traps::TrapsRow;

pub(crate) use loading::{Loader, Subject, alone, in_another_vm, in_the_same_vm};
pub(crate) use traps::TimesByAccess;

use std::io::{Write, stderr};
use std::path::Path;
use std::time::Duration;

use pmu_virt::{BackendEnv, PmuModel};
use serde::Serialize;

use self::fixture::Fixture;
use super::Counters;
use super::error::BenchError;
use super::harness::{self, Harness};
use super::sources::{LeftOut, Source};

/// A part of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerfmonPart {
    /// Commands through the socket.
    Commands,
    /// Samples into the buffer.
    Samples,
    /// A computing guest while it is sampled.
    Slowdown,
    /// Switches of event sets.
    Sets,
    /// Several contexts of one vCPU.
    Observers,
    /// A thousand contexts.
    Many,
    /// A flood of the socket.
    Flood,
}

impl PerfmonPart {
    /// All of them, in their order.
    pub const ALL: [Self; 7] = [
        Self::Commands,
        Self::Samples,
        Self::Slowdown,
        Self::Sets,
        Self::Observers,
        Self::Many,
        Self::Flood,
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Commands => "commands",
            Self::Samples => "samples",
            Self::Slowdown => "slowdown",
            Self::Sets => "sets",
            Self::Observers => "observers",
            Self::Many => "many",
            Self::Flood => "flood",
        }
    }
}

/// What is measured of host tools, and how often.
#[derive(Clone, Debug)]
pub struct PerfmonOptions {
    /// The counter sources.
    pub counters: Counters,
    /// The parts; without any all of them.
    pub parts: Vec<PerfmonPart>,
    /// How often each way of sampling is tried in the slow-down.
    pub rounds: u32,
    /// How often each command, access and switch is timed.
    pub iterations: u32,
    /// Contexts of the part `many`.
    pub contexts: u32,
    /// Seconds that each part may take on each source.
    pub timeout_s: u32,
}

/// What one measurement has to do with.
#[derive(Debug)]
pub(super) struct Bench<'a> {
    pub(super) harness: &'a Harness<'a>,
    pub(super) model: PmuModel,
    pub(super) env: BackendEnv,
    pub(super) tsc_khz: u32,
    pub(super) rounds: u32,
    pub(super) iterations: u32,
    pub(super) contexts: u32,
    pub(super) timeout: Duration,
}

/// A part of the measurement that failed.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    pub part: &'static str,
    pub reason: String,
}

/// The whole measurement. A part that was not asked for, or failed, is empty.
#[derive(Clone, Debug, Serialize)]
pub struct PerfmonReport {
    /// The host's processor.
    pub processor: Option<String>,
    /// Guest CPL 0 runs in KVM's instruction emulator.
    pub slow_cpl0: bool,
    /// PMU model of the guest.
    pub model: String,
    /// What the six and ten events are, by source.
    pub events: Vec<Events>,
    /// Commands through the socket, on `clock`.
    pub commands: Vec<CommandRow>,
    /// Samples into the buffer.
    pub samples: Vec<SampleRow>,
    /// Samples with a task and callers, and without.
    pub callers: Vec<CallersRow>,
    /// A computing guest while it is sampled.
    pub slowdown: Vec<SlowRow>,
    /// Switches of event sets.
    pub sets: Vec<SetRow>,
    /// Several contexts of one vCPU.
    pub observers: Vec<ObserverRow>,
    /// A thousand contexts.
    pub many: Option<ManyReport>,
    /// A flood of the socket.
    pub flood: Option<FloodReport>,
    /// Sources without figures.
    pub left_out: Vec<LeftOut>,
    /// Parts that failed.
    pub failures: Vec<Failure>,
}

/// The events of a source, in the order in which a context takes them; it begins
/// again where there are too few.
#[derive(Clone, Debug, Serialize)]
pub struct Events {
    /// Where the counts come from.
    pub backend: &'static str,
    /// Events; `:u` is the guest's programs alone.
    pub names: Vec<String>,
}

/// Shows on standard error what is being measured.
fn progress(what: &str) {
    // Nobody may read it.
    let _ = writeln!(stderr(), "bench perfmon: {what}");
}

impl Bench<'_> {
    /// The source that every host has, for what does not depend on the source.
    fn clock(&self) -> Result<(Source, Fixture), BenchError> {
        let source = Source::new(&pmu_virt::Source::Clock, self.env)?;
        match Fixture::new(&self.model, &source)? {
            Ok(fixture) => Ok((source, fixture)),
            Err(none) => Err(BenchError::Guest(none.reason)),
        }
    }

    /// `Err`: why there is nothing to measure with this source.
    fn fixture(&self, source: &Source) -> Result<Result<Fixture, LeftOut>, BenchError> {
        Fixture::new(&self.model, source)
    }
}

/// Does as the client that does its worst.
pub(super) fn hostile(socket: &Path) -> Result<(), BenchError> {
    hostile::run(socket)
}

/// Measures the parts that `options` names, on each of `sources` where they depend
/// on it.
pub(super) fn measure(
    harness: &Harness<'_>,
    env: BackendEnv,
    (sources, left_out): (&[Source], Vec<LeftOut>),
    options: &PerfmonOptions,
) -> Result<PerfmonReport, BenchError> {
    let bench = Bench {
        harness,
        model: fixture::model(harness.model.vendor())?,
        env,
        tsc_khz: env.tsc_khz,
        rounds: options.rounds,
        iterations: options.iterations,
        contexts: options.contexts,
        timeout: Duration::from_secs(options.timeout_s.into()),
    };
    let mut report = PerfmonReport {
        processor: harness::processor(),
        slow_cpl0: harness.probe.slow_cpl0(),
        model: bench.model.name().to_owned(),
        events: Vec::new(),
        commands: Vec::new(),
        samples: Vec::new(),
        callers: Vec::new(),
        slowdown: Vec::new(),
        sets: Vec::new(),
        observers: Vec::new(),
        many: None,
        flood: None,
        left_out,
        failures: Vec::new(),
    };
    let parts = if options.parts.is_empty() {
        PerfmonPart::ALL.to_vec()
    } else {
        options.parts.clone()
    };
    for source in sources {
        match bench.fixture(source)? {
            Ok(fixture) => report.events.push(Events {
                backend: source.name,
                names: fixture.names,
            }),
            Err(none) => report.left_out.push(none),
        }
    }
    let named = |source: &&Source| report.events.iter().any(|one| one.backend == source.name);
    let usable: Vec<&Source> = sources.iter().filter(named).collect();
    for part in parts {
        if let Err(error) = report.part(&bench, part, &usable) {
            progress(&format!("{} failed: {error}", part.name()));
            report.failures.push(Failure {
                part: part.name(),
                reason: error.to_string(),
            });
        }
    }
    Ok(report)
}

impl PerfmonReport {
    fn part(
        &mut self,
        bench: &Bench<'_>,
        part: PerfmonPart,
        sources: &[&Source],
    ) -> Result<(), BenchError> {
        if part == PerfmonPart::Samples {
            self.callers = callers::measure(bench)?;
        }
        match part {
            PerfmonPart::Commands => self.commands = commands::measure(bench)?,
            PerfmonPart::Many => self.many = Some(many::measure(bench)?),
            PerfmonPart::Flood => self.flood = Some(flood::measure(bench)?),
            PerfmonPart::Samples
            | PerfmonPart::Slowdown
            | PerfmonPart::Sets
            | PerfmonPart::Observers => {
                for source in sources {
                    self.of_source(bench, part, source)?;
                }
            }
        }
        Ok(())
    }

    fn of_source(
        &mut self,
        bench: &Bench<'_>,
        part: PerfmonPart,
        source: &Source,
    ) -> Result<(), BenchError> {
        let left_out = match part {
            PerfmonPart::Samples => {
                samples::measure(bench, source)?.map(|rows| self.samples.extend(rows))
            }
            PerfmonPart::Slowdown => {
                slowdown::measure(bench, source)?.map(|rows| self.slowdown.extend(rows))
            }
            PerfmonPart::Observers => {
                observers::measure(bench, source)?.map(|rows| self.observers.extend(rows))
            }
            _ => sets::measure(bench, source)?.map(|rows| self.sets.extend(rows)),
        };
        if let Err(mut none) = left_out {
            none.reason = format!("{}: {}", part.name(), none.reason);
            self.left_out.push(none);
        }
        Ok(())
    }

    /// Every part that was asked for has its figures.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.failures.is_empty()
    }
}
