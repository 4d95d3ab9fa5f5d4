//! `umpire demo`: a small built-in guest with a virtual PMU, and a table of
//! everything that its accesses led to. With `--event`, a guest that counts the
//! user's events while it works.
//!
//! Every row stands for an exit that took place; its time was taken on the
//! vCPU's thread when the run loop reported it. Nothing is printed that did not
//! happen.

mod guest;
mod host;
mod pcr;
mod plan;
mod record;
mod report;
mod worker;

#[cfg(test)]
mod tests;

pub use plan::{Plan, PlanError, Planned};
pub use record::{Happening, Row};
pub use report::{CounterRow, DemoReport, write_report};

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pmu_virt::{BackendError, CounterBackend, EmuBackend, EmuCycles, Vendor};
use thiserror::Error;
use umpire_bench::BenchError;
use vmm::config::{DEFAULT_PMI_FLOOR_US, Engine, EngineChoice};
use vmm::counters::{self, CounterError, CounterPlan, backend_env};
use vmm::devices::GuestEnd;
use vmm::doctor::{self, Refusal};
use vmm::emu::VirtualClock;
use vmm::host::CpuFacts;
use vmm::kvm::{Host, HostError, VcpuError, VcpuId, VmOptions};
use vmm::micro::{MicroError, MicroGuest, MicroRunError, Solo, SoloParts};
use vmm::probe::ProbeReport;
use vmm::vcpu::{DebugQuirks, StepSupport, TrapMode, VcpuEnd};

use crate::exit::{ExitStatus, UserError, written};
use crate::flags::{DemoFlags, DemoScenario};

/// The guest takes some tens of milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);
/// Round trips of each kind that are timed.
const ROUND_TRIPS: u32 = 200;

