//! What can be wrong with the configuration of a run.

use std::fmt;
use std::io;
use std::path::PathBuf;

use pmu_virt::{BackendError, FilterError, ModelError};
use thiserror::Error;
use umpire_tools::stat::spec::EventListError;
use vmm::cpuid::UnknownFeature;
use vmm::firmware::SpecError;
use vmm::sched::CpuListError;

use super::policy::PolicyTextError;
use crate::exit::UserError;

/// The configuration cannot be used. Every variant prints as one line that says
/// where the value came from, what is wrong, and what would be right.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The configuration file cannot be read.
    #[error("configuration file {}: {}", path.display(), reason(cause))]
    ReadFile {
        path: PathBuf,
        /// Why; in the text already, so no source.
        cause: io::Error,
    },
    /// The configuration file is not TOML, or has a key or type that is not
    /// allowed.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Malformed {
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
    /// A setting that cannot be used.
    #[error("{place}: {source}")]
    Setting {
        place: Place,
        /// What is wrong with it.
        source: Box<SettingError>,
    },
}

impl ConfigError {
    pub(super) fn setting(place: Place, source: SettingError) -> Self {
        let source = Box::new(source);
        Self::Setting { place, source }
    }
}

/// What is wrong with a setting, and what would be right.
#[derive(Debug, Error)]
pub enum SettingError {
    /// A number outside its range.
    #[error("{value} is out of range; give {least} to {most} {unit}")]
    Range {
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
    #[error("'{value}' is not possible; give {allowed}")]
    Choice {
        /// What was given.
        value: String,
        /// The possible words.
        allowed: &'static str,
    },
    /// A PMU model that does not exist or cannot have these properties.
    #[error("{0}; 'auto' picks a model and 'none' hides the PMU")]
    Model(#[from] Box<ModelError>),
    /// A counter backend that does not exist.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A list of host CPUs that cannot be used.
    #[error(transparent)]
    CpuList(#[from] CpuListError),
    /// Time slices without cores that have them.
    #[error("only vCPUs that share cores have time slices; add --cores M")]
    SliceWithoutCores,
    /// Runs that are to be equal, and go by a clock that is not.
    #[error("under --real-time no two runs are equal, whatever the seed; leave one out")]
    SeedInRealTime,
    /// A CPU feature that cannot be hidden.
    #[error(transparent)]
    Feature(#[from] UnknownFeature),
    /// A counter for the firmware that cannot be read.
    #[error(transparent)]
    FirmwareCounter(#[from] Box<SpecError>),
    /// Something for firmware to do, and no firmware.
    #[error("it is for firmware; add --firmware builtin")]
    NoFirmware,
    /// The built-in firmware was not built.
    #[error(
        "this program was built without firmware, as the Rust target \
         x86_64-unknown-none was missing; run `rustup target add x86_64-unknown-none` and build \
         it again, or give --firmware FILE"
    )]
    NoBuiltinFirmware,
    /// A policy that cannot be used.
    #[error(transparent)]
    Policy(#[from] PolicyTextError),
    /// Something about reservations without any.
    #[error("under {why} counters are not reserved; leave one out")]
    NoReservations {
        /// What switches them off.
        why: &'static str,
    },
    /// A file that cannot be opened.
    #[error("cannot open {}: {}", path.display(), reason(cause))]
    Open {
        path: PathBuf,
        /// Why; in the text already, so no source.
        cause: io::Error,
    },
    /// A name for a file that is something else.
    #[error("{} is {what}, not a file", path.display())]
    NotAFile {
        /// The name.
        path: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// A file that cannot be written.
    #[error("cannot write {}: {}", path.display(), reason(cause))]
    Write {
        path: PathBuf,
        /// Why; in the text already, so no source.
        cause: io::Error,
    },
    /// A PMU's state without a PMU.
    #[error("under --pmu none there is no PMU and no state of one; leave one out")]
    StateWithoutPmu,
    /// A filter of events without a PMU.
    #[error("under --pmu none there are no events to filter; leave one out")]
    FilterWithoutPmu,
    /// A filter of events that makes no sense.
    #[error("{}:{error}", path.display())]
    Filter {
        path: PathBuf,
        /// What is wrong, and where.
        error: FilterError,
    },
    /// A budget of counters that there are none of.
    #[error("under --pmu none there are no counters and no budget of them; leave one out")]
    BudgetWithoutPmu,
    /// Something about a lease that is not asked for.
    #[error("no lease is asked for under --arbiter none; leave one out")]
    NoArbiter,
    /// A lease without counters.
    #[error("under --pmu none there are no counters to lease; leave one out")]
    LeaseWithoutPmu,
    /// A lease that makes no sense.
    #[error("{0}")]
    LeaseTerms(String),
    /// Something about host tools that nobody serves.
    #[error("no host tools are served; give --control SOCKET, and a --pmu")]
    NoControl,
    /// Events that cannot be parsed.
    #[error("{0}")]
    Events(EventListError),
    /// A name that a VM cannot have.
    #[error(
        "'{value}' is no name for a VM: up to 64 letters, digits, '.', '_' and '-', a letter or \
         digit first"
    )]
    VmName {
        /// What was given.
        value: String,
    },
    /// A name for a VM whose socket has a path.
    #[error("tools find a VM of --control by its socket; leave one of the two out")]
    NameWithSocket,
    /// Host tools without a PMU.
    #[error(
        "host tools count by the guest's PMU model, and under --pmu none there is \
         none; leave one out"
    )]
    ControlWithoutPmu,
    /// A boot module without a file name.
    #[error("'{value}' names no file; give FILE or FILE,WORDS")]
    EmptyModule {
        /// What was given.
        value: String,
    },
    /// A command line with a NUL character, which would end it.
    #[error("the text has a NUL character, which no kernel command line can hold")]
    NulInText,
}

/// Where a setting was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The name of the setting: the flag without its dashes, the key of the file.
    pub key: String,
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

impl From<ConfigError> for UserError {
    fn from(error: ConfigError) -> Self {
        Self::bad_input(error)
    }
}
