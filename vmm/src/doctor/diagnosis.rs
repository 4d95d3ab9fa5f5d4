//! The report as data.

use serde::Serialize;

use super::models::{self, ModelFinding};
use super::sources::{self, BackendFinding};
use super::{Refusal, open};
use crate::config::Engine;
use crate::counters::auto_names;
use crate::host::HostFacts;
use crate::kvm::{Host, KvmFeatures};
use crate::probe::{ProbeReport, probe};

/// Everything that the report says. Its JSON form keeps these names.
#[derive(Clone, Debug, Serialize)]
pub struct Diagnosis {
    /// Version of this program.
    pub umpire: &'static str,
    /// The conclusion, for KVM.
    pub verdict: Verdict,
    /// What can run guests here, as in `--engine`.
    pub engines: Vec<EngineFinding>,
    /// What was found out without starting a guest.
    pub host: HostFacts,
    /// What KVM says and does; none where it cannot be opened.
    pub kvm: Option<Kvm>,
    /// What `--counters auto` stands for here, in order of preference: `emu` where no guest
    /// can run on KVM.
    pub auto_counters: Vec<&'static str>,
    /// The counter backends.
    pub backends: Vec<BackendFinding>,
}

/// Whether a guest with a virtual PMU can run on KVM here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    pub can_run: bool,
    /// Why not, and what to do; none if it can.
    pub reason: Option<String>,
}

/// One of the words of `--engine`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EngineFinding {
    /// `kvm` or `emu`.
    pub name: String,
    /// A guest with a virtual PMU can run on it here.
    pub usable: bool,
    /// Why not; none if it can.
    pub reason: Option<String>,
}

/// An open KVM.
#[derive(Clone, Debug, Serialize)]
pub struct Kvm {
    /// Its capabilities.
    pub features: KvmFeatures,
    /// What the probe guests found; none where they could not run.
    pub probe: Option<ProbeReport>,
    /// Guest CPL 0 runs in KVM's instruction emulator; none without a probe.
    pub slow_cpl0: Option<bool>,
    /// The PMU models, and whether KVM takes the CPUID that announces them.
    pub models: Vec<ModelFinding>,
}

impl Diagnosis {
    /// Looks at the running system; takes some ten milliseconds.
    pub fn gather() -> Self {
        let facts = HostFacts::gather();
        match open() {
            Ok(host) => Self::of_host(facts, &host),
            Err(refusal) => Self::without_kvm(facts, &refusal),
        }
    }

    /// The report where KVM cannot be opened.
    pub fn without_kvm(host: HostFacts, refusal: &Refusal) -> Self {
        Self::assemble(host, None, Err(refusal.to_string()))
    }

    fn of_host(facts: HostFacts, host: &Host) -> Self {
        let required = host.require_all().map_err(Refusal::from);
        // Probe guests need no irqchip, so they may tell more about a KVM that
        // lacks something.
        let probed = probe().map_err(Refusal::from);
        let probe = probed.as_ref().ok().copied();
        let verdict = required
            .and(probed)
            .map_err(|refusal| refusal.to_string())
            .and_then(|probe| probe.check().map_err(|refusal| refusal.to_string()));
        let kvm = Kvm {
            features: *host.features(),
            probe,
            slow_cpl0: probe.map(|probe| probe.slow_cpl0()),
            models: models::find(host, probe.is_some_and(|probe| probe.slow_cpl0())),
        };
        Self::assemble(facts, Some(kvm), verdict)
    }

    /// Puts the parts together: `verdict` is the reason against a guest, if any.
    pub fn assemble(host: HostFacts, kvm: Option<Kvm>, verdict: Result<(), String>) -> Self {
        let probe = kvm.as_ref().and_then(|kvm| kvm.probe);
        let reason = verdict.err();
        Self {
            umpire: env!("CARGO_PKG_VERSION"),
            auto_counters: match reason {
                None => auto_names(),
                Some(_) => vec!["emu"],
            },
            engines: [(Engine::Kvm, reason.clone()), (Engine::Emu, None)]
                .map(|(engine, reason)| EngineFinding {
                    name: engine.to_string(),
                    usable: reason.is_none(),
                    reason,
                })
                .into(),
            backends: sources::find(probe.as_ref(), reason.as_deref()),
            verdict: Verdict {
                can_run: reason.is_none(),
                reason,
            },
            host,
            kvm,
        }
    }
}
