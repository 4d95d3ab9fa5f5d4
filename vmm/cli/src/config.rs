//! The configuration of one run: flags over a TOML file over defaults, checked.
//!
//! [`load`] either gives a configuration in which every value is possible and
//! every file can be opened, or one [`ConfigError`].

mod error;
mod file;
mod merge;
mod policy;
mod values;

#[cfg(test)]
mod tests;

pub use error::{ConfigError, Origin, Place, SettingError};
pub(crate) use file::{describe, position};
pub use policy::PolicyTextError;

use std::ops::RangeInclusive;
use std::path::PathBuf;

use pmu_virt::perfmon::MAX_CONTEXTS;
use umpire_tools::stat::spec::EventList;
use vmm::config::RunConfig;
use vmm::cpuid::MAX_CPUS;

use crate::flags::RunFlags;
use crate::lease::ArbiterChoice;
use crate::logging::LogOptions;
use file::ConfigFile;
use merge::Merge;

/// The range of `--memory` in MiB: the least that a kernel can start with, and
/// one TiB.
pub const MEMORY_MIB: RangeInclusive<u64> = 16..=1024 * 1024;
/// The range of `--pmi-floor` in microseconds.
pub const PMI_FLOOR_US: RangeInclusive<u64> = 1..=1_000_000;
/// The range of `--grace` in milliseconds.
pub const GRACE_MS: RangeInclusive<u64> = 1..=60_000;
/// Milliseconds of `--firmware-delay`.
pub const FIRMWARE_DELAY_MS: RangeInclusive<u64> = 0..=60_000;
/// The range of `--timeout` in seconds; the upper end is some 11 days.
pub const TIMEOUT_S: RangeInclusive<u64> = 0..=1_000_000;

/// The range of `--control-connections`.
const CONNECTIONS: RangeInclusive<u64> = 1..=4096;
/// The range of `--control-group`; the last number means "no group".
const GROUPS: RangeInclusive<u64> = 0..=u32::MAX as u64 - 1;
/// The range of `--control-buffers` in KiB: a page to one TiB.
const BUFFERS_KIB: RangeInclusive<u64> = 4..=1 << 30;
/// The range of `--sampling-rate-max`.
const RATES: RangeInclusive<u64> = 1..=10_000_000;
/// The range of `--contexts-per-vcpu`.
const CONTEXTS: RangeInclusive<u64> = 1..=MAX_CONTEXTS as u64;
/// The range of `--seed`: what a number of TOML can be.
const SEEDS: RangeInclusive<u64> = 0..=i64::MAX as u64;
/// The range of `--slice` in milliseconds.
pub const SLICE_MS: RangeInclusive<u64> = 1..=1000;

/// The defaults.
pub const DEFAULT_MEMORY_MIB: u64 = 512;
/// One vCPU.
pub const DEFAULT_CPUS: u8 = 1;
/// Milliseconds that a vCPU runs while others wait for its core.
pub const DEFAULT_SLICE_MS: u64 = 5;
/// Everything that was set for a run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The machine and how it runs.
    pub run: RunConfig,
    /// Whom it asks for physical counters.
    pub arbiter: ArbiterChoice,
    /// What counts from the guest's first instruction on.
    pub tools: StartTools,
    pub log: LogOptions,
}

/// Tools that `umpire run` starts itself, before the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StartTools {
    /// What is counted; an empty list: the usual events.
    pub stat: Option<Vec<EventList>>,
    /// Where samples of the cycles go.
    pub record: Option<PathBuf>,
    /// The guest waits for somebody else as well.
    pub paused: bool,
}

impl StartTools {
    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        usize::from(self.stat.is_some()) + usize::from(self.record.is_some())
    }
}

/// Merges flags with the file they name and checks the result. A flag wins over
/// the file; a repeatable flag replaces the file's whole list.
///
/// # Errors
/// The first thing that is wrong, in the order of the options' help.
pub fn load(flags: &RunFlags) -> Result<Settings, ConfigError> {
    let file = match &flags.config {
        Some(path) => ConfigFile::read(path)?,
        None => ConfigFile::default(),
    };
    let sockets = umpire_tools::find::socket_folder();
    let merge = Merge {
        flags,
        file,
        sockets,
    };
    merge.into_settings()
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

/// What such texts change of the policy of a VM that runs; what they do not name stays.
///
/// # Errors
/// One cannot be used.
pub fn parse_policy_changes(
    texts: &[String],
) -> Result<Vec<umpire_tools::pcr::ShareChange>, PolicyTextError> {
    policy::changes(texts)
}
