//! Drivers for the backends of this crate.

use std::ops::RangeInclusive;

use pmu_model::{
    CountRequest, EventClass, EventCode, EventFamily, EventTotals, Progress, Retirement, Ring,
    SoftwareEvent, Ticks, Tsc,
};

use super::sys::FreshPages;
use super::{Asked, Driver};
use crate::backend::perf::PerfBackend;
use crate::backend::{BackendEnv, BackendError, CounterBackend};
#[cfg(feature = "toml")]
use crate::backend::{RateTable, SimBackend};

/// Drives a backend that counts TSC ticks: each run is one interval, with
/// some halted ticks that must not count.
#[derive(Clone, Debug, Default)]
pub struct ClockDriver {
    now: Tsc,
}

/// Ticks that each interval spends halted.
const HALTED: Ticks = Ticks(1_000);

impl Driver for ClockDriver {
    fn request(&self) -> CountRequest {
        CountRequest::plain(intel(0x3c, 0x01), true, true)
    }

    fn uncountable(&self) -> CountRequest {
        CountRequest::plain(intel(0x2e, 0x41), true, true)
    }

    fn run(
        &mut self,
        backend: &mut dyn CounterBackend,
        ring: Ring,
        events: u64,
    ) -> RangeInclusive<u64> {
        // Time goes by while the guest does not run, too.
        self.now = self.now + Ticks(77);
        backend.observe(&Progress::Entered { tsc: self.now });
        self.now = self.now + Ticks(events) + HALTED;
        backend.observe(&Progress::Left {
            tsc: self.now,
            halted: HALTED,
            ring: Some(ring),
        });
        events..=events
    }

    fn deadline(&mut self, backend: &mut dyn CounterBackend) -> Asked {
        backend.observe(&Progress::Entered { tsc: self.now });
        let deadline = backend.deadline();
        backend.observe(&Progress::Left {
            tsc: self.now,
            halted: Ticks(0),
            ring: Some(Ring::Kernel),
        });
        Asked::Deadline(deadline)
    }
}

/// Drives a simulated backend: half an instruction a tick, and every run
/// begins in the middle of an event.
#[cfg(feature = "toml")]
#[derive(Clone, Debug, Default)]
pub struct SimDriver {
    now: Tsc,
}

#[cfg(feature = "toml")]
impl SimDriver {
    /// A backend with the rates that this driver expects.
    pub fn backend() -> SimBackend {
        let table = RateTable::parse("[event.instructions]\nrate = 1000\n", "the driver's table");
        SimBackend::new(table.unwrap_or_else(|error| panic!("{error}")), 2_000_000)
    }
}

#[cfg(feature = "toml")]
impl Driver for SimDriver {
    fn request(&self) -> CountRequest {
        CountRequest::plain(intel(0xc0, 0x00), true, true)
    }

    fn uncountable(&self) -> CountRequest {
        CountRequest::plain(intel(0x3c, 0x00), true, true)
    }

    fn run(
        &mut self,
        backend: &mut dyn CounterBackend,
        ring: Ring,
        events: u64,
    ) -> RangeInclusive<u64> {
        // An interval of odd length: the next one starts where it does.
        for ticks in [1, events, events - 1] {
            self.now = self.now + Ticks(33);
            backend.observe(&Progress::Entered { tsc: self.now });
            self.now = self.now + Ticks(ticks) + HALTED;
            backend.observe(&Progress::Left {
                tsc: self.now,
                halted: HALTED,
                ring: Some(ring),
            });
        }
        events..=events
    }

    fn deadline(&mut self, backend: &mut dyn CounterBackend) -> Asked {
        backend.observe(&Progress::Entered { tsc: self.now });
        let deadline = backend.deadline();
        backend.observe(&Progress::Left {
            tsc: self.now,
            halted: Ticks(0),
            ring: Some(Ring::Kernel),
        });
        Asked::Deadline(deadline)
    }
}

/// Drives a backend that counts stepped instructions.
#[derive(Clone, Debug, Default)]
pub struct StepDriver {
    now: Tsc,
}

impl Driver for StepDriver {
    fn request(&self) -> CountRequest {
        CountRequest::plain(intel(0xc0, 0x00), true, true)
    }

    fn uncountable(&self) -> CountRequest {
        CountRequest::plain(intel(0x3c, 0x00), true, true)
    }

    fn run(
        &mut self,
        backend: &mut dyn CounterBackend,
        ring: Ring,
        events: u64,
    ) -> RangeInclusive<u64> {
        for _ in 0..events {
            backend.observe(&Progress::Entered { tsc: self.now });
            self.now = self.now + Ticks(100);
            backend.observe(&Progress::Left {
                tsc: self.now,
                halted: Ticks(0),
                ring: Some(ring),
            });
            backend.observe(&Progress::Retired {
                ring,
                insn: Retirement::default(),
            });
        }
        events..=events
    }

