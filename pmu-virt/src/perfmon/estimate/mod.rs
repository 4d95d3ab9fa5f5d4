//! What a multiplexed event would have counted, had it been counted all the
//! time.
//!
//! - [`linear`] is the specification's scaling (perfmon2 §3.7.2).
//! - [`Estimator`] finds the phases of the run in the counts of all events, and
//!   scales within each phase.
//!
//! Method, figures and limits are in `docs/multiplexing.md`.

mod jumps;
mod linear;
mod locate;
mod samples;
mod total;

pub use linear::linear;

use jumps::{Jump, jumps};
use locate::{Boundary, boundaries};
use std::collections::VecDeque;
use total::{Total, Walk};

/// Slices that are settled at a time, and those that are kept on either side
/// of them to tell the phases.
const BLOCK: usize = 64;
/// Slices that are kept at most.
const WINDOW: usize = 3 * BLOCK;

/// The estimate of one event's count over the whole time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Events over the whole time, estimated; at least `counted`, and exactly
    /// that if there was no blind time. At most `u64::MAX`.
    pub value: u64,
    /// Events that were counted. At most `u64::MAX`.
    pub counted: u64,
    /// Nanoseconds in which the event was counted.
    pub active_ns: u64,
    /// Nanoseconds of the whole time.
    pub total_ns: u64,
}

impl Estimate {
    /// What the specification's scaling makes of the same count.
    pub fn linear(&self) -> u64 {
        linear(self.counted, self.active_ns, self.total_ns).unwrap_or(self.counted)
    }
}

/// Estimates the counts of multiplexed events, slice by slice.
///
/// Keeps a few numbers an event and the last 192 slices, however long the run
/// is. Events are numbered from 0 by the caller; which of them share a set is
/// not said, the slices show it.
#[derive(Clone, Debug)]
pub struct Estimator {
    totals: Vec<Total>,
    known: Vec<Known>,
    total_ns: u64,
    window: VecDeque<Stored>,
    /// Slices at the front of the window that are in the totals.
    settled: usize,
}

/// What has been counted of an event.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    counted: u64,
    active_ns: u64,
    /// Slices, also empty ones, in which it was counted.
    seen: bool,
}

/// A slice in the window.
#[derive(Clone, Debug)]
struct Stored {
    length_ns: u64,
    counts: Vec<(usize, u64)>,
}

impl Stored {
    fn count(&self, event: usize) -> Option<u64> {
        let found = self.counts.iter().find(|(index, _)| *index == event);
        found.map(|(_, count)| *count)
    }
}

impl Estimator {
    /// An estimator of `events` events, before the first slice.
    pub fn new(events: usize) -> Self {
        Estimator {
            totals: vec![Total::default(); events],
            known: vec![Known::default(); events],
            total_ns: 0,
            window: VecDeque::new(),
            settled: 0,
        }
    }

    /// The next slice: its length in nanoseconds of monitored time, and the
    /// events that were counted in it, each with its count. An event that is
    /// not there was not counted; a slice without any is time in which nothing
    /// was. Events that this estimator does not have are ignored, and of an
    /// event that is there twice the first count is taken.
    pub fn push(&mut self, length_ns: u64, counts: &[(usize, u64)]) {
        self.total_ns = self.total_ns.saturating_add(length_ns);
        let mut stored = Stored {
            length_ns,
            counts: Vec::new(),
        };
        for &(event, count) in counts {
            let Some(known) = self.known.get_mut(event) else {
                continue;
            };
            if stored.count(event).is_some() {
                continue;
            }
            known.seen = true;
            known.counted = known.counted.saturating_add(count);
            known.active_ns = known.active_ns.saturating_add(length_ns);
            stored.counts.push((event, count));
        }
        self.window.push_back(stored);
        if self.window.len() >= WINDOW {
            let until = WINDOW - BLOCK;
            let jumps = self.jumps();
            let mut totals = std::mem::take(&mut self.totals);
            for (event, total) in totals.iter_mut().enumerate() {
                self.settle(event, total, &jumps, until);
            }
            self.totals = totals;
            self.window.drain(..BLOCK);
            self.settled = until - BLOCK;
        }
    }

    /// The estimates of all events; `None` for one that was never counted.
    pub fn estimates(&self) -> Vec<Option<Estimate>> {
        let jumps = self.jumps();
        let one = |event| self.estimate_with(event, &jumps);
        (0..self.known.len()).map(one).collect()
    }

    /// The estimate of one event; `None` if it was never counted. For several,
    /// [`Estimator::estimates`] is cheaper.
    pub fn estimate(&self, event: usize) -> Option<Estimate> {
        self.estimate_with(event, &self.jumps())
    }

    fn estimate_with(&self, event: usize, jumps: &[Vec<Jump>]) -> Option<Estimate> {
        let known = self.known.get(event).filter(|known| known.seen)?;
        let mut total = self.totals.get(event)?.clone();
        self.settle(event, &mut total, jumps, self.window.len());
        let blind = total.blind_events((known.counted, known.active_ns));
        Some(Estimate {
            value: known.counted.saturating_add(blind),
            counted: known.counted,
            active_ns: known.active_ns,
            total_ns: self.total_ns,
        })
    }

    fn jumps(&self) -> Vec<Vec<Jump>> {
        let samples = samples::by_event(self.known.len(), self.window.iter());
        samples.iter().map(|samples| jumps(samples)).collect()
    }

    /// Adds the slices from the settled ones up to `until` to a total.
    fn settle(&self, event: usize, total: &mut Total, jumps: &[Vec<Jump>], until: usize) {
        let lengths = || self.window.iter().map(|slice| samples::float(slice.length_ns));
        let boundaries: Vec<Boundary> = boundaries(jumps, event, lengths().sum());
        let mut start = lengths().take(self.settled).sum();
        let mut walk = Walk::new(&boundaries, start);
        let slices = self.window.iter().enumerate().take(until).skip(self.settled);
        for (index, slice) in slices {
            let place = (index, start, slice.length_ns);
            walk.slice(total, place, slice.count(event));
            start += samples::float(slice.length_ns);
        }
    }
}
