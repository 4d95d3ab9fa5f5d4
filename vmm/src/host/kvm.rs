//! KVM's modules and the device file.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::Serialize;
use thiserror::Error;

use super::{CpuFacts, read_text};

/// Module parameters that change what a guest's PMU or debugging is like.
const PARAMETERS: &[&str] = &[
    "enable_pmu",
    "pmu",
    "enable_mediated_pmu",
    "nested",
    "npt",
    "ept",
    "ignore_msrs",
    "tdp_mmu",
];

/// One of KVM's modules.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KvmModule {
    /// Its name: `kvm`, `kvm_amd`, `kvm_intel` and the like.
    pub name: String,
    /// Parameters that matter here, with their values as the kernel prints them.
    pub parameters: BTreeMap<String, String>,
}

impl KvmModule {
    pub(super) fn find(root: &Path) -> Vec<Self> {
        let modules = root.join("sys/module");
        let mut names: Vec<String> = fs::read_dir(&modules)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name == "kvm" || name.starts_with("kvm_"))
            .collect();
        names.sort();
        let one = |name: String| {
            let value = |parameter: &&str| {
                let path = format!("sys/module/{name}/parameters/{parameter}");
                let text = read_text(root, &path)?;
                Some(((*parameter).to_owned(), text.trim().to_owned()))
            };
            let parameters = PARAMETERS.iter().filter_map(value).collect();
            Self { name, parameters }
        };
        names.into_iter().map(one).collect()
    }
}

/// What to do about a missing `/dev/kvm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// The processor could do it, the module is not there.
    LoadModule(&'static str),
    /// This is a virtual machine whose processor has no virtualisation.
    EnableNested,
    /// The processor shows no virtualisation.
    EnableInFirmware,
}

impl fmt::Display for NextStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LoadModule(name) => write!(f, "load KVM: modprobe {name}"),
            Self::EnableNested => f.write_str(
                "this is a virtual machine: switch nested virtualisation on in the machine that \
                 runs it",
            ),
            Self::EnableInFirmware => f.write_str(
                "the processor shows neither SVM nor VMX: switch virtualisation on in the \
                 machine's firmware",
            ),
        }
    }
}

/// `/dev/kvm` cannot be used.
#[derive(Debug, Error)]
pub enum KvmAccessError {
    /// It does not exist.
    #[error("there is no {}; {next}", path.display())]
    Missing {
        /// The device file.
        path: PathBuf,
        /// What to do.
        next: NextStep,
    },
    /// This user may not open it.
    #[error("no permission to open {}; {}", path.display(), permission_step(*by_group))]
    Permission {
        /// The device file.
        path: PathBuf,
        /// The group that owns it may open it.
        by_group: bool,
    },
    /// It is something else.
    #[error("{} is not a device; remove it and load KVM again", path.display())]
    NotADevice { path: PathBuf },
    /// The kernel refuses.
    #[error("cannot open {}: {source}", path.display())]
    Refused {
        /// The device file.
        path: PathBuf,
        source: io::Error,
    },
}

fn permission_step(by_group: bool) -> &'static str {
    if by_group {
        "add the user to the group that owns it, usually kvm (usermod -aG kvm USER), and log \
             in again"
    } else {
        "its mode lets only its owner: run as root, or give it to a group of its users \
             (chgrp kvm, chmod 660)"
    }
}

/// The result of [`KvmAccess::open`], for reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum KvmAccess {
    /// It can be opened for reading and writing.
    Usable,
    /// It cannot.
    Unusable {
        /// Why, and what to do next.
        reason: String,
    },
}

impl KvmAccess {
    /// Opens the device file below `root`, for the error that says what to do.
    ///
    /// # Errors
    /// It is missing, forbidden, something else, or refused by the kernel.
    pub fn open(root: &Path, cpu: &CpuFacts) -> Result<fs::File, KvmAccessError> {
        let path = root.join("dev/kvm");
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => KvmAccessError::Missing {
                path: path.clone(),
                next: next_step(cpu),
            },
            io::ErrorKind::PermissionDenied => KvmAccessError::Permission {
                path: path.clone(),
                by_group: fs::metadata(&path).map_or(true, |m| m.mode() & 0o060 == 0o060),
            },
            _ => KvmAccessError::Refused {
                path: path.clone(),
                source,
            },
        };
        let kind = fs::metadata(&path).map_err(failed)?.file_type();
        if !kind.is_char_device() {
            return Err(KvmAccessError::NotADevice { path });
        }
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|source| match source.raw_os_error() {
                // The file exists, but no driver answers.
                Some(libc::ENODEV | libc::ENXIO) => KvmAccessError::Missing {
                    path: path.clone(),
                    next: next_step(cpu),
                },
                _ => failed(source),
            })
    }

    pub(super) fn check(root: &Path, cpu: &CpuFacts) -> Self {
        match Self::open(root, cpu) {
            Ok(_) => Self::Usable,
            Err(error) => Self::Unusable {
                reason: error.to_string(),
            },
        }
    }
}

fn next_step(cpu: &CpuFacts) -> NextStep {
    let module = match cpu.vendor.as_deref() {
        Some("GenuineIntel" | "CentaurHauls" | "Shanghai") => "kvm_intel",
        _ => "kvm_amd",
    };
    match (cpu.virtualisation, cpu.is_virtual) {
        (true, _) => NextStep::LoadModule(module),
        (false, true) => NextStep::EnableNested,
        (false, false) => NextStep::EnableInFirmware,
    }
}
