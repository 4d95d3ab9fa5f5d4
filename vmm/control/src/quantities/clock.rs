//! How long a vCPU ran, was halted, and could have run and did not.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the host's monotonic clock.
pub(super) fn monotonic_ns() -> u64 {
    let now = Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// How long a vCPU was halted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Halted {
    /// Its thread slept.
    pub slept: Duration,
    /// Its thread polled for the wake-up.
    pub polled: Duration,
}

/// Tells how long a vCPU was halted.
pub trait HaltTimes: Debug + Send {
    /// Until now; `None` if the host does not tell.
    fn halted(&mut self) -> Option<Halted>;

    /// Whether a halt takes the host's time. Where it is skipped, nobody knows how long it was.
    fn take_time(&self) -> bool {
        true
    }
}

/// How a vCPU spent its time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Times {
    /// On a CPU, in the guest or for it, without halted time.
    pub(super) ran: Duration,
    /// Others had its core or its host CPU.
    pub(super) stolen: Duration,
    /// Halted, or not started.
    pub(super) halted: Duration,
}

/// Why no thread runs a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffCoreReason {
    /// It waits for its turn.
    Runnable,
    /// It is halted.
    Idle,
    /// It may not run. This is nobody's time.
    Held,
}

/// What the host knows at one instant. Only differences mean something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Reading {
    wall: Duration,
    /// CPU time of the thread.
    cpu: Duration,
    halted: Halted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whereabouts {
    /// On the calling thread.
    Thread,
    /// On no thread.
    Off(OffCoreReason),
}

impl Times {
    /// Adds what has passed.
    fn add(&mut self, place: Whereabouts, from: Reading, to: Reading) {
        let passed = |of: fn(Reading) -> Duration| of(to).saturating_sub(of(from));
        let wall = passed(|at| at.wall);
        match place {
            Whereabouts::Thread => {
                let cpu = passed(|at| at.cpu);
                let slept = passed(|at| at.halted.slept);
                let polled = passed(|at| at.halted.polled);
                self.ran += cpu.saturating_sub(polled);
                self.halted += slept + polled;
                self.stolen += wall.saturating_sub(cpu).saturating_sub(slept);
            }
            Whereabouts::Off(OffCoreReason::Runnable) => self.stolen += wall,
            Whereabouts::Off(OffCoreReason::Idle) => self.halted += wall,
            Whereabouts::Off(OffCoreReason::Held) => {}
        }
    }
}

/// Keeps a vCPU's times. It makes two or three system calls when the vCPU changes
/// its thread, and when somebody asks.
#[derive(Debug)]
pub(super) struct VcpuClock {
    times: Times,
    place: Whereabouts,
    last: Reading,
    began: Instant,
    /// Without these nobody knows which time was halted and which was stolen.
    halts: Option<Box<dyn HaltTimes>>,
}

impl Default for VcpuClock {
    fn default() -> Self {
        Self::new(None)
    }
}

impl VcpuClock {
    pub(super) fn new(halts: Option<Box<dyn HaltTimes>>) -> Self {
        Self {
            times: Times::default(),
            place: Whereabouts::Off(OffCoreReason::Held),
            last: Reading::default(),
            began: Instant::now(),
            halts,
        }
    }

    fn now(&mut self) -> Reading {
        let halted = self.halts.as_mut().and_then(|halts| halts.halted());
        let cpu = clock_gettime(ClockId::ThreadCPUTime);
        Reading {
            wall: self.began.elapsed(),
            cpu: Duration::try_from(cpu).unwrap_or_default(),
            halted: halted.unwrap_or_default(),
        }
    }

    fn advance(&mut self, place: Whereabouts) {
        let now = self.now();
        self.times.add(self.place, self.last, now);
        self.last = now;
        self.place = place;
    }

    pub(super) fn on_thread(&mut self) {
        self.advance(Whereabouts::Thread);
    }

    pub(super) fn off_thread(&mut self, reason: OffCoreReason) {
        self.advance(Whereabouts::Off(reason));
    }

    /// Whether [`Times::halted`] is how long the vCPU was halted.
    pub(super) fn knows_halts(&self) -> bool {
        self.halts.as_ref().is_some_and(|halts| halts.take_time())
    }

    /// Until now; `None` where this host cannot tell. To be asked on the thread
    /// that has the vCPU.
    pub(super) fn times(&mut self) -> Option<Times> {
        self.halts.as_ref()?;
        self.advance(self.place);
        Some(self.times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_where_it_was_spent() {
        let ns = Duration::from_nanos;
        let at = |wall, cpu, slept, polled| Reading {
            wall: ns(wall),
            cpu: ns(cpu),
            halted: Halted {
                slept: ns(slept),
                polled: ns(polled),
            },
        };
        fn check(place: Whereabouts, from: Reading, to: Reading, expected: [u128; 3]) {
            let mut times = Times::default();
            times.add(place, from, to);
            let found = [times.ran, times.stolen, times.halted].map(|time| time.as_nanos());
            assert_eq!(found, expected);
        }
        let thread = Whereabouts::Thread;
        check(thread, at(0, 0, 0, 0), at(100, 100, 0, 0), [100, 0, 0]);
        check(thread, at(0, 0, 0, 0), at(100, 60, 0, 0), [60, 40, 0]);
        check(thread, at(0, 0, 5, 5), at(100, 40, 55, 15), [30, 10, 60]);
        // KVM counts a halt a little late.
        check(thread, at(0, 0, 0, 0), at(100, 60, 50, 0), [60, 0, 50]);
        check(
            Whereabouts::Off(OffCoreReason::Idle),
            at(5, 9, 0, 0),
            at(9, 0, 0, 0),
            [0, 0, 4],
        );
        check(
            Whereabouts::Off(OffCoreReason::Runnable),
            at(5, 0, 0, 0),
            at(9, 7, 0, 0),
            [0, 4, 0],
        );
        check(
            Whereabouts::Off(OffCoreReason::Held),
            at(5, 0, 0, 0),
            at(9, 0, 0, 0),
            [0, 0, 0],
        );
    }
}
