//! What reaches into an emulated machine from outside: the host's time and its people, as far
//! as there are any, and the interrupt lines of devices that others than vCPUs drive.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::devices::InterruptLine;

/// The world outside of a machine. It is asked on the machine's thread, at ends of turns and
/// while all vCPUs wait, and answers in virtual time: ticks since the machine started.
pub trait Outside: Debug + Send {
    /// A turn is over at `now`: the time to go on with, `now` or later.
    fn turn_over(&mut self, now: u64) -> u64 {
        now
    }

    /// All vCPUs wait until `until`, or for ever, as far as the machine knows; `held` says that
    /// somebody keeps one of them out of its guest. May block; it has to come back when
    /// something has been said to the machine.
    fn idle(&mut self, now: u64, until: Option<u64>, held: bool) -> Waited;
}

/// What came of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// It is this time now.
    Until(u64),
    /// Nothing will ever come.
    Forever,
}

/// Nobody is there: idle time is skipped, and nothing comes but what the machine does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Nobody;

impl Outside for Nobody {
    fn idle(&mut self, _: u64, until: Option<u64>, _: bool) -> Waited {
        until.map_or(Waited::Forever, Waited::Until)
    }
}

/// Pins of the I/O APIC that were pulsed, from whatever thread; the machine looks at them at
/// each turn and behind each access to a device.
#[derive(Debug, Default)]
pub struct Lines {
    pulses: AtomicU32,
}

impl Lines {
    /// An edge on a pin, 0 to 23.
    pub fn pulse(&self, pin: u8) {
        self.pulses.fetch_or(1 << (pin & 31), Ordering::Release);
    }

    /// The line of a device to a pin.
    #[must_use]
    pub fn to_pin(self: &Arc<Self>, pin: u8) -> PinLine {
        PinLine {
            lines: self.clone(),
            pin,
        }
    }

    /// The pins that were pulsed since, by bit.
    #[inline]
    pub(super) fn take(&self) -> u32 {
        match self.pulses.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.pulses.swap(0, Ordering::Acquire),
        }
    }

    /// Whether there is something to take, for who waits.
    #[must_use]
    pub fn is_pulsed(&self) -> bool {
        self.pulses.load(Ordering::Acquire) != 0
    }
}

/// The line of a device to a pin of the I/O APIC.
#[derive(Debug)]
pub struct PinLine {
    lines: Arc<Lines>,
    pin: u8,
}

impl InterruptLine for PinLine {
    fn raise(&self) -> io::Result<()> {
        self.lines.pulse(self.pin);
        Ok(())
    }
}
