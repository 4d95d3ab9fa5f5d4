//! A counter: the difference of what a vCPU's clock says at two times.

use std::num::NonZeroU64;

use super::clocks::{Clock, SimClocks, What};

/// What one counter counts of its vCPU's events.
#[derive(Debug)]
pub(super) struct SimSlot {
    what: What,
    paired: bool,
    /// Events until it was stopped last.
    settled: u64,
    /// While it runs: events on the vCPU's clock from which on it counts.
    from: Option<u64>,
    /// The count at which the armed overflow comes.
    armed: Option<u64>,
    /// When that is at the earliest, on the vCPU's clock.
    due: Option<u64>,
    /// Running since before the present interval began.
    in_interval: bool,
}

impl SimSlot {
    /// A stopped counter.
    pub(super) fn new(what: What, paired: bool) -> Self {
        SimSlot {
            what,
            paired,
            settled: 0,
            from: None,
            armed: None,
            due: None,
            in_interval: false,
        }
    }

    pub(super) fn what(&self) -> What {
        self.what
    }

    /// Whether it is on two slots.
    pub(super) fn is_paired(&self) -> bool {
        self.paired
    }

    /// When the armed overflow comes at the earliest, on the vCPU's clock, while it runs.
    pub(super) fn due(&self) -> Option<u64> {
        self.due
    }

    /// Events so far.
    pub(super) fn count(&self, clocks: &SimClocks, clock: &Clock) -> u64 {
        let running = self.from.map_or(0, |from| {
            let now = clock.events(clocks, self.what);
            now.saturating_sub(from)
        });
        self.settled.saturating_add(running)
    }

    /// Counts from now on.
    pub(super) fn start(&mut self, clocks: &SimClocks, clock: &Clock) {
        if self.from.is_none() {
            self.from = Some(clock.events(clocks, self.what));
            self.foresee(clocks, clock);
        }
    }

    /// Counts no longer.
    pub(super) fn stop(&mut self, clocks: &SimClocks, clock: &Clock) {
        self.settled = self.count(clocks, clock);
        (self.from, self.due) = (None, None);
        self.in_interval = false;
    }

    /// An interval begins, while it runs.
    pub(super) fn enter(&mut self) {
        self.in_interval = true;
    }

    /// An interval is over; true when the armed overflow came in it.
    pub(super) fn leave(&mut self, clocks: &SimClocks, clock: &Clock) -> bool {
        if !std::mem::take(&mut self.in_interval) {
            // Started in its midst, it counts from the next one on.
            self.from = None;
            self.start(clocks, clock);
            return false;
        }
        let Some(target) = self.armed else {
            return false;
        };
        if self.count(clocks, clock) < target {
            if self.what.rings.matter() || self.what.threshold.is_some() {
                self.foresee(clocks, clock);
            }
            return false;
        }
        (self.armed, self.due) = (None, None);
        true
    }

    /// Asks for an overflow when `after` further events have been counted.
    pub(super) fn arm(&mut self, clocks: &SimClocks, clock: &Clock, after: Option<NonZeroU64>) {
        let count = self.count(clocks, clock);
        self.armed = after.map(|after| count.saturating_add(after.get()));
        self.foresee(clocks, clock);
    }

    /// Finds out when the armed overflow will come.
    fn foresee(&mut self, clocks: &SimClocks, clock: &Clock) {
        self.due = self.armed.zip(self.from).and_then(|(target, from)| {
            let events = from.saturating_add(target.saturating_sub(self.settled));
            clock.reaches(clocks, self.what, events)
        });
    }
}
