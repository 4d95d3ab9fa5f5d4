//! One event of a group: a slot's.

use pmu_model::{Nanos, Provenance, Reading, SlotIndex, UnavailableReason};

use super::plan::NEVER;
use super::scale::Scaler;
use super::syscalls::{Errno, EventFd, EventSpec, PerfSyscalls, uninterrupted};

/// An open event.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) slot: SlotIndex,
    event: EventSpec,
    pub(super) fd: EventFd,
    pub(super) id: u64,
    /// The slot is started.
    pub(super) running: bool,
    /// The kernel has it enabled; it counts if its leader is enabled as well.
    pub(super) enabled: bool,
    /// Started at any time since the last reading.
    pub(super) ran: bool,
    pub(super) count: Scaler,
    /// Count at which an overflow is due.
    pub(super) armed: Option<u64>,
    countdown: Countdown,
    /// Its overflow is due sooner than a clock may signal.
    early: bool,
}

/// What the kernel's next overflow of an event is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Countdown {
    /// Nothing: its period is never reached.
    Off,
    /// It comes at this count.
    To(u64),
    /// It has fired, and a period that means nothing goes on.
    Stale,
}

impl Member {
    /// An event of a slot that is stopped.
    pub(super) fn new(slot: SlotIndex, event: EventSpec, fd: EventFd, id: u64) -> Self {
        Member {
            slot,
            event,
            fd,
            id,
            running: false,
            enabled: false,
            ran: false,
            count: Scaler::default(),
            armed: None,
            countdown: Countdown::Off,
            early: false,
        }
    }

    pub(super) fn reading(&self, backend: &'static str) -> Reading {
        if self.count.never_counted() {
            return Reading::Unavailable(UnavailableReason::Busy { backend });
        }
        let provenance = if self.count.is_scaled() {
            Provenance::Scaled
        } else {
            self.event.source.provenance()
        };
        Reading::Counted {
            value: self.count.value(),
            provenance,
        }
    }

    /// Whether the kernel signals an overflow.
    fn signals(&self) -> bool {
        self.event.period.is_some()
    }

    /// Whether [`Member::count_down`] would make a system call.
    pub(super) fn is_off_target(&self) -> bool {
        let wanted = self.armed.map_or(Countdown::Off, Countdown::To);
        self.signals() && self.running && self.countdown != wanted
    }

    /// Sets the kernel's period so that the overflow comes when it is due,
    /// but time no sooner than in `floor`. The count is that of now.
    pub(super) fn count_down(
        &mut self,
        kernel: &mut dyn PerfSyscalls,
        floor: Nanos,
    ) -> Result<(), Errno> {
        let mut early = false;
        let period = match self.armed {
            None => NEVER,
            Some(due) => {
                let left = due.saturating_sub(self.count.value());
                let least = if self.event.source.is_time() {
                    floor.0
                } else {
                    1
                };
                early = left < least;
                left.clamp(least, NEVER)
            }
        };
        uninterrupted(|| kernel.set_period(self.fd, period))?;
        self.countdown = self.armed.map_or(Countdown::Off, Countdown::To);
        self.early = early;
        Ok(())
    }

    /// Whether its overflow may be due although no signal came.
    pub(super) fn may_be_due_unsignalled(&self) -> bool {
        self.running && self.early && self.armed.is_some()
    }

    /// Whether its armed overflow has to be found by the VMM's timer.
    pub(super) fn wants_deadline(&self) -> bool {
        self.running && !self.signals() && self.armed.is_some()
    }

    /// What is still to come before the armed overflow.
    pub(super) fn left(&self) -> Option<u64> {
        Some(self.armed?.saturating_sub(self.count.value()))
    }

    /// Whether the armed overflow has come, which takes it back. The count is
    /// that of now. `fired` says that the kernel may have signalled for this
    /// event: if it was too early, it has to be asked again.
    pub(super) fn take_overflow(&mut self, fired: bool) -> bool {
        let Some(due) = self.armed else {
            return false;
        };
        if self.count.value() >= due {
            self.armed = None;
            return true;
        }
        if fired {
            self.countdown = Countdown::Stale;
        }
        false
    }
}
