//! What can go wrong with apt and its like.

use std::io;
use std::path::PathBuf;

/// Packages cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum PackagesError {
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// The verb: "read", "create", …
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A helper program is not on `PATH`.
    #[error("{tool} was not found on PATH; {advice}")]
    ToolMissing {
        /// The program.
        tool: String,
        /// What to do about it.
        advice: &'static str,
    },
    /// A helper program failed.
    #[error("`{command}` failed ({status}): {tail}\n{advice}")]
    ToolFailed {
        /// The command line.
        command: String,
        /// Its exit status in words.
        status: String,
        /// The last lines it printed.
        tail: String,
        /// What to do about it.
        advice: &'static str,
    },
    /// It was ended, because its caller was to end.
    #[error("interrupted")]
    Interrupted,
    /// apt's sources name no Debian archive.
    #[error("apt's sources name no Debian archive with the component `main`; add one: {advice}")]
    NoDebianSource {
        /// What else to do about it.
        advice: &'static str,
    },
    /// The archive has no package that fits.
    #[error(
        "the Debian archive offers no package that fits `{wanted}` in {releases}; is its mirror complete?"
    )]
    NoPackage {
        /// Name or pattern of the package.
        wanted: String,
        /// The releases that were searched.
        releases: String,
    },
}

impl PackagesError {
    /// Makes the closure for `map_err` on a file operation.
    pub(crate) fn file(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> PackagesError {
        let path = path.into();
        move |source| PackagesError::File {
            action,
            path,
            source,
        }
    }
}
