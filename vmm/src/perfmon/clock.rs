//! How long a vCPU ran, was halted, and could have run and did not.

use std::time::{Duration, Instant};

use crate::sys::{HaltStats, thread_cpu_time};

/// How a vCPU spent its time, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Times {
    /// On a CPU, in the guest or for it, halted time left out.
    pub(crate) ran: u64,
    /// Others had its core or its host CPU.
    pub(crate) stolen: u64,
    /// Halted, or not started.
    pub(crate) halted: u64,
}

/// Why a vCPU is not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rested {
    /// It waits for its turn.
    Runnable,
    /// It is halted.
    Idle,
    /// It may not run: barred or blocked. This is nobody's time.
    Held,
}

/// What the host knows at one instant; only differences mean something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Instants {
    wall: u64,
    /// CPU time of the thread.
    cpu: u64,
    /// Halted and off the CPU.
    waited: u64,
    /// Halted on the CPU: polling for the wake-up.
    polled: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// On the calling thread.
    Thread,
    /// On none.
    Off(Rested),
}

impl Times {
    /// Adds what has passed.
    fn add(&mut self, place: Place, from: Instants, to: Instants) {
        let passed = |of: fn(Instants) -> u64| of(to).saturating_sub(of(from));
        let wall = passed(|at| at.wall);
        match place {
            Place::Thread => {
                let (cpu, polled) = (passed(|at| at.cpu), passed(|at| at.polled));
                let waited = passed(|at| at.waited);
                self.ran += cpu.saturating_sub(polled);
                self.halted += waited + polled;
                self.stolen += wall.saturating_sub(cpu).saturating_sub(waited);
            }
            Place::Off(Rested::Runnable) => self.stolen += wall,
            Place::Off(Rested::Idle) => self.halted += wall,
            Place::Off(Rested::Held) => {}
        }
    }
}

/// Keeps a vCPU's times: two or three system calls when it changes its thread,
/// and when it is asked.
#[derive(Debug)]
pub(crate) struct VcpuClock {
    times: Times,
    place: Place,
    last: Instants,
    began: Instant,
    /// Without these halted time cannot be told from stolen.
    stats: Option<HaltStats>,
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl VcpuClock {
    pub(crate) fn new(stats: Option<HaltStats>) -> Self {
        Self {
            times: Times::default(),
            place: Place::Off(Rested::Held),
            last: Instants::default(),
            began: Instant::now(),
            stats,
        }
    }

    fn now(&mut self) -> Instants {
        let halted = self.stats.as_mut().and_then(|stats| stats.halted().ok());
        let halted = halted.unwrap_or_default();
        let wall = self.began.elapsed().as_nanos();
        Instants {
            wall: u64::try_from(wall).unwrap_or(u64::MAX),
            cpu: nanos(thread_cpu_time()),
            waited: nanos(halted.waited),
            polled: nanos(halted.polled),
        }
    }

    fn advance(&mut self, place: Place) {
        let now = self.now();
        self.times.add(self.place, self.last, now);
        self.last = now;
        self.place = place;
    }

    pub(super) fn comes(&mut self) {
        self.advance(Place::Thread);
    }

    pub(super) fn goes(&mut self, rest: Rested) {
        self.advance(Place::Off(rest));
    }

    /// Until now; `None` where this host cannot tell. Asked on the thread that
    /// has the vCPU.
    pub(super) fn times(&mut self) -> Option<Times> {
        self.stats.as_ref()?;
        self.advance(self.place);
        Some(self.times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_where_it_was_spent() {
        let at = |wall, cpu, waited, polled| Instants {
            wall,
            cpu,
            waited,
            polled,
        };
        fn check(place: Place, from: Instants, to: Instants, expected: (u64, u64, u64)) {
            let mut times = Times::default();
            times.add(place, from, to);
            assert_eq!((times.ran, times.stolen, times.halted), expected);
        }
        let thread = Place::Thread;
        check(thread, at(0, 0, 0, 0), at(100, 100, 0, 0), (100, 0, 0));
        check(thread, at(0, 0, 0, 0), at(100, 60, 0, 0), (60, 40, 0));
        check(thread, at(0, 0, 5, 5), at(100, 40, 55, 15), (30, 10, 60));
        // A halt that is told a little late.
        check(thread, at(0, 0, 0, 0), at(100, 60, 50, 0), (60, 0, 50));
        check(
            Place::Off(Rested::Idle),
            at(5, 9, 0, 0),
            at(9, 0, 0, 0),
            (0, 0, 4),
        );
        check(
            Place::Off(Rested::Runnable),
            at(5, 0, 0, 0),
            at(9, 7, 0, 0),
            (0, 4, 0),
        );
        check(
            Place::Off(Rested::Held),
            at(5, 0, 0, 0),
            at(9, 0, 0, 0),
            (0, 0, 0),
        );
    }
}
