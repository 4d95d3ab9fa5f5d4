//! How a run ends, and why one does not begin.

use std::fmt;

use thiserror::Error;

use super::limits::Met;
use super::machine::MachineFailure;
use super::snapshot::SnapshotError;
use crate::emu::NotRestored;
use crate::virtio::Broken;

/// How a run ended. What became of its program whoever serves files has been told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The guest has said all there is to say, or has switched itself off.
    Done,
    /// [`Limits::until`](super::Limits::until) has come.
    TimedOut,
    /// [`Limits::interrupted`](super::Limits::interrupted) was set.
    Interrupted,
    /// The guest's kernel has given up: its last word.
    Panicked(String),
    /// Everything in the guest waits for something that never comes.
    Asleep,
    /// The guest's driver of the file system did what no driver does.
    Broken(Broken),
    /// The guest did something else that no guest of ours does.
    Lost(String),
}

impl From<Met> for End {
    fn from(met: Met) -> Self {
        match met {
            Met::Time => Self::TimedOut,
            Met::Interrupt => Self::Interrupted,
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("the guest switched itself off"),
            Self::TimedOut => f.write_str("its time was over"),
            Self::Interrupted => f.write_str("it was interrupted"),
            Self::Panicked(word) => write!(f, "the guest's kernel has given up: {word}"),
            Self::Asleep => f.write_str("everything in the guest waits for what never comes"),
            Self::Broken(broken) => write!(f, "the guest's kernel made {broken}"),
            Self::Lost(what) => f.write_str(what),
        }
    }
}

/// No run could be begun.
#[derive(Debug, Error)]
pub enum RunFailure {
    /// The snapshot's memory.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A bug of Umpire's.
    #[error(transparent)]
    Machine(#[from] MachineFailure),
    /// A bug of Umpire's, or the file was made by hand.
    #[error("the snapshot does not fit the machine: {0}; remove it")]
    State(#[from] NotRestored),
    /// Likewise, of the file system.
    #[error("the snapshot has {0}; remove it")]
    Files(#[from] Broken),
}
