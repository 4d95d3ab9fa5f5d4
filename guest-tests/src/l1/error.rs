//! What can go wrong between a command on this machine and its exit status in L1.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use debian_packages::PackagesError;

/// A failure of the L1 machine or of its preparation; never a failure of the command inside.
#[derive(Debug, thiserror::Error)]
pub enum L1Error {
    /// A file operation failed.
    #[error("cannot {action} {}: {source}{}", path.display(), storage_hint(source))]
    File {
        /// The verb: "read", "create", …
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A helper program failed, or packages cannot be had.
    #[error(transparent)]
    Packages(#[from] PackagesError),
    /// A downloaded package lacks an expected file.
    #[error("package set `{set}` has no file {file}; remove it from the cache and fetch again")]
    PackageContent {
        /// The package set, a folder of the cache.
        set: &'static str,
        /// What was looked for.
        file: String,
    },
    /// The machine's processor or system cannot run the harness.
    #[error(
        "the L1 machine runs on x86-64 Linux only: its packages and the commands it runs are built for that"
    )]
    Architecture,
    /// The command to run is not there.
    #[error(
        "{program}: no such program, neither a file nor a name on PATH; build it first, or give its path"
    )]
    NoProgram {
        /// What was asked for.
        program: String,
    },
    /// A file is not an ELF file that can be followed.
    #[error("{}: not a usable ELF file: {reason}", path.display())]
    Elf {
        /// The file.
        path: PathBuf,
        /// What the parser found.
        reason: String,
    },
    /// A shared library was not found.
    #[error("{}: needs the shared library {library}, found in none of the loader's directories; install it or set LD_LIBRARY_PATH", needed_by.display())]
    Library {
        /// The name in `DT_NEEDED`.
        library: String,
        /// The file that needs it.
        needed_by: PathBuf,
    },
    /// A file cannot be put into an initramfs.
    #[error("cannot put {path} into the initramfs: {reason}")]
    Archive {
        /// The name in the archive.
        path: String,
        /// Why not.
        reason: &'static str,
    },
    /// The L1 machine ended or failed before the command did.
    #[error("the L1 machine failed after {:.1} s: {reason}\n{log}", after.as_secs_f64())]
    Machine {
        /// Time since QEMU's start.
        after: Duration,
        /// What was seen.
        reason: String,
        /// The last lines of QEMU and of the console.
        log: String,
    },
    /// Nothing in the L1 machine went on any more.
    #[error(
        "the L1 machine stood still after {:.1} s: not even its own shell goes on (docs/internals/testing.md, \"Limits of L1\"); try again\n{log}",
        after.as_secs_f64()
    )]
    StoodStill {
        /// Time since QEMU's start.
        after: Duration,
        /// The last lines of QEMU and of the console.
        log: String,
    },
    /// A value in `--file` or `--env` does not parse.
    #[error("`{value}`: {reason}")]
    Argument {
        /// The value.
        value: String,
        /// What is wrong with it.
        reason: &'static str,
    },
}

impl L1Error {
    /// Makes the closure for `map_err` on a file operation.
    pub(crate) fn file(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> L1Error {
        let path = path.into();
        move |source| L1Error::File {
            action,
            path,
            source,
        }
    }
}

fn storage_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space (about 500 MiB) or point UMPIRE_CACHE and TMPDIR elsewhere"
        }
        io::ErrorKind::PermissionDenied => {
            "; check the owner, or point UMPIRE_CACHE and TMPDIR elsewhere"
        }
        _ => "",
    }
}
