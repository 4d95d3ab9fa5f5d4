//! What a multiplexed event would have counted, had it been counted all the
//! time.
//!
//! - [`linear`] is the specification's scaling (perfmon2 §3.7.2).
//! - [`Estimator`] finds the phases of the run in the counts of all events, and
//!   scales within each phase.
//!
//! Method, figures and limits are in `docs/internals/multiplexing.md`.

mod jumps;
mod linear;
mod locate;
mod review;
mod samples;
mod total;

pub use linear::linear;

use std::collections::VecDeque;

use pmu_model::Nanos;

use jumps::{Jump, Track};
use locate::boundaries;
use review::reviewed;
use samples::{Sample, float};
use total::{Step, Total, Walk};

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
    /// Time in which the event was counted.
    pub active: Nanos,
    /// The whole time.
    pub total: Nanos,
}

impl Estimate {
    /// What the specification's scaling makes of the same count.
    pub fn linear(&self) -> u64 {
        linear(self.counted, self.active, self.total).unwrap_or(self.counted)
    }
}

/// Estimates the counts of multiplexed events, slice by slice.
///
/// Keeps a few numbers an event and the last 192 slices, however long the run
/// is. Events are numbered from 0 by the caller; the slices show which of them
/// share a set.
#[derive(Clone, Debug)]
pub struct Estimator {
    totals: Vec<Total>,
    known: Vec<Known>,
    /// Of all slices.
    time: Nanos,
    window: VecDeque<Stored>,
    /// Slices at the front of the window that are in the totals.
    settled: usize,
}

/// What has been counted of an event.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    counted: u64,
    active: Nanos,
}

/// A slice in the window.
#[derive(Clone, Debug)]
struct Stored {
    length: Nanos,
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
            time: Nanos(0),
            window: VecDeque::new(),
            settled: 0,
        }
    }

    /// Takes the next slice: its length in monitored time, and the events that
    /// were counted in it, each with its count. An event that is not there was
    /// not counted; a slice without any is time in which nothing was. Events
    /// that this estimator does not have are ignored, and of an event that is
    /// there twice the first count is taken.
    pub fn push(&mut self, length: Nanos, counts: &[(usize, u64)]) {
        self.time += length;
        let mut stored = Stored {
            length,
            counts: Vec::new(),
        };
        for &(event, count) in counts {
            let Some(known) = self.known.get_mut(event) else {
                continue;
            };
            if stored.count(event).is_some() {
                continue;
            }
            known.counted = known.counted.saturating_add(count);
            known.active += length;
            stored.counts.push((event, count));
        }
        self.window.push_back(stored);
        if self.window.len() >= WINDOW {
            self.settle_a_block();
        }
    }

    /// The estimates of all events; `None` for one that was counted at no time.
    pub fn estimates(&self) -> Vec<Option<Estimate>> {
        let view = self.view();
        let one = |event| self.estimate_in(&view, event);
        (0..self.known.len()).map(one).collect()
    }

    /// The estimate of one event; `None` if it was counted at no time. For
    /// several, [`Estimator::estimates`] is cheaper.
    pub fn estimate(&self, event: usize) -> Option<Estimate> {
        self.estimate_in(&self.view(), event)
    }

    fn estimate_in(&self, view: &View, event: usize) -> Option<Estimate> {
        let known = self
            .known
            .get(event)
            .filter(|known| known.active > Nanos(0))?;
        let mut total = self.totals.get(event)?.clone();
        self.settle(view, event, &mut total, self.window.len());
        let blind = total.blind_events((known.counted, known.active));
        Some(Estimate {
            value: known.counted.saturating_add(blind),
            counted: known.counted,
            active: known.active,
            total: self.time,
        })
    }

    /// Adds all but the last block to the totals, and forgets the first.
    fn settle_a_block(&mut self) {
        let until = WINDOW - BLOCK;
        let view = self.view();
        let mut totals = std::mem::take(&mut self.totals);
        for (event, total) in totals.iter_mut().enumerate() {
            self.settle(&view, event, total, until);
        }
        self.totals = totals;
        self.window.drain(..BLOCK);
        self.settled = until - BLOCK;
    }

    fn view(&self) -> View {
        let samples = samples::by_event(self.known.len(), self.window.iter());
        let tracks: Vec<Track> = samples.iter().map(|samples| Track::of(samples)).collect();
        let length = self.window.iter().map(|slice| float(slice.length.0)).sum();
        View {
            jumps: reviewed(&tracks, length),
            samples,
            length,
        }
    }

    /// Adds the slices from the settled ones up to `until` to a total.
    fn settle(&self, view: &View, event: usize, total: &mut Total, until: usize) {
        let jumps: Vec<&[Jump]> = view.jumps.iter().map(Vec::as_slice).collect();
        let boundaries = boundaries(&jumps, event, view.length);
        let mut walk = Walk::new(&boundaries, view.last_before(event, self.settled));
        let mut start = 0.0;
        for (slice, stored) in self.window.iter().enumerate().take(until) {
            if slice >= self.settled {
                let step = Step {
                    slice,
                    start,
                    length: stored.length,
                    count: stored.count(event),
                };
                walk.step(total, &step);
            }
            start += float(stored.length.0);
        }
    }
}

/// The window, seen as a whole.
#[derive(Debug)]
struct View {
    /// Of each event, as are the jumps.
    samples: Vec<Vec<Sample>>,
    jumps: Vec<Vec<Jump>>,
    /// Nanoseconds.
    length: f64,
}

impl View {
    /// When the event's last sample before a slice began; 0 without one.
    fn last_before(&self, event: usize, slice: usize) -> f64 {
        let before = |sample: &&Sample| sample.slice < slice;
        let samples = self.samples.get(event).into_iter().flatten();
        let last = samples.take_while(before).last();
        last.map_or(0.0, |sample| sample.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_takes_no_more_memory_than_a_short_one() {
        let mut estimator = Estimator::new(3);
        for slice in 0..10_000u64 {
            let event = usize::from(slice % 3 == 0);
            let count = if slice / 700 % 2 == 0 { 5_000 } else { 90_000 };
            estimator.push(Nanos(1_000_000), &[(event, count), (2, count), (9, 1)]);
            assert!(estimator.window.len() < WINDOW);
            assert!(estimator.settled <= estimator.window.len());
        }
        assert!(estimator.window.capacity() <= 2 * WINDOW);
        // Counted all the time, through all blocks: exact.
        let always = estimator.estimate(2).expect("counted");
        assert_eq!(always.value, always.counted);
        // 7 phases of 700 slices at 90,000; 7 and one of 200 at 5,000.
        let truth: u64 = 5_100 * 5_000 + 4_900 * 90_000;
        for event in 0..2 {
            let estimate = estimator.estimate(event).expect("counted");
            assert_eq!(estimate.total, Nanos(10_000_000_000));
            assert!(
                estimate.value.abs_diff(truth) * 1000 < truth,
                "{estimate:?}"
            );
        }
    }
}
