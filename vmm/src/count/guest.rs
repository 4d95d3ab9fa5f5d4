//! One machine, from where it begins to where it stops.

use std::sync::{Arc, OnceLock};

use emu::{NotAnnounced, Observer, Ring, State};
use vm_memory::GuestMemoryMmap;

use super::console::{Console, KernelSaid};
use super::end::{End, RunFailure};
use super::key::Key;
use super::limits::{Limits, Met, Pauses, Watch};
use super::machine::{MachineFailure, Parts, assemble, clock};
use super::platform::{Connections, CountPlatform, Signals};
use super::snapshot::SavedGuest;
use crate::devices::GuestEnd;
use crate::emu::{Lines, NotSaved, Room};
use crate::vcpu::{VcpuControl, VcpuEnd};

/// Where a machine has stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Stop {
    /// It can be run on.
    Paused,
    /// Its first program is ready for a job.
    Ready,
    /// It has ended.
    Ended(End),
}

/// A machine. `F` answers requests for files.
#[derive(Debug)]
pub(super) struct Guest<F> {
    room: Room,
    platform: Arc<CountPlatform<F>>,
    console: Console,
    control: Arc<VcpuControl>,
    met: Arc<OnceLock<Met>>,
    signals: Signals,
}

impl<F> Guest<F>
where
    F: FnMut(&[u8], &mut Vec<u8>) + Send + 'static,
{
    /// A machine with this memory, whose processor begins at `start`, or where
    /// [`Self::restore`] will say.
    pub(super) fn new(
        memory: GuestMemoryMmap,
        start: Option<State>,
        signals: Signals,
        serve: F,
        limits: Limits,
        pauses: Pauses,
    ) -> Result<Self, MachineFailure> {
        let (console, clock) = (Console::default(), clock());
        let (lines, control) = (Arc::<Lines>::default(), Arc::<VcpuControl>::default());
        let connections = Connections {
            memory: memory.clone(),
            lines: lines.clone(),
            clock: clock.clone(),
            console: console.clone(),
            control: control.clone(),
        };
        let platform = Arc::new(CountPlatform::new(connections, signals, serve));
        let met = Arc::new(OnceLock::new());
        let watch = Watch::new(limits, pauses, control.clone(), met.clone());
        let room = assemble(Parts {
            memory,
            start,
            platform: platform.clone(),
            lines,
            clock,
            control: control.clone(),
            outside: Box::new(watch),
        })?;
        Ok(Self {
            room,
            platform,
            console,
            control,
            met,
            signals,
        })
    }

    /// Goes on from what was saved, whose memory it has.
    pub(super) fn restore(&mut self, saved: &SavedGuest) -> Result<(), RunFailure> {
        self.platform.restore(&saved.devices)?;
        Ok(self.room.restore(&saved.room)?)
    }

    /// What is kept of it, beside memory.
    pub(super) fn save(&mut self, key: &Key) -> Result<SavedGuest, NotSaved> {
        Ok(SavedGuest {
            key: key.clone(),
            room: self.room.save()?,
            devices: self.platform.save().ok_or(NotSaved)?,
            booted: self.executed().iter().sum(),
        })
    }

    /// Runs it until it stops.
    pub(super) fn run(&mut self) -> Stop {
        self.control.resume();
        let end = self.room.run().end;
        let (met, broken) = (self.met.get(), self.platform.broken());
        Stop::Ended(match (end, met, broken) {
            // It restarts then, and nobody but the kernel can do that.
            (VcpuEnd::Guest(GuestEnd::Reset(by)), _, _) => match self.said().panic {
                Some(word) => End::Panicked(word),
                None => End::Lost(GuestEnd::Reset(by).to_string()),
            },
            (VcpuEnd::Guest(GuestEnd::TestExit(signal)), _, _) => match self.signals.word(signal) {
                Some(stop) => return stop,
                None => End::Lost(format!(
                    "its first program said {signal}, which is no word of its"
                )),
            },
            (VcpuEnd::Guest(GuestEnd::PowerOff), _, _) => End::Done,
            (_, _, Some(broken)) => End::Broken(broken),
            (_, Some(met), _) => End::from(*met),
            (VcpuEnd::Stopped, None, None) => return Stop::Paused,
            (VcpuEnd::Asleep, _, _) => End::Asleep,
            (other, _, _) => End::Lost(other.to_string()),
        })
    }

    /// Puts who looks on in the place of who did.
    pub(super) fn observe(
        &mut self,
        by: Option<Box<dyn Observer>>,
        places: &[u64],
    ) -> Option<Box<dyn Observer>> {
        self.room.observe(by, places)
    }

    /// What its kernel said.
    pub(super) fn said(&self) -> KernelSaid {
        self.console.said()
    }

    /// Instructions of the kernel and of programs since it was made.
    pub(super) fn executed(&self) -> [u64; 2] {
        [Ring::Kernel, Ring::User].map(|ring| self.room.executed(ring))
    }

    /// Virtual time, in nanoseconds since its boot began.
    pub(super) fn now(&self) -> u64 {
        self.room.now()
    }

    pub(super) fn unannounced(&self) -> &[NotAnnounced] {
        self.room.unannounced()
    }

    pub(super) fn memory(&self) -> &GuestMemoryMmap {
        self.room.memory()
    }

    /// One number for all that the guest could notice.
    pub(super) fn state_hash(&self) -> u64 {
        self.room.state_hash()
    }

    /// Who served files, once.
    pub(super) fn take_server(&self) -> Option<F> {
        self.platform.take_server()
    }
}

impl Signals {
    /// What a word of the first program's means.
    fn word(self, said: u32) -> Option<Stop> {
        if said == u32::from(self.done) {
            Some(Stop::Ended(End::Done))
        } else {
            (said == u32::from(self.ready)).then_some(Stop::Ready)
        }
    }
}
