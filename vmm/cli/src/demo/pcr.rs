//! `umpire demo pcr`: the scenario of the counter reservations in one run of one
//! guest that is firmware, kernel, rogue driver and user program in turn.
//!
//! Nothing is printed that did not happen: what a step came to is what the
//! guest itself reported, the rest is what the arbiter recorded meanwhile.

mod guest;
mod report;
mod scenario;
#[cfg(test)]
mod tests;
mod transcript;

pub(super) use report::write_report;
use std::sync::Arc;

use arbiter::{CounterId, GuardLimits, PcrConfig, PcrUnit, PerKind, Phase, Policy, Scheme, Share};
use pmu_virt::{CounterReport, Holdings, PmuModel, Reading, Reservations, Sources};
use vmm::config::DEFAULT_PMI_FLOOR_US;
use vmm::counters::{self, CounterPlan, backend_env};
use vmm::devices::GuestEnd;
use vmm::entropy::OsRandom;
use vmm::kvm::{Host, VmOptions};
use vmm::micro::{Solo, SoloParts};
use vmm::probe::ProbeReport;
use vmm::vcpu::{Silent, TrapMode, VcpuEnd};

use super::{DemoError, PATIENCE};
use report::{OwnerRow, PcrReport};
use transcript::{Recorder, Transcript};

/// Plays the scenario with `model`, or one of the host's vendor.
///
/// # Errors
/// The guest could not be run, or went astray.
pub(super) fn perform(
    host: &Host,
    probe: &ProbeReport,
    model: &PmuModel,
) -> Result<PcrReport, DemoError> {
    let sources = Sources::auto();
    let acts = scenario::acts(model);
    let options = VmOptions::with_pmu(Some(model)).trapping(probe.trap_plan(TrapMode::Auto));
    let (vm, vcpus) = guest::guest(&acts)?.build(host, &options)?;
    let kvm = vcpus
        .into_iter()
        .next()
        .ok_or_else(|| DemoError::Guest("it has no vCPU".to_owned()))?;
    let tsc_khz = kvm.get_tsc_khz()?;
    let env = backend_env(tsc_khz, counters::host_vendor(), probe.step_support());
    let counters = CounterPlan::prepare(&sources, env, 1, None)?;
    let transcript = Arc::new(Transcript::new());
    let parts = SoloParts {
        model: model.clone(),
        backend: counters.open()?,
        quirks: probe.quirks(),
        step: probe.step_support(),
        pmi_floor_us: DEFAULT_PMI_FLOOR_US,
        platform: transcript.clone(),
        observer: Box::new(Silent),
        reservations: Some(Reservations {
            unit: PcrUnit::new(config(model, tsc_khz)),
            entropy: Box::new(OsRandom),
            audit: Box::new(Recorder(transcript.clone())),
            holdings: Holdings::default(),
        }),
    };
    let mut solo = Solo::new(kvm, vm, parts)?;
    match solo.run(PATIENCE)? {
        Some(VcpuEnd::Guest(GuestEnd::TestExit(0))) => {}
        Some(end) => return Err(DemoError::Guest(end.to_string())),
        None => {
            let limit = PATIENCE.as_secs();
            return Err(DemoError::Guest(format!("it did not end within {limit} s")));
        }
    }
    let counts = solo.counters();
    let unit = solo
        .reservations()
        .ok_or_else(|| DemoError::Guest("it has lost its reservations".to_owned()))?;
    Ok(PcrReport {
        shown: true,
        model: model.name(),
        backend: sources.to_string(),
        acts: report::acts(&acts, &transcript.played()),
        ownership: ownership(unit, model, &counts),
        wrong_cookies: unit.wrong_cookies(),
    })
}

/// The model to play with: the user's, or one of the host's vendor.
///
/// # Errors
/// There is no such model, or it has too few counters for the scenario.
pub(super) fn model(asked: Option<&str>) -> Result<PmuModel, ScenarioError> {
    let model = match asked {
        Some(text) => PmuModel::parse(text)?,
        None => super::plan::model_for(super::host_vendor())?,
    };
    match model.programmable() {
        0..LEAST_COUNTERS => Err(ScenarioError::TooFew {
            model: model.name(),
            there: model.programmable(),
        }),
        _ => Ok(model),
    }
}

/// Two for the firmware, one for the kernel, one that is free.
const LEAST_COUNTERS: u8 = 4;

/// The scenario cannot be played.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScenarioError {
    /// The model's text.
    #[error("--pmu: {0}")]
    Model(#[from] pmu_virt::ModelError),
    /// It has too few counters.
    #[error(
        "--pmu {model}: it has {there} programmable counters here, and the scenario needs \
         {LEAST_COUNTERS}; leave --pmu out, or give more"
    )]
    TooFew {
        model: &'static str,
        /// Its programmable counters.
        there: u8,
    },
}

/// The firmware may have two counters, and the kernel is more important.
fn config(model: &PmuModel, tsc_khz: u32) -> PcrConfig {
    let ticks_per_ms = u64::from(tsc_khz);
    let firmware = Share {
        max: PerKind {
            programmable: scenario::FIRMWARE_COUNTERS,
            fixed: 0,
        },
        ..Share::FREE
    };
    let kernel = Share {
        min: PerKind {
            programmable: 1,
            fixed: 0,
        },
        priority: 1,
        ..Share::FREE
    };
    PcrConfig {
        counters: PerKind {
            programmable: model.programmable(),
            fixed: model.fixed(),
        },
        widths: PerKind {
            programmable: model.width(),
            fixed: model.fixed_width(),
        },
        policy: Policy {
            firmware,
            hypervisor: Share::FREE,
            kernel,
            grace_ms: scenario::GRACE_MS,
        },
        scheme: Scheme::Interacting,
        guard: GuardLimits::with_ticks_per_ms(ticks_per_ms),
        ticks_per_ms,
        phase: Arc::new(Phase::new(true)),
        legacy: None,
        smm: false,
    }
}

fn ownership(unit: &PcrUnit, model: &PmuModel, counts: &[CounterReport]) -> Vec<OwnerRow> {
    let row = |counter: CounterId| {
        let reservation = unit.bank().reservation(counter);
        let count = counts.iter().find(|report| report.counter == counter);
        OwnerRow {
            counter: counter.to_string(),
            owner: reservation.map(|held| held.owner.to_string()),
            access: match reservation {
                Some(held) if held.is_private() => "with a cookie",
                _ => "everybody",
            },
            others: match reservation {
                Some(held) if !held.is_private() => "-",
                Some(held) if held.control.bits() & arbiter::abi::CONTROL_FAULT != 0 => "fault",
                Some(_) => "dropped",
                None => "-",
            },
            event: count.map(|report| report.event.event.to_string()),
            count: match count.map(|report| report.reading) {
                Some(Reading::Counted { value, .. }) => value.to_string(),
                Some(Reading::Unavailable(_)) => "<not supported>".to_owned(),
                None => "<not counted>".to_owned(),
            },
        }
    };
    model.counters().map(row).collect()
}
