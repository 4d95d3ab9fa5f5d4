//! The file of `--save-on-exit` and `--restore`: the PMU state of every vCPU.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use pmu_virt::{CorePmu, PmuModel, PmuState, StateError, VcpuPmu, Vendor};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::files::folder_of;
use crate::kvm::VcpuId;

/// What the file calls itself.
const FORMAT: &str = "umpire-pmu-state";
/// Version of the format that this Umpire writes, and the only one it reads.
const VERSION: u64 = 1;
/// More than 64 vCPUs can have; a file beyond is not read into memory.
const MOST_BYTES: u64 = 16 << 20;

/// A state could not be written, or cannot be restored.
#[derive(Debug, Error)]
pub enum StateFileError {
    /// The file cannot be read.
    #[error("--restore: cannot read {}: {cause}", path.display())]
    Read {
        path: PathBuf,
        /// Why; in the text already, so no source.
        cause: io::Error,
    },
    /// The file is something else.
    #[error(
        "--restore: {} is no PMU state ({why}); give a file that --save-on-exit wrote",
        path.display()
    )]
    Foreign {
        path: PathBuf,
        /// What gives it away.
        why: String,
    },
    /// The file is of another version of the format.
    #[error(
        "--restore: {} is in version {version} of the format, written by Umpire {writer}; \
         this one reads version {VERSION} only, so restore it with that Umpire",
        path.display()
    )]
    Version {
        path: PathBuf,
        version: u64,
        /// The Umpire that wrote it.
        writer: String,
    },
    /// The file is one of Umpire's, and damaged.
    #[error("--restore: {} is damaged: {why}", path.display())]
    Damaged {
        path: PathBuf,
        /// Where and how.
        why: String,
    },
    /// Another number of vCPUs.
    #[error(
        "--restore: {} holds {saved} vCPUs, this guest has {here}; add --cpus {saved}",
        path.display()
    )]
    Cpus {
        path: PathBuf,
        /// vCPUs in the file.
        saved: usize,
        /// vCPUs of the guest.
        here: usize,
    },
    /// A vCPU's PMU cannot take the state.
    #[error("--restore: {}, {vcpu}: {source}{advice}", path.display())]
    Refused {
        path: PathBuf,
        /// Which vCPU.
        vcpu: VcpuId,
        source: StateError,
        /// What to do.
        advice: String,
    },
    /// A vCPU's state could not be had.
    #[error(
        "--save-on-exit: {} was not written: {vcpu} did not stop in good order, so there \
         is no state of it",
        path.display()
    )]
    Missing {
        path: PathBuf,
        /// Which vCPU.
        vcpu: VcpuId,
    },
    /// The file cannot be written.
    #[error("--save-on-exit: cannot write {}: {cause}", path.display())]
    Write {
        path: PathBuf,
        /// Why; in the text already, so no source.
        cause: io::Error,
    },
}

/// What every version of the format has, and a foreign file has not.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StateHeader {
    format: String,
    version: u64,
    umpire: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    format: String,
    version: u64,
    /// The Umpire that wrote it, for people.
    umpire: String,
    vcpus: Vec<SavedVcpu>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedVcpu {
    vcpu: u32,
    pmu: PmuState,
}

/// The PMU states of a machine, to be restored.
#[derive(Debug)]
pub struct SavedMachine {
    path: PathBuf,
    states: Vec<PmuState>,
}

impl SavedMachine {
    /// Reads the states of `cpus` vCPUs.
    ///
    /// # Errors
    /// [`StateFileError`] says what the file is instead, and what to do.
    pub fn read(path: &Path, cpus: u8) -> Result<Self, StateFileError> {
        let mut text = Vec::new();
        File::open(path)
            .and_then(|file| file.take(MOST_BYTES + 1).read_to_end(&mut text))
            .map_err(|cause| StateFileError::Read {
                path: path.to_owned(),
                cause,
            })?;
        let states = parse(path, &text)?;
        if states.len() != usize::from(cpus) {
            return Err(StateFileError::Cpus {
                path: path.to_owned(),
                saved: states.len(),
                here: cpus.into(),
            });
        }
        Ok(Self {
            path: path.to_owned(),
            states,
        })
    }

