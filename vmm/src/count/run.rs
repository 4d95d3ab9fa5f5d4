//! One run of a job, from the snapshot on.

use std::fmt;

use emu::{NotAnnounced, Observer};
use thiserror::Error;

use super::guest::{Guest, Stop};
use super::image::Image;
use super::limits::{Limits, Met, Pauses};
use super::machine::MachineFailure;
use super::snapshot::SnapshotError;
use crate::emu::NotRestored;
use crate::virtio::Broken;

/// How a run ended. What became of its program whoever serves files has been told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The guest has said all there is to say, or has switched itself off.
    Done,
    /// [`Limits::time`] was over.
    TimedOut,
    /// [`Limits::interrupted`] was set.
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

/// Who looks on.
#[derive(Debug)]
pub struct Looks {
    /// It is told what is executed.
    pub observer: Box<dyn Observer>,
    /// And when the guest's kernel comes to one of these linear addresses.
    pub places: Vec<u64>,
}

/// What is left of a run.
#[derive(Debug)]
pub struct Ran<F> {
    /// How it ended.
    pub end: End,
    /// Who served files.
    pub serve: F,
    /// Who looked on, if somebody did.
    pub observer: Option<Box<dyn Observer>>,
    /// The last that the guest's kernel said on its console; mostly nothing.
    pub console: String,
    /// The first process that the guest's kernel ended for want of memory, in its words.
    pub out_of_memory: Option<String>,
    /// Instructions that raised #UD since the processor does not have them, each once.
    pub unannounced: Vec<NotAnnounced>,
    /// Instructions of the kernel and of programs, from the snapshot on, whoever executed them.
    pub instructions: [u64; 2],
    /// Virtual time from the snapshot on, in nanoseconds.
    pub virtual_ns: u64,
}

impl Image {
    /// Runs one job from the snapshot on. `serve` answers requests for files; the first thing
    /// it is asked for is the job. `looks` changes nothing of the guest.
    ///
    /// # Errors
    /// [`RunFailure`]: nothing has run.
    pub fn run<F>(
        &self,
        serve: F,
        limits: Limits,
        looks: Option<Looks>,
    ) -> Result<Ran<F>, RunFailure>
    where
        F: FnMut(&[u8], &mut Vec<u8>) + Send + 'static,
    {
        let memory = self.snapshot.map()?;
        let mut guest = Guest::new(memory, None, self.signals, serve, limits, Pauses::Never)?;
        guest.restore(&self.snapshot.saved)?;
        if let Some(Looks { observer, places }) = looks {
            guest.observe(Some(observer), &places);
        }
        let began = guest.now();
        let end = loop {
            match guest.run() {
                Stop::Paused => {}
                Stop::Ended(end) => break end,
                Stop::Ready => {
                    break End::Lost("its first program was ready a second time".to_owned());
                }
            }
        };
        let said = guest.said();
        let Some(serve) = guest.take_server() else {
            unreachable!("it is taken back once, here");
        };
        Ok(Ran {
            end,
            serve,
            observer: guest.observe(None, &[]),
            console: String::from_utf8_lossy(&said.tail).into_owned(),
            out_of_memory: said.out_of_memory,
            unannounced: guest.unannounced().to_vec(),
            instructions: guest.executed(),
            virtual_ns: guest.now() - began,
        })
    }
}
