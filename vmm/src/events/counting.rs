//! Who can count an event.

use pmu_virt::{CountRequest, CounterBackend, EventCode, Provenance, Sources};
use serde::Serialize;

use super::code;
use super::resolve::NamedRequest;
use crate::counters::{CounterPlan, backend_env, host_vendor};
use crate::vcpu::StepSupport;

/// A backend that can count an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BackendUse {
    /// The backend, as in `--counters`.
    pub backend: &'static str,
    /// How the count is obtained.
    pub provenance: String,
}

/// How a model counts an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Use {
    /// The raw code, as `--event` takes it; none for what no event select means.
    pub code: Option<String>,
    /// The fixed counter that counts it; none for a programmable one.
    pub fixed: Option<u8>,
    /// What the code means, where that is known.
    pub event: Option<String>,
    /// The backends that can count it.
    pub backends: Vec<BackendUse>,
}

impl Use {
    pub(super) fn of_request(request: &CountRequest) -> Self {
        Self::with_code(Some(code::printed(request)), request)
    }

    pub(super) fn of_named(named: &NamedRequest) -> Self {
        Self::with_code(Some(named.code), &named.request)
    }

    pub(super) fn without_code(request: &CountRequest) -> Self {
        Self::with_code(None, request)
    }

    fn with_code(code: Option<u64>, request: &CountRequest) -> Self {
        Self {
            code: code.map(|code| format!("r{code:x}")),
            fixed: match request.event {
                EventCode::Fixed(function) => Some(function.index()),
                _ => None,
            },
            event: request.event.known().map(|event| event.to_string()),
            backends: counters_of(request)
                .map(|(backend, provenance)| BackendUse {
                    backend,
                    provenance: provenance.to_string(),
                })
                .collect(),
        }
    }
}

/// The backends that can be made without anything but this host and that can
/// count `request`. The physical registers are not among them: looking at them
/// would mean to take them.
pub fn counters_of(request: &CountRequest) -> impl Iterator<Item = (&'static str, Provenance)> {
    let sources = ["clock", "step", "perf"];
    sources.into_iter().filter_map(|name| {
        let plan = plain(name)?.plan(request).ok()?;
        Some((name, plan.provenance))
    })
}

/// The backend called `name`, if it can be had. Whether it can count something
/// does not depend on the TSC's frequency. What KVM's single steps can do is not
/// looked for here: `umpire doctor` tells.
fn plain(name: &str) -> Option<Box<dyn CounterBackend>> {
    const ANY_KHZ: u32 = 1_000_000;
    let sources = Sources::parse(name).ok()?;
    let env = backend_env(ANY_KHZ, host_vendor(), StepSupport::FULL);
    CounterPlan::prepare(&sources, env, 1, None)
        .ok()?
        .open()
        .ok()
}
