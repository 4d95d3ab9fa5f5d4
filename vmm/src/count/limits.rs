//! What ends a run that does not end by itself.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, write};

use crate::emu::{Nobody, Outside, Waited};
use crate::vcpu::VcpuControl;

/// How often who waits for somebody looks at the limits: a tenth of a second.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};
/// Turns of the guest between two looks at the host's clock: some ten milliseconds.
const TURNS: u32 = 64;
/// Virtual time between two words about a boot, in nanoseconds: half a second of the host's or
/// so.
const PAUSE: u64 = 40_000_000;

/// Until when something may take, and what else ends it. All that is done within the same limits,
/// a boot and a run behind it, ends at the same time.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    /// The host's time; none: for ever.
    pub until: Option<Instant>,
    /// Set when the run is to end, as by a signal.
    pub interrupted: Arc<AtomicBool>,
}

impl Limits {
    /// So much of the host's time, from now on.
    #[must_use]
    pub fn within(time: Duration) -> Self {
        Self {
            // A time beyond the clock's is none.
            until: Instant::now().checked_add(time),
            ..Self::default()
        }
    }

    /// These limits for whoever waits for something of the host's meanwhile.
    #[must_use]
    pub fn patience(&self) -> LimitPatience {
        LimitPatience {
            until: self.until,
            interrupted: self.interrupted.clone(),
        }
    }
}

/// How long somebody waits.
#[derive(Debug, Clone)]
pub struct LimitPatience {
    until: Option<Instant>,
    interrupted: Arc<AtomicBool>,
}

impl LimitPatience {
    /// The limit that was met, if one was.
    #[must_use]
    pub fn is_over(&self) -> Option<Met> {
        if self.interrupted.load(Ordering::Relaxed) {
            Some(Met::Interrupt)
        } else if self.until.is_some_and(|until| Instant::now() >= until) {
            Some(Met::Time)
        } else {
            None
        }
    }

    /// Writes all of `bytes`, however long whoever reads takes nothing, as long as no limit is
    /// met.
    ///
    /// # Errors
    /// As of a write, and `TimedOut` or `Interrupted` for a limit. A part may be written then.
    pub fn write_all(&self, to: impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
        // A pipe that is ready has room for so much, and takes it at once.
        const ROOM: usize = 4096;
        while !bytes.is_empty() {
            match self.is_over() {
                Some(Met::Interrupt) => return Err(io::ErrorKind::Interrupted.into()),
                Some(Met::Time) => return Err(io::ErrorKind::TimedOut.into()),
                None => {}
            }
            let mut ready = [PollFd::new(&to, PollFlags::OUT)];
            match poll(&mut ready, Some(&LOOK)) {
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
            match write(&to, &bytes[..bytes.len().min(ROOM)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(len) => bytes = &bytes[len..],
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// When a machine stops although no limit is met, to be run on.
#[derive(Debug, Clone, Default)]
pub(super) enum Pauses {
    #[default]
    Never,
    /// Now and then, so that somebody can be told how far it is.
    NowAndThen,
    /// At the turns that end at these virtual times or later, in ascending order.
    At(Vec<u64>),
}

/// Which limit was met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Met {
    /// [`Limits::until`].
    Time,
    /// [`Limits::interrupted`].
    Interrupt,
}

/// Watches a run, which it is outside of: nobody is there, but the limits.
#[derive(Debug)]
pub(super) struct Watch {
    patience: LimitPatience,
    pauses: Pauses,
    control: Arc<VcpuControl>,
    met: Arc<OnceLock<Met>>,
    turns: u32,
    /// Up to when pauses were made.
    looked: Option<u64>,
}

impl Watch {
    /// Begins now; `control` stops the machine, and `met` says why.
    pub(super) fn new(
        limits: Limits,
        pauses: Pauses,
        control: Arc<VcpuControl>,
        met: Arc<OnceLock<Met>>,
    ) -> Self {
        Self {
            patience: limits.patience(),
            pauses,
            control,
            met,
            turns: 0,
            looked: None,
        }
    }

    fn look(&mut self) {
        if let Some(met) = self.patience.is_over() {
            self.met.get_or_init(|| met);
            self.control.stop();
        }
    }

    /// A turn is over, or has been skipped.
    fn count(&mut self, now: u64) {
        self.turns += 1;
        if self.turns >= TURNS {
            self.turns = 0;
            self.look();
        }
        // A machine that goes on from a pause does not pause there again.
        let since = *self.looked.get_or_insert(now);
        let pauses = match &self.pauses {
            Pauses::Never => false,
            Pauses::NowAndThen => now - since >= PAUSE,
            Pauses::At(times) => times.iter().any(|time| (since + 1..=now).contains(time)),
        };
        if pauses {
            self.control.stop();
        }
        if pauses || matches!(self.pauses, Pauses::At(_)) {
            self.looked = Some(now);
        }
    }
}

impl Outside for Watch {
    fn turn_over(&mut self, now: u64) -> u64 {
        self.count(now);
        now
    }

    fn idle(&mut self, now: u64, until: Option<u64>, held: bool) -> Waited {
        // A guest that sleeps for ever by a timer has no turns of any length.
        self.count(now);
        Nobody.idle(now, until, held)
    }
}
