//! What can be wrong with the configuration of a run.

use std::fmt;
use std::io;
use std::path::PathBuf;

use pmu_virt::{BackendError, ModelError};
use thiserror::Error;

use super::policy::PolicyTextError;
use vmm::cpuid::UnknownFeature;
use vmm::firmware::SpecError;
use vmm::sched::CpuListError;

/// The configuration cannot be used. Every variant prints as one line that says
/// where the value came from, what is wrong, and what would be right.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The configuration file cannot be read.
    #[error("configuration file {}: {}", path.display(), reason(cause))]
    ReadFile {
        /// The file.
        path: PathBuf,
        /// Why; in the text already, so no source.
        cause: io::Error,
    },
    /// The configuration file is not TOML, or has a key or type that is not
    /// allowed.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// What is wrong with it, with the bad key and what is allowed.
        message: String,
    },
    /// No kernel was named.
    #[error("no kernel to boot: give --kernel FILE, or kernel = \"FILE\" in the --config file")]
    NoKernel,
    /// A number outside its range.
    #[error("{place}: {value} is out of range; give {least} to {most} {unit}")]
    Range {
        /// Which setting.
        place: Place,
        /// What was given.
        value: String,
        /// The least value allowed.
        least: u64,
        /// The greatest value allowed.
        most: u64,
        /// What the number counts.
        unit: &'static str,
    },
    /// A word that is none of the possible ones.
    #[error("{place}: '{value}' is not possible; give {allowed}")]
    Choice {
        /// Which setting.
        place: Place,
        /// What was given.
        value: String,
        /// The possible words.
        allowed: &'static str,
    },
    /// A PMU model that does not exist or cannot have these properties.
    #[error("{place}: {source}; 'auto' picks a model and 'none' hides the PMU")]
    Model {
        /// Which setting.
        place: Place,
        /// What is wrong.
        source: Box<ModelError>,
    },
    /// A counter backend that does not exist.
    #[error("{place}: {source}")]
    Backend {
        /// Which setting.
        place: Place,
        /// What is wrong.
        source: BackendError,
    },
    /// A list of host CPUs that cannot be used.
    #[error("{place}: {source}")]
    CpuList {
        /// Which setting.
        place: Place,
        /// What is wrong.
        source: CpuListError,
    },
    /// Time slices without cores that have them.
    #[error("{place}: only vCPUs that share cores have time slices; add --cores M")]
    SliceWithoutCores {
        /// Which setting.
        place: Place,
    },
    /// A CPU feature that cannot be hidden.
    #[error("{place}: {source}")]
    Feature {
        /// Which setting.
        place: Place,
        /// What is wrong.
        source: UnknownFeature,
    },
    /// A counter for the firmware that cannot be read.
    #[error("{place}: {source}")]
    FirmwareCounter {
        /// Which setting.
        place: Place,
        /// What is wrong.
        source: Box<SpecError>,
    },
    /// Counters for firmware, and no firmware.
    #[error("{place}: it is firmware that reserves them; add --firmware builtin")]
    NoFirmware {
        /// Which setting.
        place: Place,
    },
    /// The built-in firmware was not built.
    #[error(
        "{place}: this program was built without firmware, as the Rust target \
         x86_64-unknown-none was missing; run `rustup target add x86_64-unknown-none` and build \
         it again, or give --firmware FILE"
    )]
    NoBuiltinFirmware {
        /// Which setting.
        place: Place,
    },
    /// A policy that cannot be used.
    #[error("{place}: {source}")]
    Policy {
        /// Which setting.
        place: Place,
        /// What is wrong.
        source: PolicyTextError,
    },
    /// Something about reservations without any.
    #[error("{place}: under {why} counters are not reserved; leave one out")]
    NoReservations {
        /// Which setting.
        place: Place,
        /// What switches them off.
        why: &'static str,
    },
    /// A file that cannot be opened.
    #[error("{place}: cannot open {}: {}", path.display(), reason(cause))]
    Open {
        /// Which setting.
        place: Place,
        /// The file.
        path: PathBuf,
        /// Why; in the text already, so no source.
        cause: io::Error,
    },
    /// A name for a file that is something else.
    #[error("{place}: {} is {what}, not a file", path.display())]
    NotAFile {
        /// Which setting.
        place: Place,
        /// The name.
        path: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// A file that cannot be written.
    #[error("{place}: cannot write {}: {}", path.display(), reason(cause))]
    Write {
        /// Which setting.
        place: Place,
        /// The file.
        path: PathBuf,
        /// Why; in the text already, so no source.
        cause: io::Error,
    },
    /// A PMU's state without a PMU.
    #[error("{place}: under --pmu none there is no PMU and no state of one; leave one out")]
    StateWithoutPmu {
        /// Which setting.
        place: Place,
    },
    /// Something about host tools that nobody serves.
    #[error("{place}: no host tools are served; add --control SOCKET")]
    NoControl {
        /// Which setting.
        place: Place,
    },
    /// Host tools without a PMU.
    #[error(
        "{place}: host tools count by the guest's PMU model, and under --pmu none there is \
         none; leave one out"
    )]
    ControlWithoutPmu {
        /// Which setting.
        place: Place,
    },
    /// A boot module without a file name.
    #[error("{place}: '{value}' names no file; give FILE or FILE,WORDS")]
    EmptyModule {
        /// Which setting.
        place: Place,
        /// What was given.
        value: String,
    },
    /// A command line with a NUL character, which would end it.
    #[error("{place}: the text has a NUL character, which no kernel command line can hold")]
    NulInText {
        /// Which setting.
        place: Place,
    },
}

/// Where a setting was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The name of the setting: the flag without its dashes, the key of the file.
    pub key: &'static str,
    /// Who set it.
    pub origin: Origin,
}

/// Who set a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A flag of the command line.
    Flag,
    /// The configuration file.
    File {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Origin::Flag => write!(f, "--{}", self.key),
            Origin::File { path, line, column } => {
                write!(f, "{}:{line}:{column}: {}", path.display(), self.key)
            }
        }
    }
}

/// An I/O error without the number that the standard library appends.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "there is no such file".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        io::ErrorKind::InvalidData => "it is not UTF-8 text".to_owned(),
        _ => error.to_string(),
    }
}
