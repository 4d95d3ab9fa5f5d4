//! The configuration of one run: flags over a TOML file over defaults, checked.
//!
//! [`RunConfig::load`] either gives a configuration in which every value is
//! possible and every file can be opened, or one [`ConfigError`]. Nothing of KVM
//! is known here; what depends on the host's CPU is decided by
//! [`RunConfig::guest_cpu`].

mod choices;
mod error;
mod exit;
mod file;
mod merge;
mod policy;
mod reservations;

#[cfg(test)]
mod tests;

pub use choices::{BootModule, CpuVendor, FirmwareConfig, OversubscribeChoice, PmuChoice, Unpack};
pub use error::{ConfigError, Origin, Place};
pub(crate) use exit::one_line;
pub use exit::{ExitStatus, UserError};
pub(crate) use merge::no_file;
pub use policy::PolicyTextError;
pub use reservations::{FollowsGrants, HypervisorCounters, PcrChoice, PcrPlan, PcrPlanError};

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use pmu_virt::{PmuModel, Sources, Vendor};

use crate::cli::RunFlags;
use crate::cores::{CorePlan, CpuList};
use crate::cpuid::{Feature, MAX_CPUS};
use crate::perfmon::ControlConfig;
use file::ConfigFile;
use merge::Merge;

/// The range of `--memory` in MiB: the least that a kernel can start with, and
/// one TiB.
pub const MEMORY_MIB: RangeInclusive<u64> = 16..=1024 * 1024;
/// The range of `--pmi-floor` in microseconds.
pub const PMI_FLOOR_US: RangeInclusive<u64> = 1..=1_000_000;
/// The range of `--grace` in milliseconds.
pub const GRACE_MS: RangeInclusive<u64> = 1..=60_000;
/// The range of `--timeout` in seconds; the upper end is some 11 days.
pub const TIMEOUT_S: RangeInclusive<u64> = 0..=1_000_000;

/// The range of `--slice` in milliseconds.
pub const SLICE_MS: RangeInclusive<u64> = 1..=1000;

/// The defaults.
pub const DEFAULT_MEMORY_MIB: u64 = 512;
/// One vCPU.
pub const DEFAULT_CPUS: u8 = 1;
/// Milliseconds that a vCPU runs while others wait for its core.
pub const DEFAULT_SLICE_MS: u64 = 5;
/// Below some 20 µs a guest makes no progress beside its own interrupts.
pub const DEFAULT_PMI_FLOOR_US: u64 = 100;

/// A checked configuration of `umpire run`.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// The kernel: an ELF file, a bzImage or a Multiboot kernel.
    pub kernel: PathBuf,
    /// The initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line; without one the boot protocol's default holds.
    pub cmdline: Option<String>,
    /// Multiboot modules, in order.
    pub modules: Vec<BootModule>,
    /// Guest memory in MiB.
    pub memory_mib: u64,
    /// Number of vCPUs, 1 to [`MAX_CPUS`].
    pub cpus: u8,
    /// vCPUs that share threads; without it every vCPU has its own.
    pub cores: Option<CorePlan>,
    /// Host CPUs for the threads that run vCPUs.
    pub pin: Option<CpuList>,
    /// The virtual PMU.
    pub pmu: PmuChoice,
    /// Where counts come from.
    pub counters: Sources,
    /// What happens where there are too few of them.
    pub oversubscribe: OversubscribeChoice,
    /// The CPU vendor that the guest sees.
    pub cpu_vendor: CpuVendor,
    /// CPU features to hide.
    pub hidden_features: Vec<Feature>,
    /// Whether a compressed kernel is unpacked on the host.
    pub unpack: Unpack,
    /// The least time between two PMIs of one vCPU.
    pub pmi_floor: Duration,
    /// Counter reservations for guests; `None`: there are none.
    pub pcr: Option<PcrChoice>,
    /// Where every decision about counters is written.
    pub audit: Option<PathBuf>,
    /// When to stop the guest.
    pub timeout: Option<Duration>,
    /// What runs before the kernel.
    pub firmware: FirmwareConfig,
    /// Where the PMU state goes at the end.
    pub save_on_exit: Option<PathBuf>,
    /// The PMU state to start with.
    pub restore: Option<PathBuf>,
    /// How host tools are served; `None`: they are not.
    pub control: Option<ControlConfig>,
    /// 0: warnings, 1: information, 2: debugging, 3: everything.
    pub verbose: u8,
    /// Where log lines go instead of standard error.
    pub log_file: Option<PathBuf>,
}

/// The guest's CPU vendor and PMU model, decided.
#[derive(Clone, Debug)]
pub struct GuestCpu {
    /// The vendor that CPUID names.
    pub vendor: Vendor,
    /// The virtual PMU; none under `--pmu none`.
    pub pmu: Option<PmuModel>,
}

impl RunConfig {
    /// Merges flags with the file they name and checks the result. A flag wins
    /// over the file; a repeatable flag replaces the file's whole list.
    ///
    /// # Errors
    /// The first thing that is wrong, in the order of the options' help.
    pub fn load(flags: &RunFlags) -> Result<Self, ConfigError> {
        let file = match &flags.config {
            Some(path) => ConfigFile::read(path)?,
            None => ConfigFile::default(),
        };
        Merge::new(file).into_config(flags)
    }

    /// Decides about the guest's CPU, given the host's vendor.
    ///
    /// # Errors
    /// The PMU model is not one of the guest CPU's vendor.
    pub fn guest_cpu(&self, host: Vendor) -> Result<GuestCpu, ConfigError> {
        let vendor = match self.cpu_vendor {
            CpuVendor::Host => host,
            CpuVendor::Amd => Vendor::Amd,
            CpuVendor::Intel => Vendor::Intel,
        };
        let pmu = match &self.pmu {
            PmuChoice::None => None,
            PmuChoice::Auto => Some(PmuModel::default_for(vendor)),
            PmuChoice::Model(model) if model.vendor() == vendor => Some(model.clone()),
            PmuChoice::Model(model) => {
                return Err(ConfigError::VendorMismatch {
                    model: model.name(),
                    pmu: model.vendor(),
                    cpu: vendor,
                });
            }
        };
        Ok(GuestCpu { vendor, pmu })
    }
}

/// The range of `--cpus`.
const CPUS: RangeInclusive<u8> = 1..=MAX_CPUS;
/// The range of the configuration file's `verbose`.
const VERBOSITY: RangeInclusive<u8> = 0..=3;

/// The policy that values of `--policy` describe, each about one layer; what they
/// do not name is as by default.
///
/// # Errors
/// One cannot be used.
pub fn parse_policy(texts: &[String]) -> Result<arbiter::Policy, PolicyTextError> {
    policy::parse(texts)
}
