//! A tool that loads a context and unloads it as fast as it can, through the control
//! socket of a VM.

use std::time::Duration;

use pmu_virt::BackendEnv;
use umpire_perfmon::{Client, ContextHandle};

use super::fixture::{self, Fixture, Program};
use super::guest::{busy, measuring};
use super::reporter::Reported;
use super::served_guest::{ServedGuest, Setting};
use super::tool::{end, start};
use super::traps::{TimesByAccess, TrapsRow};
use crate::error::BenchError;
use crate::harness::Harness;
use crate::sources::{Source, first_countable};

/// Counters of the context.
const EVENTS: usize = 4;
/// The measurement ends before.
const DAY: Duration = Duration::from_secs(86_400);

/// The tool, with its context.
#[derive(Debug)]
pub(crate) struct Loader {
    client: Client,
    context: ContextHandle,
    vcpu: usize,
}

impl Loader {
    fn new(served: &ServedGuest, fixture: &Fixture, vcpu: usize) -> Result<Self, BenchError> {
        let client = served.client()?;
        let context = fixture.create(&client, &Program::counting(EVENTS))?;
        Ok(Self {
            client,
            context,
            vcpu,
        })
    }

    /// Loads the context onto its vCPU, lets it count, and unloads it.
    pub(crate) fn round(&self) -> Result<(), BenchError> {
        start(&self.client, &self.context, self.vcpu)?;
        end(&self.client, &self.context)
    }
}

/// Runs a VM whose only vCPU computes, while `act` is its tool. Everything is on the host
/// CPU `cpu`.
pub(crate) fn in_another_vm<T>(
    harness: &Harness<'_>,
    cpu: usize,
    act: impl FnOnce(&Loader) -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    let env = harness.env()?;
    let (source, fixture) = clock(harness, env)?;
    let setting = setting(&fixture, &source, (1, Reported::Turns), [cpu, cpu]);
    setting.play(harness, &busy()?, |served| {
        // Turns of the loop that are short would be exits without end.
        served.calibrate(env.tsc_khz)?;
        act(&Loader::new(served, &fixture, 0)?)
    })
}

/// The subject of a tool.
#[derive(Debug)]
pub(crate) struct Subject<'a> {
    served: &'a ServedGuest,
    tsc_khz: u32,
}

impl Subject<'_> {
    /// Takes a batch of every kind of access.
    pub(crate) fn take(&self, times: &mut TimesByAccess) -> Result<(), BenchError> {
        self.take_batches(times, 1)
    }

    /// Takes so many batches of every kind of access.
    pub(crate) fn take_batches(
        &self,
        times: &mut TimesByAccess,
        batches: u32,
    ) -> Result<(), BenchError> {
        times.take(self.served, batches)
    }

    /// Both conditions side by side.
    pub(crate) fn rows(
        &self,
        [quiet, loaded]: [TimesByAccess; 2],
    ) -> Result<Vec<TrapsRow>, BenchError> {
        loaded.against(quiet, self.tsc_khz)
    }
}

/// Runs a VM whose vCPU 0 times its accesses on the first of the host CPUs, while vCPU 1
/// computes on the other, where the server of the tool is. The tool's context is for
/// vCPU 1.
pub(crate) fn in_the_same_vm<T>(
    harness: &Harness<'_>,
    [subject, neighbour]: [usize; 2],
    act: impl FnOnce(&Loader, &Subject<'_>) -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    measured(harness, 2, [neighbour, subject], |fixture, subject| {
        let loader = Loader::new(subject.served, fixture, 1)?;
        act(&loader, subject)
    })
}

/// Runs a VM whose only vCPU times its accesses on the second of the host CPUs. The VM's
/// server is on the first, and has nothing to do.
pub(crate) fn alone<T>(
    harness: &Harness<'_>,
    cpus: [usize; 2],
    act: impl FnOnce(&Subject<'_>) -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    measured(harness, 1, cpus, |_, subject| act(subject))
}

fn measured<T>(
    harness: &Harness<'_>,
    vcpus: u8,
    cpus: [usize; 2],
    act: impl FnOnce(&Fixture, &Subject<'_>) -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    let env = harness.env()?;
    let (source, fixture) = clock(harness, env)?;
    let event = first_countable(&fixture.model, source.open()?.as_ref());
    let event = event.map_err(|none| BenchError::Guest(none.reason))?;
    let of_guest = (vcpus.into(), Reported::Accesses);
    let setting = setting(&fixture, &source, of_guest, cpus);
    let guest = measuring(&fixture.model, event.code, vcpus)?;
    setting.play(harness, &guest, |served| {
        let tsc_khz = env.tsc_khz;
        act(&fixture, &Subject { served, tsc_khz })
    })
}

fn clock(harness: &Harness<'_>, env: BackendEnv) -> Result<(Source, Fixture), BenchError> {
    let source = Source::new(&pmu_virt::Source::Clock, env)?;
    let model = fixture::model(harness.model.vendor())?;
    match Fixture::new(&model, &source)? {
        Ok(fixture) => Ok((source, fixture)),
        Err(none) => Err(BenchError::Guest(none.reason)),
    }
}

fn setting<'a>(
    fixture: &'a Fixture,
    source: &'a Source,
    (vcpus, reports): (usize, Reported),
    cpus: [usize; 2],
) -> Setting<'a> {
    Setting {
        model: &fixture.model,
        source,
        vcpus,
        cores: None,
        reports,
        cpus: Some(cpus),
        timeout: DAY,
    }
}
