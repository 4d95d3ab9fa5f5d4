//! What ends a run that does not end by itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::emu::{Nobody, Outside, Waited};
use crate::vcpu::VcpuControl;

/// Turns of the guest between two looks at the host's clock: some ten milliseconds.
const TURNS: u32 = 64;

/// How long a run may take, and what else ends it.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    /// The host's time; none: for ever.
    pub time: Option<Duration>,
    /// Set when the run is to end, as by a signal.
    pub interrupted: Arc<AtomicBool>,
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
    limits: Limits,
    until: Option<Instant>,
    control: Arc<VcpuControl>,
    met: Arc<OnceLock<Met>>,
    turns: u32,
    /// Turns after which the machine is stopped for a look at it, none: never.
    pauses: Option<u32>,
    since_pause: u32,
}

/// Turns between two words about a boot: half a second or so.
const PAUSE: u32 = 2000;

impl Watch {
    /// Begins now; `control` stops the machine, and `met` says why.
    pub(super) fn new(limits: Limits, control: Arc<VcpuControl>, met: Arc<OnceLock<Met>>) -> Self {
        Self {
            // A time beyond the clock's is none.
            until: limits
                .time
                .and_then(|time| Instant::now().checked_add(time)),
            limits,
            control,
            met,
            turns: 0,
            pauses: None,
            since_pause: 0,
        }
    }

    /// Also stops the machine now and then without any limit met, to be run on.
    pub(super) fn pausing(self) -> Self {
        Self {
            pauses: Some(PAUSE),
            ..self
        }
    }

    fn look(&mut self) {
        let met = if self.limits.interrupted.load(Ordering::Relaxed) {
            Met::Interrupt
        } else if self.until.is_some_and(|until| Instant::now() >= until) {
            Met::Time
        } else {
            return;
        };
        self.met.get_or_init(|| met);
        self.control.stop();
    }

    fn count(&mut self) {
        self.since_pause += 1;
        if self.pauses.is_some_and(|pauses| self.since_pause >= pauses) {
            self.since_pause = 0;
            self.control.stop();
        }
        self.turns += 1;
        if self.turns >= TURNS {
            self.turns = 0;
            self.look();
        }
    }
}

impl Outside for Watch {
    fn turn_over(&mut self, now: u64) -> u64 {
        self.count();
        now
    }

    fn idle(&mut self, now: u64, until: Option<u64>, held: bool) -> Waited {
        // A guest that sleeps for ever by a timer has no turns of any length.
        self.count();
        Nobody.idle(now, until, held)
    }
}
