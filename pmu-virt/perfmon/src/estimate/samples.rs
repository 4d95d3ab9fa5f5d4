//! The samples of each event in the window, on one axis of time.

use pmu_model::Nanos;

use super::Stored;

/// One slice in which an event was counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// Index of the slice in the window.
    pub(super) slice: usize,
    /// Its begin, in nanoseconds from the begin of the window.
    pub(super) start: f64,
    /// Its length in nanoseconds, above 0.
    pub(super) length: f64,
    /// Events per nanosecond.
    pub(super) rate: f64,
}

impl Sample {
    pub(super) fn end(&self) -> f64 {
        self.start + self.length
    }
}

/// The samples of each event, in the order of time.
pub(super) fn by_event<'a>(
    events: usize,
    slices: impl Iterator<Item = &'a Stored>,
) -> Vec<Vec<Sample>> {
    let mut all = vec![Vec::new(); events];
    let mut start = 0.0;
    for (slice, stored) in slices.enumerate() {
        let length = float(stored.length.0);
        for &(event, count) in &stored.counts {
            if let Some(samples) = all.get_mut(event).filter(|_| stored.length > Nanos(0)) {
                let rate = float(count) / length;
                samples.push(Sample {
                    slice,
                    start,
                    length,
                    rate,
                });
            }
        }
        start += length;
    }
    all
}

/// Rates and places are estimates: 53 bits of them will do.
pub(super) fn float(value: u64) -> f64 {
    value as f64
}
