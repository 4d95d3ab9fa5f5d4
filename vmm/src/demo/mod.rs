//! `umpire demo`: a small built-in guest with a virtual PMU, and a table of
//! everything that its accesses led to.
//!
//! Every row stands for an exit that took place; its time was taken on the
//! vCPU's thread when the run loop reported it. Nothing is printed that did not
//! happen.

mod guest;
mod record;
mod report;

#[cfg(test)]
mod tests;

pub use record::{Happening, Row};
pub use report::{CounterRow, DemoReport, write_report};

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pmu_virt::{ClockBackend, PmuModel, Vendor, all_pmu_msr_ranges};
use thiserror::Error;

use crate::bench::{self, BenchError};
use crate::config::{DEFAULT_PMI_FLOOR_US, ExitStatus, UserError};
use crate::cpuid::{CpuidError, host_vendor};
use crate::devices::GuestEnd;
use crate::doctor::{self, Refusal};
use crate::host::CpuFacts;
use crate::kvm::{Host, HostError, VmOptions};
use crate::micro::{MicroError, MicroRunError, Solo, SoloParts};
use crate::probe::ProbeReport;
use crate::vcpu::VcpuEnd;

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
    /// The host's processor is of no known vendor.
    #[error(transparent)]
    Vendor(#[from] CpuidError),
    /// A PMU model is gone.
    #[error(transparent)]
    Model(#[from] pmu_virt::ModelError),
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
/// The host failed in the middle, or standard output cannot be written to.
pub fn run(json: bool) -> Result<ExitStatus, UserError> {
    let out = &mut io::stdout().lock();
    let ready = doctor::open().and_then(|host| {
        let probe = doctor::check(&host)?;
        Ok((host, probe))
    });
    match ready {
        Ok((host, probe)) => {
            let report = perform(&host, &probe)
                .map_err(|error| UserError::with_status(error, ExitStatus::HOST_FAILURE))?;
            write_report(&report, json, out).map_err(UserError::unwritable)?;
            Ok(ExitStatus::SUCCESS)
        }
        Err(refusal) => {
            decline(&refusal, json, out).map_err(UserError::unwritable)?;
            Ok(ExitStatus::BAD_INPUT)
        }
    }
}

/// Says why there is nothing to show.
fn decline(refusal: &Refusal, json: bool, out: &mut dyn Write) -> io::Result<()> {
    const ELSEWHERE: &str = "cargo l1 -- target/release/umpire demo";
    if json {
        let refused = serde_json::json!({
            "shown": false,
            "reason": refusal.to_string(),
            "next": ELSEWHERE,
        });
        writeln!(out, "{refused:#}")?;
    } else {
        writeln!(
            out,
            "No guest ran and nothing was counted: {refusal}.\n\
             `umpire doctor` tells more. The demo also runs in a machine with its own KVM:\n  \
             {ELSEWHERE}"
        )?;
    }
    out.flush()
}

/// Runs the guest and gathers what happened.
///
/// # Errors
/// The guest could not be run, or went astray.
pub fn perform(host: &Host, probe: &ProbeReport) -> Result<DemoReport, DemoError> {
    let vendor = host_vendor(host.supported_cpuid()?.as_slice())?;
    let model = model_for(vendor)?;
    let options = VmOptions {
        irqchip: true,
        trapped_msrs: all_pmu_msr_ranges(),
    };
    let (vm, vcpus) = guest::guest(&model)?.build(host, &options)?;
    let kvm = vcpus
        .into_iter()
        .next()
        .ok_or_else(|| DemoError::Guest("it has no vCPU".to_owned()))?;
    let record = Arc::new(record::Record::new(kvm.id()));
    let parts = SoloParts {
        model: model.clone(),
        backend: Box::new(ClockBackend::new()),
        quirks: probe.quirks(),
        step: probe.step_support(),
        pmi_floor_us: u32::try_from(DEFAULT_PMI_FLOOR_US).unwrap_or(u32::MAX),
        platform: record.clone(),
        observer: Box::new(record::Witness(record.clone())),
    };
    let mut solo = Solo::new(kvm, vm, parts)?;
    record.start();
    match solo.run(PATIENCE)? {
        Some(VcpuEnd::Guest(GuestEnd::TestExit(0))) => {}
        Some(end) => return Err(DemoError::Guest(end.to_string())),
        None => {
            let limit = PATIENCE.as_secs();
            return Err(DemoError::Guest(format!("it did not end within {limit} s")));
        }
    }
    let (pmis, late_pmis) = solo.pmis();
    Ok(DemoReport {
        shown: true,
        processor: CpuFacts::read(Path::new("/")).model_name,
        slow_cpl0: probe.slow_cpl0(),
        model: model.name(),
        backend: "clock",
        tsc_khz: solo.tsc_khz(),
        rows: record::describe(&record.happenings(), &model, &ClockBackend::new()),
        counters: solo.counters().iter().map(CounterRow::describe).collect(),
        pmis,
        late_pmis,
        round_trips: bench::measure(host, probe, ROUND_TRIPS)?,
    })
}

/// The simplest model of the vendor that has an overflow status register.
fn model_for(vendor: Vendor) -> Result<PmuModel, pmu_virt::ModelError> {
    PmuModel::parse(match vendor {
        Vendor::Intel => "intel-v2",
        Vendor::Amd => "amd-perfmonv2",
    })
}
