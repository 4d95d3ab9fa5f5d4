//! Where one event's rate jumped, as far as its own samples tell.

use super::samples::Sample;

/// So many standard deviations from the level, a sample belongs to another
/// phase. Beyond six, no noise without tails gets in the life of a machine.
const SIGNIFICANT: f64 = 6.0;
/// The quarter of the smallest differences of neighbours is taken for noise:
/// phases do not change at every sample. For normal noise, the quartile of the
/// absolute difference of two samples, in standard deviations of one.
const QUARTILE: f64 = 0.4506;
/// The least noise, relative to the level, that is reckoned with.
const LEAST_NOISE: f64 = 1e-3;

/// A change of an event's rate, and between which times it must have been.
#[derive(Clone, Copy, Debug)]
pub(super) struct Jump {
    pub(super) low: f64,
    pub(super) high: f64,
    /// The sample that the change is in, by its index in the window; `None` if
    /// it was between two samples.
    pub(super) within: Option<usize>,
}

impl Jump {
    pub(super) fn width(&self) -> f64 {
        self.high - self.low
    }

    pub(super) fn meets(&self, other: &Jump) -> bool {
        self.low <= other.high && other.low <= self.high
    }
}

/// A stretch of samples with one rate.
#[derive(Clone, Copy, Debug)]
struct Level {
    /// Indices of the first and the last sample.
    first: usize,
    last: usize,
    rate: f64,
    /// Distance from `rate` up to which a sample may be of this level.
    tolerance: f64,
}

/// The jumps of one event, in the order of time.
pub(super) fn jumps(samples: &[Sample]) -> Vec<Jump> {
    let levels = levels(samples);
    let mut jumps = Vec::new();
    let mut at = 0;
    while let (Some(before), Some(next)) = (levels.get(at), levels.get(at + 1)) {
        let after = levels.get(at + 2).filter(|after| is_mixture(before, next, after));
        jumps.push(match after {
            Some(after) => mixed(samples, before, next, after),
            None => between(samples, before, next),
        });
        at += if after.is_some() { 2 } else { 1 };
    }
    jumps
}

/// Whether the middle one is a single sample that holds the end of one phase
/// and the begin of the other.
fn is_mixture(before: &Level, middle: &Level, after: &Level) -> bool {
    let inside = |low: f64, high: f64| low < middle.rate && middle.rate < high;
    middle.first == middle.last
        && (inside(before.rate, after.rate) || inside(after.rate, before.rate))
}

/// The sample in the middle tells how much of it was at which rate.
fn mixed(samples: &[Sample], before: &Level, middle: &Level, after: &Level) -> Jump {
    let sample = samples[middle.first];
    let height = after.rate - before.rate;
    let place = sample.start + sample.length * (after.rate - middle.rate) / height;
    let doubt = sample.length * before.tolerance.max(after.tolerance) / height.abs();
    Jump {
        low: (place - doubt).max(sample.start),
        high: (place + doubt).min(sample.end()),
        within: Some(sample.slice),
    }
}

/// Nothing of either sample is of the other's phase, but for what noise hides.
fn between(samples: &[Sample], before: &Level, after: &Level) -> Jump {
    let (left, right) = (samples[before.last], samples[after.first]);
    let height = (after.rate - before.rate).abs();
    let hidden = |level: &Level, sample: &Sample| {
        sample.length * (level.tolerance / height).min(1.0)
    };
    let _ = hidden;
    Jump {
        low: left.end(),
        high: right.start,
        within: None,
    }
}

fn levels(samples: &[Sample]) -> Vec<Level> {
    let noise = noise(samples);
    let mut levels: Vec<Level> = Vec::new();
    for (index, sample) in samples.iter().enumerate() {
        let tolerance = |rate: f64| SIGNIFICANT * (noise * rate).max(1.0 / sample.length);
        match levels.last_mut() {
            Some(level) if (sample.rate - level.rate).abs() <= level.tolerance => {
                let samples = (index - level.first) as f64;
                level.rate += (sample.rate - level.rate) / (samples + 1.0);
                level.tolerance = tolerance(level.rate);
                level.last = index;
            }
            _ => levels.push(Level {
                first: index,
                last: index,
                rate: sample.rate,
                tolerance: tolerance(sample.rate),
            }),
        }
    }
    levels
}

/// Standard deviation of a sample, relative to its level.
fn noise(samples: &[Sample]) -> f64 {
    let difference = |pair: &[Sample]| {
        let sum = pair[0].rate + pair[1].rate;
        match sum > 0.0 {
            true => 2.0 * (pair[0].rate - pair[1].rate).abs() / sum,
            false => 0.0,
        }
    };
    let mut all: Vec<f64> = samples.windows(2).map(difference).collect();
    all.sort_by(f64::total_cmp);
    let quartile = all.get(all.len() / 4).copied().unwrap_or(f64::INFINITY);
    (quartile / QUARTILE).max(LEAST_NOISE)
}
