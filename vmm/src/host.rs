//! Facts about the host that can be read without starting a guest: the processor,
//! its PMU and who uses it, KVM's modules, and whether `/dev/kvm` can be opened.
//!
//! All files are read below a root folder that the caller gives, and the one
//! system call goes through [`PerfProbe`], so every finding can be tested. A fact
//! that cannot be found out is none or "unknown", never a default.

mod kvm;
mod pmu;
#[allow(unsafe_code)]
mod sys;

#[cfg(test)]
mod tests;

pub use kvm::{KvmAccess, KvmAccessError, KvmModule, NextStep};
pub use pmu::{CounterHolder, CounterHolders, HardwarePmu, HostPerf, PerfProbe};

use std::fs;
use std::path::Path;

use serde::Serialize;

/// What the host is like.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostFacts {
    pub cpu: CpuFacts,
    /// Whether `perf` can count hardware cycles.
    pub pmu: HardwarePmu,
    /// `/proc/sys/kernel/perf_event_paranoid`; none if the kernel has no perf.
    pub perf_event_paranoid: Option<i64>,
    /// Whether the NMI watchdog runs; none if the kernel has none.
    pub nmi_watchdog: Option<bool>,
    /// Who holds counters.
    pub counter_holders: CounterHolders,
    /// KVM's modules with the parameters that matter here.
    pub kvm_modules: Vec<KvmModule>,
    /// Whether `/dev/kvm` can be used.
    pub kvm: KvmAccess,
}

impl HostFacts {
    /// Gathers the facts of the running system.
    pub fn gather() -> Self {
        Self::gather_from(Path::new("/"), &HostPerf)
    }

    /// Gathers facts from the files below `root`.
    pub fn gather_from(root: &Path, perf: &dyn PerfProbe) -> Self {
        let cpu = CpuFacts::read(root);
        let pmu = HardwarePmu::find(root, perf);
        let nmi_watchdog = read_number(root, "proc/sys/kernel/nmi_watchdog").map(|n| n != 0);
        Self {
            perf_event_paranoid: read_number(root, "proc/sys/kernel/perf_event_paranoid"),
            nmi_watchdog,
            counter_holders: CounterHolders::find(root, &pmu, nmi_watchdog),
            kvm_modules: KvmModule::find(root),
            kvm: KvmAccess::check(root, &cpu),
            cpu,
            pmu,
        }
    }
}

/// What `/proc/cpuinfo` says about the first processor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CpuFacts {
    /// The vendor string, e.g. `AuthenticAMD`.
    pub vendor: Option<String>,
    /// The model's name.
    pub model_name: Option<String>,
    /// Family and model, extensions added.
    #[serde(skip)]
    pub signature: Option<(u32, u32)>,
    /// The processor has SVM or VMX.
    pub virtualisation: bool,
    /// The processor is a virtual one.
    pub is_virtual: bool,
}

impl CpuFacts {
    /// Reads `proc/cpuinfo` below `root`.
    pub fn read(root: &Path) -> Self {
        let text = read_text(root, "proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            text.lines()
                .filter_map(|line| line.split_once(':'))
                .find(|(key, _)| key.trim() == name)
                .map(|(_, value)| value.trim().to_owned())
        };
        let number = |name: &str| field(name)?.parse().ok();
        let flags = field("flags").unwrap_or_default();
        let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
        Self {
            vendor: field("vendor_id"),
            model_name: field("model name"),
            signature: number("cpu family").zip(number("model")),
            virtualisation: has("svm") || has("vmx"),
            is_virtual: has("hypervisor"),
        }
    }
}

/// The text of one of the kernel's files. What is not UTF-8 is replaced: a processor's name is
/// whatever its maker or a hypervisor has written there.
fn read_text(root: &Path, path: &str) -> Option<String> {
    let bytes = fs::read(root.join(path)).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn read_number(root: &Path, path: &str) -> Option<i64> {
    read_text(root, path)?.trim().parse().ok()
}
