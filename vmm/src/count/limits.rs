//! What ends a run that does not end by itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::emu::{Nobody, Outside, Waited};
use crate::vcpu::VcpuControl;

/// Turns of the guest between two looks at the host's clock: some ten milliseconds.
const TURNS: u32 = 64;
/// Virtual time between two words about a boot, in nanoseconds: half a second of the host's or
/// so.
const PAUSE: u64 = 40_000_000;

/// How long a run may take, and what else ends it.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    /// The host's time; none: for ever.
    pub time: Option<Duration>,
    /// Set when the run is to end, as by a signal.
    pub interrupted: Arc<AtomicBool>,
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

/// Which limit a run has met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Met {
    Time,
    Interrupt,
}

/// Watches a run, which it is outside of: nobody is there, but the limits.
#[derive(Debug)]
pub(super) struct Watch {
    interrupted: Arc<AtomicBool>,
    until: Option<Instant>,
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
            // A time beyond the clock's is none.
            until: limits
                .time
                .and_then(|time| Instant::now().checked_add(time)),
            interrupted: limits.interrupted,
            pauses,
            control,
            met,
            turns: 0,
            looked: None,
        }
    }

    fn look(&mut self) {
        let met = if self.interrupted.load(Ordering::Relaxed) {
            Met::Interrupt
        } else if self.until.is_some_and(|until| Instant::now() >= until) {
            Met::Time
        } else {
            return;
        };
        self.met.get_or_init(|| met);
        self.control.stop();
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