    /// Restores the PMU of `vcpu`, which is on `core`, if it is on one.
    ///
    /// # Errors
    /// [`StateFileError::Refused`].
    pub fn restore(
        &self,
        vcpu: VcpuId,
        pmu: &mut VcpuPmu,
        core: Option<&mut CorePmu>,
    ) -> Result<(), StateFileError> {
        let Some(state) = self.states.get(vcpu.index()) else {
            return Ok(());
        };
        pmu.restore(core, state)
            .map_err(|source| StateFileError::Refused {
                path: self.path.clone(),
                vcpu,
                advice: advice(&source, pmu.model().vendor()),
                source,
            })
    }
}

/// How a guest gets the PMU that a state belongs to.
fn advice(error: &StateError, here: Vendor) -> String {
    let StateError::Model { saved, .. } = error else {
        return String::new();
    };
    match PmuModel::parse(saved).map(|model| model.vendor()) {
        Ok(vendor) if vendor == here => format!("; add --pmu {saved}"),
        Ok(Vendor::Amd) => format!("; add --cpu-vendor amd --pmu {saved}"),
        Ok(Vendor::Intel) => format!("; add --cpu-vendor intel --pmu {saved}"),
        Err(_) => "; this Umpire does not know that model".to_owned(),
    }
}

fn parse(path: &Path, text: &[u8]) -> Result<Vec<PmuState>, StateFileError> {
    let foreign = |why: &str| StateFileError::Foreign {
        path: path.to_owned(),
        why: why.to_owned(),
    };
    if u64::try_from(text.len()).map_or(true, |len| len > MOST_BYTES) {
        return Err(foreign("it is too long"));
    }
    let header: StateHeader = serde_json::from_slice(text)
        .map_err(|error| foreign(&umpire_events::one_line(&error.to_string())))?;
    if header.format != FORMAT {
        return Err(foreign("it does not say that it is one"));
    }
    if header.version != VERSION {
        // The name comes from a file, so nothing of it may steer a terminal.
        let writer = header.umpire.escape_debug().take(40).collect();
        return Err(StateFileError::Version {
            path: path.to_owned(),
            version: header.version,
            writer,
        });
    }
    let damaged = |why: String| StateFileError::Damaged {
        path: path.to_owned(),
        why,
    };
    let document: Document = serde_json::from_slice(text)
        .map_err(|error| damaged(umpire_events::one_line(&error.to_string())))?;
    let numbers = document.vcpus.iter().map(|saved| saved.vcpu);
    if !numbers.eq((0..).take(document.vcpus.len())) {
        return Err(damaged("its vCPUs are not numbered from 0".to_owned()));
    }
    Ok(document.vcpus.into_iter().map(|saved| saved.pmu).collect())
}

/// Writes the states of `cpus` vCPUs: the whole file, or nothing of it.
///
/// # Errors
/// A vCPU's state is missing, or the file cannot be written. A file of before
/// is still there then.
pub(super) fn write(
    path: &Path,
    cpus: u8,
    mut states: Vec<(VcpuId, PmuState)>,
) -> Result<(), StateFileError> {
    states.sort_by_key(|(vcpu, _)| *vcpu);
    if let Some(vcpu) = (0..u32::from(cpus))
        .map(VcpuId)
        .find(|vcpu| !states.iter().any(|(saved, _)| saved == vcpu))
    {
        return Err(StateFileError::Missing {
            path: path.to_owned(),
            vcpu,
        });
    }
    let document = Document {
        format: FORMAT.to_owned(),
        version: VERSION,
        umpire: env!("CARGO_PKG_VERSION").to_owned(),
        vcpus: states
            .into_iter()
            .map(|(vcpu, pmu)| SavedVcpu { vcpu: vcpu.0, pmu })
            .collect(),
    };
    replace(path, &document).map_err(|cause| StateFileError::Write {
        path: path.to_owned(),
        cause,
    })
}

/// A file beside `path`, on the disk before it takes its name.
fn replace(path: &Path, document: &Document) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(document)?;
    text.push(b'\n');
    let mut file = beside(path)?;
    file.write_all(&text)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    File::open(folder_of(path))?.sync_all()
}

/// Whether `path` could be written at the end of a run.
///
/// # Errors
/// Why not.
pub fn probe(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(found) if !found.is_file() => return Err(io::Error::other("it is not a file")),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    if path.file_name().is_none() {
        return Err(io::Error::other("it names no file"));
    }
    beside(path).map(drop)
}

fn beside(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    tempfile::Builder::new()
        .prefix(".umpire-state-")
        .tempfile_in(folder_of(path))
        .map_err(|error| match error.kind() {
            // Its name would be a riddle.
            io::ErrorKind::NotFound => io::Error::other("there is no such folder"),
            kind => kind.into(),
        })
}

#[cfg(test)]
mod tests;