    fn deadline(&mut self, _: &mut dyn CounterBackend) -> Asked {
        Asked::NotTimed
    }
}

/// Drives a backend that is told what a processor in software has executed: loads, one or many
/// an instruction, in sums.
#[derive(Clone, Debug, Default)]
pub struct EmuDriver {
    now: Tsc,
}

impl EmuDriver {
    /// `instructions` are executed that load so often each, from an entry to an exit.
    fn load(
        &mut self,
        backend: &mut dyn CounterBackend,
        ring: Ring,
        instructions: u64,
        loads: u64,
    ) {
        backend.observe(&Progress::Entered { tsc: self.now });
        let mut done = EventTotals::default()
            .with(EventClass::Instructions, instructions)
            .with(EventClass::Loads, instructions * loads);
        done.add_ticks(instructions);
        backend.observe(&Progress::Executed { ring, done });
        self.now = self.now + Ticks(instructions);
        backend.observe(&Progress::Left {
            tsc: self.now,
            halted: Ticks(0),
            ring: Some(ring),
        });
    }
}

impl Driver for EmuDriver {
    fn request(&self) -> CountRequest {
        CountRequest::plain(intel(0xd0, 0x81), true, true)
    }

    fn uncountable(&self) -> CountRequest {
        CountRequest::plain(intel(0x2e, 0x41), true, true)
    }

    fn run(
        &mut self,
        backend: &mut dyn CounterBackend,
        ring: Ring,
        events: u64,
    ) -> RangeInclusive<u64> {
        // The least and the most that there can be at once.
        let most = u64::from(EventClass::Loads.most());
        self.load(backend, ring, events / most, most);
        self.load(backend, ring, events % most, 1);
        events..=events
    }

    fn deadline(&mut self, _: &mut dyn CounterBackend) -> Asked {
        Asked::NotTimed
    }

    fn execute(
        &mut self,
        backend: &mut dyn CounterBackend,
        ring: Ring,
        instructions: u64,
    ) -> Option<u64> {
        let most = EventClass::Loads.most().into();
        self.load(backend, ring, instructions, most);
        Some(most)
    }
}

/// Drives `perf` on the host's kernel: the events are page faults of this
/// thread, by pages that it touches for the first time.
///
/// The thread must have a handler for the backend's overflow signal, which
/// calls [`crate::perf::note_overflow_signal`].
#[derive(Clone, Debug, Default)]
pub struct PerfDriver {
    now: Tsc,
}

/// Faults of the backend's own between entry and exit, at most: its code and
/// data may be touched for the first time there.
const OWN_FAULTS: u64 = 16;

impl PerfDriver {
    /// A backend whose hardware events count this very thread, for the suite in a
    /// machine that has a PMU and runs no guest: a guest of Umpire. The only way to
    /// one, as it would count a VMM for its guest.
    ///
    /// # Errors
    /// Those of [`PerfBackend::new`].
    pub fn hardware(env: &BackendEnv) -> Result<PerfBackend, BackendError> {
        PerfBackend::without_guests(env)
    }

    /// Touches as many fresh pages as there are `events`. A host that has no
    /// memory for them makes fewer, which the suite will notice.
    fn fault(events: u64) -> Option<FreshPages> {
        FreshPages::map(usize::try_from(events).ok()?).ok()
    }
}

impl Driver for PerfDriver {
    fn request(&self) -> CountRequest {
        CountRequest::plain(EventCode::Software(SoftwareEvent::PageFaults), true, true)
    }

    fn uncountable(&self) -> CountRequest {
        CountRequest {
            edge: true,
            ..self.request()
        }
    }

    fn run(
        &mut self,
        backend: &mut dyn CounterBackend,
        ring: Ring,
        events: u64,
    ) -> RangeInclusive<u64> {
        // Faults of the host are none of the guest's.
        let outside = Self::fault(events / 4);
        let inside = Self::fault(events);
        outside.iter().for_each(FreshPages::touch);
        self.now = self.now + Ticks(1_000);
        backend.observe(&Progress::Entered { tsc: self.now });
        inside.iter().for_each(FreshPages::touch);
        self.now = self.now + Ticks(1_000);
        backend.observe(&Progress::Left {
            tsc: self.now,
            halted: Ticks(0),
            ring: Some(ring),
        });
        events..=events + OWN_FAULTS
    }

    fn deadline(&mut self, _: &mut dyn CounterBackend) -> Asked {
        Asked::NotTimed
    }
}

fn intel(select: u16, umask: u8) -> EventCode {
    EventCode::Selected {
        family: EventFamily::Intel,
        select,
        umask,
    }
}
