//! Why a tool cannot do what was asked.

use std::path::PathBuf;

use perfmon_abi::wire::{Errno, Refusal};
use thiserror::Error;

/// Why a tool cannot do what was asked; one line, with what to do about it.
#[derive(Debug, Error)]
pub enum ToolError {
    /// Nobody said which VM, and none runs.
    #[error(
        "no VM is running that this user can reach; start one with umpire run, or name the \
         socket of its umpire run --control by --control SOCKET"
    )]
    NoVm,
    /// Nobody said which of several VMs.
    #[error("which VM? running are {0}; give --vm NAME, or put its socket into UMPIRE_PERFMON")]
    WhichVm(String),
    /// No VM has this name or process id.
    #[error("there is no VM {vm}; {}", having(running))]
    NoSuchVm {
        /// What was named.
        vm: String,
        /// Those that run.
        running: String,
    },
    /// One word means several VMs.
    #[error(
        "several VMs are meant: {}; give --control with one of these",
        list(sockets)
    )]
    SeveralVms { sockets: Vec<PathBuf> },
    /// Nobody answers.
    #[error("no VM can be reached: {reason}{}", next_step(*errno, path))]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why, with the socket's name.
        reason: String,
        /// Its kind.
        errno: Errno,
    },
    /// The VM refuses a command.
    #[error("{what}: {refusal}")]
    Refused {
        /// What was tried.
        what: String,
        refusal: Refusal,
    },
    /// The VM has another version.
    #[error(
        "the VM has the PMU model '{0}', which this umpire does not know; use the umpire that \
         runs the VM"
    )]
    Model(String),
    /// It has no such vCPU or core.
    #[error("there is no {what} {number}: the VM has {count}, numbered from 0")]
    NoTarget {
        /// `vCPU` or `core`.
        what: &'static str,
        /// The number that was given.
        number: u32,
        /// How many there are.
        count: u32,
    },
    /// The host's arbiter does not answer, or says no.
    #[error(transparent)]
    Arbiter(umpire_lease::CallError),
    /// What was given makes no sense.
    #[error("{0}")]
    Input(String),
    /// The host does not do something.
    #[error("{what}: {error}")]
    Host {
        /// What was tried.
        what: String,
        /// Why not.
        error: std::io::Error,
    },
    /// Standard output takes no more.
    #[error("cannot write to standard output: {0}")]
    Output(std::io::Error),
    /// Where counts go takes no more.
    #[error("the counts cannot be written: {0}")]
    Counts(std::io::Error),
}

/// The error of a call to the host; `what` was tried.
pub(crate) fn host(what: &str) -> impl FnOnce(std::io::Error) -> ToolError {
    let what = what.to_owned();
    move |error| ToolError::Host { what, error }
}

fn having(running: &str) -> String {
    match running {
        "" => "none is running; umpire run --name gives a VM its name".to_owned(),
        running => format!("running are {running}"),
    }
}

fn list(sockets: &[PathBuf]) -> String {
    let words = sockets.iter().map(|socket| socket.display().to_string());
    words.collect::<Vec<_>>().join(", ")
}

/// What to do about a socket that does not answer.
fn next_step(errno: Errno, path: &std::path::Path) -> String {
    match errno {
        Errno::ENOSYS => format!(
            "; is the VM running, with --control {}? umpire ls shows those that are",
            path.display()
        ),
        Errno::EPERM | Errno::EACCES => {
            "; the VM's owner can let others in with --control-mode and --control-group".to_owned()
        }
        Errno::EAGAIN => "; close a tool, or run the VM with more --control-connections".to_owned(),
        _ => String::new(),
    }
}

impl ToolError {
    /// The VM refused a command that was to do `what`.
    pub fn refused(what: impl Into<String>, refusal: Refusal) -> Self {
        Self::Refused {
            what: what.into(),
            refusal,
        }
    }

    /// Whether the VM is gone.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        match self {
            Self::Refused { refusal, .. } => is_gone(refusal),
            _ => false,
        }
    }
}

/// Whether a command was refused because nobody is there any more.
pub(crate) fn is_gone(refusal: &Refusal) -> bool {
    matches!(
        refusal.errno,
        Errno::ECONNRESET | Errno::ECONNREFUSED | Errno::ENOSYS
    )
}

/// What to make of a command that was refused; `what` was to be done.
pub fn refused(what: impl Into<String>) -> impl FnOnce(Refusal) -> ToolError {
    let what = what.into();
    move |refusal| ToolError::Refused { what, refusal }
}