/// The demo could not be shown.
#[derive(Debug, Error)]
pub enum DemoError {
    /// The guest could not be made.
    #[error(transparent)]
    Machine(#[from] MicroError),
    /// The guest could not be run.
    #[error(transparent)]
    Run(#[from] MicroRunError),
    /// An ioctl failed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The counters cannot be had.
    #[error(transparent)]
    Counters(#[from] CounterError),
    /// The counter backend is gone.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// An ioctl failed.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// The round trips could not be measured.
    #[error(transparent)]
    Bench(#[from] BenchError),
    /// The guest ended otherwise than its code says.
    #[error("the demo's guest went astray: {0}")]
    Guest(String),
}

/// Runs the guest and prints the table on standard output. Where no guest can
/// run, that is said instead, and the status is [`ExitStatus::BAD_INPUT`].
///
/// # Errors
/// The flags cannot be used, the host failed in the middle, or standard output
/// cannot be written to.
pub fn run(flags: &DemoFlags) -> Result<ExitStatus, UserError> {
    match &flags.scenario {
        Some(DemoScenario::Pcr { pmu, output }) => return run_pcr(pmu.as_deref(), output.json),
        Some(DemoScenario::Host { output }) => return run_host(output.json),
        None => {}
    }
    let choice = engine(flags).map_err(UserError::bad_input)?;
    let names = umpire_events::names();
    let plan = Plan::new(flags, host_vendor(), names.as_ref()).map_err(UserError::bad_input)?;
    let json = flags.output.json;
    let out = &mut io::stdout().lock();
    let report = match (choice, on_kvm(choice, &plan)) {
        (_, Some(Ok((host, probe)))) => perform(&host, &probe, &plan),
        (EngineChoice::Only(Engine::Kvm), Some(Err(refusal))) => {
            written(decline(&refusal, "demo", json, out))?;
            return Ok(ExitStatus::BAD_INPUT);
        }
        (_, refusal) => {
            let because = refusal.and_then(Result::err);
            perform_emulated(&plan, because.map(|refusal| refusal.to_string()))
        }
    };
    written(write_report(&report.map_err(refused)?, json, out))?;
    Ok(ExitStatus::SUCCESS)
}

/// The engine that the flags ask for. Whoever names a backend that needs KVM asks for that.
fn engine(flags: &DemoFlags) -> Result<EngineChoice, String> {
    let word = flags.engine.as_deref().unwrap_or("auto");
    let choice = EngineChoice::parse(word)
        .ok_or_else(|| format!("--engine: '{word}' is none of {}", EngineChoice::ALLOWED))?;
    match (choice, &flags.counters) {
        (EngineChoice::Only(Engine::Emu), Some(_)) => Err(
            "--counters: the engine emu counts each instruction itself; leave it out, or give \
             --engine kvm"
                .to_owned(),
        ),
        (EngineChoice::Auto, Some(_)) => Ok(EngineChoice::Only(Engine::Kvm)),
        _ => Ok(choice),
    }
}

/// KVM, ready for the plan, or why it is not; none if it is not to be used.
fn on_kvm(choice: EngineChoice, plan: &Plan) -> Option<Result<(Host, ProbeReport), Refusal>> {
    if choice == EngineChoice::Only(Engine::Emu) {
        return None;
    }
    Some(doctor::open().and_then(|host| {
        let probe = doctor::check(&host)?;
        if let Some(sources) = &plan.sources {
            doctor::check_backends(&probe, sources)?;
        }
        Ok((host, probe))
    }))
}

/// The scenario of the reservations.
fn run_pcr(pmu: Option<&str>, json: bool) -> Result<ExitStatus, UserError> {
    let model = pcr::model(pmu).map_err(UserError::bad_input)?;
    let out = &mut io::stdout().lock();
    let ready = doctor::open().and_then(|host| {
        let probe = doctor::check(&host)?;
        Ok((host, probe))
    });
    match ready {
        Ok((host, probe)) => {
            let report = pcr::perform(&host, &probe, &model).map_err(refused)?;
            written(pcr::write_report(&report, json, out))?;
            Ok(ExitStatus::SUCCESS)
        }
        Err(refusal) => {
            written(decline(&refusal, "demo pcr", json, out))?;
            Ok(ExitStatus::BAD_INPUT)
        }
    }
}

/// The scenario of the host's arbiter.
fn run_host(json: bool) -> Result<ExitStatus, UserError> {
    let out = &mut io::stdout().lock();
    let ready = doctor::open().and_then(|host| doctor::check(&host).map(|_| host));
    match ready {
        Ok(vmm_host) => {
            let report = host::perform(&vmm_host).map_err(refused)?;
            written(host::write_report(&report, json, out))?;
            if report.is_true() {
                return Ok(ExitStatus::SUCCESS);
            }
            let what = "a count is not the truth; this is a bug in Umpire";
            Err(UserError::with_status(what, ExitStatus::HOST_FAILURE))
        }
        Err(refusal) => {
            written(decline(&refusal, "demo host", json, out))?;
            Ok(ExitStatus::BAD_INPUT)
        }
    }
}

/// Counters that cannot be had as asked are the user's to mend.
fn refused(error: DemoError) -> UserError {
    let status = match error {
        DemoError::Counters(_) => ExitStatus::BAD_INPUT,
        _ => ExitStatus::HOST_FAILURE,
    };
    UserError::with_status(error, status)
}

/// The vendor whose model is shown unless an event asks for the other's; AMD's
/// where the processor's vendor is neither.
fn host_vendor() -> Vendor {
    counters::host_vendor().unwrap_or(Vendor::Amd)
}

/// Says why there is nothing to show.
fn decline(refusal: &Refusal, command: &str, json: bool, out: &mut dyn Write) -> io::Result<()> {
    let elsewhere = format!("cargo l1 -- target/release/umpire {command}");
    if json {
        let refused = serde_json::json!({
            "shown": false,
            "reason": refusal.to_string(),
            "next": elsewhere,
        });
        writeln!(out, "{refused:#}")?;
    } else {
        writeln!(
            out,
            "No guest ran and nothing was counted: {refusal}.\n\
             `umpire doctor` tells more. The demo also runs in a machine with its own KVM:\n  \
             {elsewhere}\n\
             On a processor in software, without KVM, a guest counts with:\n  \
             umpire demo --engine emu"
        )?;
    }
    out.flush()
}

/// Runs the guest and gathers what happened.
///
/// # Errors
/// The guest could not be run, or went astray.
pub fn perform(host: &Host, probe: &ProbeReport, plan: &Plan) -> Result<DemoReport, DemoError> {
    let Plan { model, events, .. } = plan;
    let options = VmOptions::with_pmu(Some(model)).trapping(probe.trap_plan(TrapMode::Auto));
    let (vm, vcpus) = guest_of(plan)?.build(host, &options)?;
    let kvm = vcpus
        .into_iter()
        .next()
        .ok_or_else(|| DemoError::Guest("it has no vCPU".to_owned()))?;
    let env = backend_env(
        kvm.get_tsc_khz()?,
        counters::host_vendor(),
        probe.step_support(),
    );
    let counters = CounterPlan::prepare(&plan.sources_on(probe), env, 1, None)?;
    let backend = counters.sources().to_string();
    let record = Arc::new(record::Record::new(kvm.id()));
    let parts = SoloParts {
        model: model.clone(),
        backend: counters.open()?,
        quirks: probe.quirks(),
        step: probe.step_support(),
        pmi_floor_us: DEFAULT_PMI_FLOOR_US,
        platform: record.clone(),
        observer: Box::new(record::Witness(record.clone())),
        reservations: None,
    };
    let solo = Solo::new(kvm, vm, parts)?;
    let report = watch(solo, &record, plan, backend)?;
    let round_trips = if events.is_empty() {
        Some(umpire_bench::measure(host, probe, ROUND_TRIPS)?)
    } else {
        None
    };
    Ok(DemoReport {
        processor: CpuFacts::read(Path::new("/")).model_name,
        slow_cpl0: probe.slow_cpl0(),
        round_trips,
        ..report
    })
}

/// The same on a processor in software; `because`: why not on KVM, if that was to be.
///
/// # Errors
/// The guest went astray.
pub fn perform_emulated(plan: &Plan, because: Option<String>) -> Result<DemoReport, DemoError> {
    let clock = VirtualClock::beginning_at(0);
    let record = Arc::new(record::Record::in_virtual_time(VcpuId(0), clock.clone()));
    let backend = EmuBackend::new(EmuCycles::Simulated);
    let name = backend.name().to_owned();
    let parts = SoloParts {
        model: plan.model.clone(),
        backend: Box::new(backend),
        quirks: DebugQuirks::UNKNOWN,
        step: StepSupport::default(),
        pmi_floor_us: DEFAULT_PMI_FLOOR_US,
        platform: record.clone(),
        observer: Box::new(record::Witness(record.clone())),
        reservations: None,
    };
    let solo = Solo::emulated(&guest_of(plan)?, parts, clock)?;
    Ok(DemoReport {
        engine: Engine::Emu.to_string(),
        because,
        ..watch(solo, &record, plan, name)?
    })
}

fn guest_of(plan: &Plan) -> Result<MicroGuest, MicroError> {
    if plan.events.is_empty() {
        guest::guest(&plan.model)
    } else {
        worker::guest(&plan.model, &plan.events)
    }
}

/// Runs the guest to its end, and tells what happened.
fn watch(
    mut solo: Solo,
    record: &record::Record,
    plan: &Plan,
    backend: String,
) -> Result<DemoReport, DemoError> {
    let Plan { model, events, .. } = plan;
    record.start();
    check_end(solo.run(PATIENCE)?)?;
    let (pmis, late_pmis) = solo.pmis();
    let Some(counting) = solo.backend() else {
        return Err(DemoError::Guest("it has lost its counters".to_owned()));
    };
    let reports = solo.counters();
    let counters = if events.is_empty() {
        reports.iter().map(CounterRow::describe).collect()
    } else {
        events
            .iter()
            .map(|event| CounterRow::of_event(event, &reports, counting))
            .collect()
    };
    Ok(DemoReport {
        shown: true,
        engine: Engine::Kvm.to_string(),
        because: None,
        processor: None,
        slow_cpl0: false,
        model: model.name(),
        backend,
        tsc_khz: solo.tsc_khz(),
        rows: record::describe(&record.happenings(), model, counting),
        counters,
        pmis,
        late_pmis,
        round_trips: None,
    })
}

/// The guest ends by itself, and says that all went well.
fn check_end(end: Option<VcpuEnd>) -> Result<(), DemoError> {
    match end {
        Some(VcpuEnd::Guest(GuestEnd::TestExit(0))) => Ok(()),
        Some(end) => Err(DemoError::Guest(end.to_string())),
        None => {
            let limit = PATIENCE.as_secs();
            Err(DemoError::Guest(format!("it did not end within {limit} s")))
        }
    }
}
