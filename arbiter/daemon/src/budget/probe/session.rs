//! The events that a measurement has open. They are closed when it ends, however it ends.

use std::time::Duration;

use super::{MAX_EVENTS, NotMeasured};
use crate::budget::{Capacity, Errno, EventFd, EventSpec, ProbeCalls, ProbeEvent, Target, Times};

/// An event that was not on a counter in its first moments is on none.
const SETTLED: Duration = Duration::from_micros(20);

/// What came of pinning an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pinned {
    /// It has a counter, and keeps it until the session closes it.
    Had,
    /// There was none for it. It is closed.
    NoCounter,
    /// Time or events are used up.
    Limit,
}

pub(super) struct Session<'a> {
    calls: &'a mut dyn ProbeCalls,
    target: Target,
    started: Duration,
    max_time: Duration,
    opened: usize,
    held: Vec<EventFd>,
}

impl<'a> Session<'a> {
    pub(super) fn new(calls: &'a mut dyn ProbeCalls, target: Target, max_time: Duration) -> Self {
        Session {
            started: calls.now(),
            max_time,
            calls,
            target,
            opened: 0,
            held: Vec::new(),
        }
    }

    pub(super) fn elapsed(&mut self) -> Duration {
        self.calls.now().saturating_sub(self.started)
    }

    pub(super) fn capacity(&mut self) -> Option<Capacity> {
        Capacity::by_cpuid(|leaf| self.calls.cpuid(leaf))
    }

    /// Pins an event. An error is what `perf_event_open` or `read` answered.
    pub(super) fn pin(&mut self, spec: EventSpec) -> Result<Pinned, Errno> {
        if self.is_used_up() {
            return Ok(Pinned::Limit);
        }
        let event = self.open(spec, true)?;
        let times = self.first_times(event);
        match times? {
            Some(times) if !times.running.is_zero() => Ok(Pinned::Had),
            Some(times) if times.enabled.is_zero() => Ok(Pinned::Limit),
            // In error; or waiting, as an event does that this CPU's PMU never takes.
            _ => {
                self.close_last();
                Ok(Pinned::NoCounter)
            }
        }
    }

    /// Whether an event that is not pinned waits, with nothing pinned by us. Its times differ
    /// a little from the start, so what counts is whether it was on a counter at first, and
    /// whether the difference grows.
    pub(super) fn flexible_waits(
        &mut self,
        spec: EventSpec,
        watched: Duration,
    ) -> Result<Option<bool>, NotMeasured> {
        let event = self.open(spec, false)?;
        let first = self.first_times(event)?;
        let lost = |times: Times| times.enabled.saturating_sub(times.running);
        let waits = loop {
            let last = self.calls.read(event)?;
            let (Some(first), Some(last)) = (first, last) else {
                break None;
            };
            if first.enabled.is_zero() {
                break None;
            }
            if first.running.is_zero() || lost(last) > lost(first) {
                break Some(true);
            }
            if last.enabled >= first.enabled + watched {
                break Some(false);
            }
            // The CPU was somebody else's for most of the time.
            if self.elapsed() >= self.max_time / 2 {
                break None;
            }
        };
        self.close_to(0);
        Ok(waits)
    }

    /// How many of the events have a counter still, before the first that has not.
    pub(super) fn still_have(&mut self) -> Result<usize, Errno> {
        for (index, event) in self.held.iter().enumerate() {
            if self.calls.read(*event)?.is_none() {
                return Ok(index);
            }
        }
        Ok(self.held.len())
    }

    /// Number of events that are open.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// Whether there is no time left, or no event.
    pub(super) fn is_used_up(&mut self) -> bool {
        self.opened >= MAX_EVENTS || self.elapsed() >= self.max_time
    }

    /// The kernel moves a bound thread elsewhere when its CPU goes offline.
    pub(super) fn check_cpu(&mut self, cpu: u32) -> Result<(), NotMeasured> {
        match self.calls.current_cpu() {
            Ok(current) if current == cpu => Ok(()),
            Ok(_) => Err(NotMeasured::Offline(cpu)),
            Err(errno) => Err(NotMeasured::Failed {
                call: "getcpu",
                errno,
            }),
        }
    }

    /// Closes the last events, so that so many are left.
    pub(super) fn close_to(&mut self, left: usize) {
        while self.held.len() > left {
            self.close_last();
        }
    }

    fn open(&mut self, spec: EventSpec, pinned: bool) -> Result<EventFd, Errno> {
        let event = ProbeEvent {
            spec,
            target: self.target,
            pinned,
        };
        let event = self.calls.open(&event)?;
        self.opened += 1;
        self.held.push(event);
        Ok(event)
    }

    /// The times once they tell whether the event is on a counter; `None` at the end of the
    /// file.
    fn first_times(&mut self, event: EventFd) -> Result<Option<Times>, Errno> {
        loop {
            let times = self.calls.read(event)?;
            let early = |times: Times| times.running.is_zero() && times.enabled < SETTLED;
            if !times.is_some_and(early) || self.elapsed() >= self.max_time {
                return Ok(times);
            }
        }
    }

    fn close_last(&mut self) {
        if let Some(event) = self.held.pop() {
            self.calls.close(event);
        }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.close_to(0);
    }
}
