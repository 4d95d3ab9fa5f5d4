//! One run of a job, from the snapshot on.

use std::fmt;
use std::sync::{Arc, OnceLock};

use emu::{NotAnnounced, Observer, Ring};
use thiserror::Error;

use super::console::{Console, Said};
use super::image::Image;
use super::limits::{Limits, Met, Watch};
use super::machine::{MachineFailure, Parts, Signals, assemble, clock};
use super::platform::{Connections, CountPlatform};
use super::snapshot::SnapshotError;
use crate::devices::GuestEnd;
use crate::emu::{Lines, NotRestored};
use crate::vcpu::{VcpuControl, VcpuEnd};
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
        let saved = &self.snapshot.saved;
        let (console, clock) = (Console::default(), clock());
        let (lines, control) = (Arc::<Lines>::default(), Arc::<VcpuControl>::default());
        let connections = Connections {
            memory: memory.clone(),
            lines: lines.clone(),
            clock: clock.clone(),
            console: console.clone(),
            control: control.clone(),
        };
        let platform = Arc::new(CountPlatform::new(connections, self.signals, serve));
        platform.restore(&saved.devices)?;
        let met = Arc::new(OnceLock::new());
        let watch = Watch::new(limits, control.clone(), met.clone());
        let mut room = assemble(Parts {
            memory,
            start: None,
            platform: platform.clone(),
            lines,
            clock,
            control,
            outside: Box::new(watch),
        })?;
        room.restore(&saved.room)?;
        if let Some(Looks { observer, places }) = looks {
            room.observe(Some(observer), &places);
        }
        let began = room.now();
        let end = room.run().end;
        let said = console.said();
        let end = end_of(
            end,
            met.get().copied(),
            platform.broken(),
            &said,
            self.signals,
        );
        let Some(serve) = platform.take_server() else {
            unreachable!("it is taken back once, here");
        };
        Ok(Ran {
            end,
            serve,
            observer: room.observe(None, &[]),
            console: String::from_utf8_lossy(&said.tail).into_owned(),
            out_of_memory: said.out_of_memory,
            unannounced: room.unannounced().to_vec(),
            instructions: [Ring::Kernel, Ring::User].map(|ring| room.executed(ring)),
            virtual_ns: room.now() - began,
        })
    }
}

/// What the end of a machine means.
pub(super) fn end_of(
    end: VcpuEnd,
    met: Option<Met>,
    broken: Option<Broken>,
    said: &Said,
    signals: Signals,
) -> End {
    // Whatever else the guest did, what it said before its reset is why.
    if let Some(word) = &said.panic {
        return End::Panicked(word.clone());
    }
    match (end, met, broken) {
        (VcpuEnd::Guest(GuestEnd::TestExit(signal)), _, _) if signal == u32::from(signals.done) => {
            End::Done
        }
        (VcpuEnd::Guest(GuestEnd::PowerOff), _, _) => End::Done,
        (_, _, Some(broken)) => End::Broken(broken),
        (_, Some(Met::Time), _) => End::TimedOut,
        (_, Some(Met::Interrupt), _) => End::Interrupted,
        (VcpuEnd::Asleep, _, _) => End::Asleep,
        (VcpuEnd::Guest(GuestEnd::TestExit(signal)), _, _) => End::Lost(format!(
            "its first program said {signal}, which is no word of its"
        )),
        (other, _, _) => End::Lost(other.to_string()),
    }
}
