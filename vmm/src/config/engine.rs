//! Which engine runs a guest, and what only one of them has.

use std::fmt;

use kvm_pmu::TrapMode;
use pmu_virt::{Source, Vendor};
use thiserror::Error;

use super::{CpuVendor, PmuChoice, RunConfig};
use crate::firmware::FirmwareChoice;

/// `--engine`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// KVM where it can be used, else the processor in software.
    #[default]
    Auto,
    /// This one.
    Only(Engine),
}

/// What runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The host's processor, by KVM.
    Kvm,
    /// A processor in software.
    Emu,
}

impl EngineChoice {
    /// The possible words.
    pub const ALLOWED: &'static str = "auto, kvm or emu";

    /// What a word stands for.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Auto),
            "kvm" => Some(Self::Only(Engine::Kvm)),
            "emu" => Some(Self::Only(Engine::Emu)),
            _ => None,
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Emu => "emu",
        })
    }
}

/// `--cycles`: what core cycles are on the processor in software, which has no clock of its
/// own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CyclesChoice {
    /// Nobody counts them.
    #[default]
    None,
    /// Ticks of virtual time, labelled so.
    Simulated,
}

impl CyclesChoice {
    /// The possible words.
    pub const ALLOWED: &'static str = "none or simulated";

    /// What a word stands for.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "none" => Some(Self::None),
            "simulated" => Some(Self::Simulated),
            _ => None,
        }
    }
}

/// `--engine`, and what belongs to the processor in software.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineConfig {
    /// What runs the guest.
    pub choice: EngineChoice,
    /// What core cycles are.
    pub cycles: CyclesChoice,
    /// Where all random numbers and the clock of day come from; none: from the system.
    pub seed: Option<u64>,
    /// Whether virtual time follows the host's clock; none: where somebody waits for it.
    pub real_time: Option<bool>,
}

/// Something was asked for that the engine has not.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{what}: {why}; leave it out, or give --engine {engine}")]
pub struct ForeignOption {
    /// The engine that has it.
    pub engine: Engine,
    /// The option, as it was given.
    pub what: String,
    /// Why the other one has it not.
    pub why: &'static str,
}

/// What was asked for that `engine` has not, if anything was.
pub(super) fn foreign(config: &RunConfig, engine: Engine) -> Option<ForeignOption> {
    match engine {
        Engine::Kvm => only_emu(config),
        Engine::Emu => only_kvm(config),
    }
}

/// What was asked for that only KVM has.
fn only_kvm(config: &RunConfig) -> Option<ForeignOption> {
    let kvm = |what: String, why| {
        Some(ForeignOption {
            engine: Engine::Kvm,
            what,
            why,
        })
    };
    let hosts = |source: &&Source| {
        matches!(
            source,
            Source::Perf | Source::Clock | Source::Step | Source::Msr { .. }
        )
    };
    if let Some(source) = config.counters.iter().find(hosts) {
        let why = "the engine emu counts each instruction itself, and what the host's \
                       processor counts is not the guest's";
        return kvm(format!("--counters {}", source.name()), why);
    }
    if config.rdpmc_trap != TrapMode::Auto {
        let why = "the engine emu executes RDPMC itself and traps nothing";
        return kvm("--rdpmc-trap".to_owned(), why);
    }
    if let Some(plan) = config.cores {
        let why = "on the engine emu all vCPUs take turns on one thread, and each has the \
                       counters of a core of its own";
        return kvm(format!("--cores {}", plan.cores), why);
    }
    if config.firmware.image != FirmwareChoice::None {
        let why = "the engine emu has no system management mode, which firmware lives in";
        return kvm("--firmware".to_owned(), why);
    }
    None
}

/// What was asked for that only the processor in software has.
fn only_emu(config: &RunConfig) -> Option<ForeignOption> {
    let EngineConfig {
        cycles,
        seed,
        real_time,
        ..
    } = config.engine;
    let given = [
        (
            config.counters.iter().any(|source| *source == Source::Emu),
            "--counters emu",
            "it counts what the engine emu executes",
        ),
        (
            cycles == CyclesChoice::Simulated,
            "--cycles simulated",
            "on KVM cycles are counted or not, and never simulated",
        ),
        (
            seed.is_some(),
            "--seed",
            "a guest on KVM runs on real time, and no two runs are equal",
        ),
        (
            real_time.is_some(),
            "--real-time",
            "a guest on KVM always runs on real time",
        ),
    ];
    let (_, what, why) = given.into_iter().find(|(is, ..)| *is)?;
    Some(ForeignOption {
        engine: Engine::Emu,
        what: what.to_owned(),
        why,
    })
}

/// The vendor that stands for `--cpu-vendor host` where no host's processor runs the guest:
/// that of the processor or the PMU that was asked for, else Intel, whose CPUID can say that
/// cycles are not counted.
pub(super) fn vendor_without_host(config: &RunConfig) -> Vendor {
    match (config.cpu_vendor, config.cpu_model, &config.pmu) {
        (CpuVendor::Amd, ..) => Vendor::Amd,
        (CpuVendor::Intel, ..) => Vendor::Intel,
        (CpuVendor::Host, Some(identity), _) => identity.vendor(),
        (CpuVendor::Host, None, PmuChoice::Model(model)) => model.vendor(),
        (CpuVendor::Host, None, _) => Vendor::Intel,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!(EngineChoice::parse("auto"), Some(EngineChoice::Auto));
        for engine in [Engine::Kvm, Engine::Emu] {
            let word = engine.to_string();
            assert_eq!(EngineChoice::parse(&word), Some(EngineChoice::Only(engine)));
        }
        assert_eq!(EngineChoice::parse("qemu"), None);
        assert_eq!(
            CyclesChoice::parse("simulated"),
            Some(CyclesChoice::Simulated)
        );
        assert_eq!(CyclesChoice::parse("real"), None);
    }
}
