//! Options whose values are words.

use std::path::PathBuf;

use kvm_pmu::TrapMode;
use pmu_virt::{ModelError, PmuModel};

use crate::firmware::{CounterSpec, FirmwareChoice};

/// A module that a Multiboot kernel gets beside itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootModule {
    /// The file.
    pub path: PathBuf,
    /// The words after the file's name; empty without any.
    pub cmdline: String,
}

impl BootModule {
    /// `FILE` or `FILE,WORDS`; none if there is no file name.
    pub fn parse(text: &str) -> Option<Self> {
        let (path, cmdline) = text.split_once(',').unwrap_or((text, ""));
        (!path.is_empty()).then(|| Self {
            path: path.into(),
            cmdline: cmdline.to_owned(),
        })
    }
}

/// `--firmware` and `--firmware-counter`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FirmwareConfig {
    /// What runs before the kernel.
    pub image: FirmwareChoice,
    /// The counters that it reserves; none without firmware.
    pub counters: Vec<CounterSpec>,
}

/// `--pmu`.
#[derive(Clone, Debug, Default)]
pub enum PmuChoice {
    /// No PMU: CPUID and the MSRs of both vendors show none.
    None,
    /// The best model for the guest CPU's vendor.
    #[default]
    Auto,
    /// This model.
    Model(PmuModel),
}

impl PmuChoice {
    /// `none`, `auto`, or a model by name with its properties.
    ///
    /// # Errors
    /// There is no such model, or it cannot have these properties.
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        match text {
            "none" => Ok(Self::None),
            "auto" => Ok(Self::Auto),
            model => PmuModel::parse(model).map(Self::Model),
        }
    }
}

/// `--cpu-vendor`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuVendor {
    /// The host's.
    #[default]
    Host,
    /// AMD.
    Amd,
    /// Intel.
    Intel,
}

impl CpuVendor {
    /// The possible words.
    pub const ALLOWED: &'static str = "host, amd or intel";

    /// What a word stands for.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "host" => Some(Self::Host),
            "amd" => Some(Self::Amd),
            "intel" => Some(Self::Intel),
            _ => None,
        }
    }
}

/// `--unpack`: whether a compressed kernel is unpacked before the guest starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnpackChoice {
    /// Where the guest would be slow at it.
    #[default]
    Auto,
    /// On the host.
    Always,
    /// By the kernel's own code, in the guest.
    Never,
}

impl UnpackChoice {
    /// The possible words.
    pub const ALLOWED: &'static str = "auto, always or never";

    /// What a word stands for.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Auto),
            "always" => Some(Self::Always),
            "never" => Some(Self::Never),
            _ => None,
        }
    }
}

/// `--oversubscribe`: what happens where a vCPU wants more counters than its
/// core has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OversubscribeChoice {
    /// They take turns, and counts are scaled and labelled so.
    #[default]
    Multiplex,
    /// The ones that find no place stay frozen, and reports call them unavailable.
    Refuse,
}

impl OversubscribeChoice {
    /// The possible words.
    pub const ALLOWED: &'static str = "multiplex or refuse";

    /// What a word stands for.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "multiplex" => Some(Self::Multiplex),
            "refuse" => Some(Self::Refuse),
            _ => None,
        }
    }
}

/// The words of `--rdpmc-trap`.
pub const TRAP_MODES: &str = "auto, patch, breakpoint or none";

/// What one of them stands for.
#[must_use]
pub fn trap_mode(text: &str) -> Option<TrapMode> {
    match text {
        "auto" => Some(TrapMode::Auto),
        "patch" => Some(TrapMode::Patch),
        "breakpoint" => Some(TrapMode::Breakpoint),
        "none" => Some(TrapMode::None),
        _ => None,
    }
}
