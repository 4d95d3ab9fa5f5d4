//! Which counter backends can be used here.

use serde::Serialize;

use crate::probe::{GuestStep, ProbeReport};
use crate::sys::allowed_cpus;

/// One counter backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BackendFinding {
    /// Its name, as in `--counters`.
    pub name: &'static str,
    /// What it counts.
    pub summary: &'static str,
    /// It can be used on this host.
    pub usable: bool,
    /// Why not; none if it can be used.
    pub reason: Option<String>,
    /// What it cannot do on this host.
    pub limits: Vec<String>,
}

/// Every backend but `auto`, which is no source of its own. `refusal` says why no
/// guest can run on KVM here, if so.
pub(super) fn find(probe: Option<&ProbeReport>, refusal: Option<&str>) -> Vec<BackendFinding> {
    pmu_virt::backend_names()
        .iter()
        .filter(|backend| backend.name != "auto")
        .map(|backend| {
            let (reason, limits) = match (refusal, probe) {
                // They need no KVM.
                _ if backend.name == "emu" => (None, Vec::new()),
                (Some(_), _) if backend.name == "sim" => {
                    (None, vec!["with --engine emu alone here".to_owned()])
                }
                (Some(refusal), _) => (Some(refusal.to_owned()), Vec::new()),
                (None, None) => (Some("the host was not probed".to_owned()), Vec::new()),
                (None, Some(probe)) => by_name(backend.name, probe),
            };
            BackendFinding {
                name: backend.name,
                summary: backend.summary,
                usable: reason.is_none(),
                reason,
                limits,
            }
        })
        .collect()
}

/// Why the backend cannot be used, and what it cannot do.
pub(super) fn by_name(name: &str, probe: &ProbeReport) -> (Option<String>, Vec<String>) {
    match name {
        "step" => {
            let (reason, limits) = step(probe);
            let limits = limits.into_iter().map(str::to_owned).collect();
            (reason.map(str::to_owned), limits)
        }
        "perf" => {
            let support = pmu_virt::perf::probe();
            (support.refusal(), support.limits())
        }
        "msr" => match pmu_virt::msr::probe(first_cpu()) {
            Ok(report) => (None, vec![report.to_string()]),
            Err(refusal) => (Some(refusal.to_string()), Vec::new()),
        },
        _ => (None, Vec::new()),
    }
}

/// The CPU whose registers stand for all.
fn first_cpu() -> u32 {
    let cpus = allowed_cpus().unwrap_or_default();
    let first = cpus.first().copied().unwrap_or_default();
    u32::try_from(first).unwrap_or_default()
}

/// What the `step` backend meets here.
fn step(probe: &ProbeReport) -> (Option<&'static str>, Vec<&'static str>) {
    if !probe.step_cpl0 {
        let reason = "single steps do not stop the guest at CPL 0 on this KVM";
        return (Some(reason), Vec::new());
    }
    let support = probe.step_support();
    let mut limits = Vec::new();
    if !support.user {
        limits.push(
            "CPL 0 only: steps or breakpoints do not work at CPL 3 on this KVM; a counter for \
             CPL 3 alone is unavailable, one for both rings loses the label `exact` once the \
             guest runs a program",
        );
    }
    if !support.hold_irqs {
        limits.push(
            "KVM cannot hold interrupts back during a step (KVM_GUESTDBG_BLOCKIRQ, Linux 5.14): \
             counts are not `exact` where the guest runs with interrupts on",
        );
    }
    if probe.guest_step_beside_ours == GuestStep::Lost {
        limits.push(
            "a guest that single-steps its own programs loses those steps beside a breakpoint of \
             Umpire's",
        );
    }
    (None, limits)
}
