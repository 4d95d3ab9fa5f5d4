//! Where one event's rate jumped, as far as its own samples tell.

use super::samples::Sample;

/// A sample so many standard deviations off the level belongs to another phase.
const SIGNIFICANT: f64 = 6.0;
/// Most neighbours are of one phase, so the smaller differences of neighbours
/// are noise. This is the lower quartile of the absolute difference of two
/// normal samples, in standard deviations of one.
const QUARTILE: f64 = 0.4506;
/// See [`worthwhile`].
const PRICE: f64 = 8.0;
/// The least noise, relative to the level, that is reckoned with.
const LEAST_NOISE: f64 = 1e-3;
/// With more jumps for each sample, phases are shorter than the rounds of the
/// sets. Most of them are never seen, and giving those that are seen their true
/// length would lose the others: scaling by time is better, it has no bias.
const TOO_MANY: f64 = 0.4;
/// With more jumps for each sample, a sample between two others' rates may as
/// well be a short phase.
const MANY: f64 = 0.3;

/// A stretch of time in nanoseconds from the begin of the window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Span {
    pub(super) fn width(&self) -> f64 {
        self.high - self.low
    }

    pub(super) fn meets(&self, other: &Span) -> bool {
        self.low <= other.high && other.low <= self.high
    }
}

/// A change of an event's rate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Jump {
    /// When it was.
    pub(super) span: Span,
    /// If it was within a sample.
    pub(super) within: Option<Within>,
}

/// A sample whose rate lies between those before and after it: taken for one
/// that holds the end of the one phase and the begin of the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Within {
    /// Its slice's index in the window.
    pub(super) slice: usize,
    pub(super) sample: Span,
    /// The blind time before and after it: where the rate jumped if the sample
    /// is a phase of its own.
    pub(super) around: [Span; 2],
}

impl Jump {
    /// A jump in blind time.
    pub(super) fn blind(span: Span) -> Self {
        Jump { span, within: None }
    }
}

/// What one event's samples tell.
#[derive(Clone, Debug)]
pub(super) struct Track {
    /// In the order of time.
    pub(super) jumps: Vec<Jump>,
    /// Whether there are many for so few samples.
    pub(super) busy: bool,
}

impl Track {
    pub(super) fn of(samples: &[Sample]) -> Self {
        let jumps = jumps(samples);
        let share = jumps.len() as f64 / samples.len().max(1) as f64;
        Track {
            jumps: if share > TOO_MANY { Vec::new() } else { jumps },
            busy: share > MANY,
        }
    }
}

fn jumps(samples: &[Sample]) -> Vec<Jump> {
    let levels = levels(samples);
    if !worthwhile(samples, &levels) {
        return Vec::new();
    }
    let mut jumps = Vec::new();
    let mut at = 0;
    while let (Some(before), Some(next)) = (levels.get(at), levels.get(at + 1)) {
        let after = levels.get(at + 2);
        let after = after.filter(|after| is_mixture(before, next, after));
        jumps.push(match after {
            Some(after) => mixed(samples, [before, next, after]),
            None => Jump::blind(gap(samples, before, next)),
        });
        at += if after.is_some() { 2 } else { 1 };
    }
    jumps
}

fn is_mixture(before: &Level, middle: &Level, after: &Level) -> bool {
    let inside = |low: f64, high: f64| low < middle.rate && middle.rate < high;
    middle.first == middle.last
        && (inside(before.rate, after.rate) || inside(after.rate, before.rate))
}

/// The sample in the middle tells how much of it was at which rate.
fn mixed(samples: &[Sample], [before, middle, after]: [&Level; 3]) -> Jump {
    let sample = samples[middle.first];
    let height = after.rate - before.rate;
    let place = sample.start + sample.length * (after.rate - middle.rate) / height;
    let doubt = sample.length * before.tolerance.max(after.tolerance) / height.abs();
    Jump {
        span: Span {
            low: (place - doubt).max(sample.start),
            high: (place + doubt).min(sample.end()),
        },
        within: Some(Within {
            slice: sample.slice,
            sample: Span {
                low: sample.start,
                high: sample.end(),
            },
            around: [gap(samples, before, middle), gap(samples, middle, after)],
        }),
    }
}

fn gap(samples: &[Sample], before: &Level, after: &Level) -> Span {
    Span {
        low: samples[before.last].end(),
        high: samples[after.first].start,
    }
}

/// A stretch of samples of one rate.
#[derive(Clone, Copy, Debug)]
struct Level {
    /// Indices of the first and the last sample.
    first: usize,
    last: usize,
    /// The mean of theirs.
    rate: f64,
    /// How far from `rate` a sample of this level may be.
    tolerance: f64,
}

fn levels(samples: &[Sample]) -> Vec<Level> {
    let noise = noise(samples);
    let mut levels: Vec<Level> = Vec::new();
    for (index, sample) in samples.iter().enumerate() {
        // Counts are whole: one event more or less is never a phase.
        let tolerance = |rate: f64| SIGNIFICANT * (noise * rate).max(1.0 / sample.length);
        match levels.last_mut() {
            Some(level) if (sample.rate - level.rate).abs() <= level.tolerance => {
                let size = (index - level.first + 1) as f64;
                level.rate += (sample.rate - level.rate) / size;
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

/// Whether levels explain so much of what the samples differ by that they are
/// no whim of a few samples: the logarithm of the likelihood has to grow by
/// [`PRICE`] for each further level.
fn worthwhile(samples: &[Sample], levels: &[Level]) -> bool {
    let square = |rate: f64, level: f64| {
        if level > 0.0 {
            ((rate - level) / level).powi(2)
        } else {
            0.0
        }
    };
    let count = samples.len() as f64;
    let mean = samples.iter().map(|sample| sample.rate).sum::<f64>() / count;
    let all: f64 = samples.iter().map(|s| square(s.rate, mean)).sum();
    let of = |level: &Level| {
        let own = samples[level.first..=level.last].iter();
        own.map(|s| square(s.rate, level.rate)).sum::<f64>()
    };
    let rest: f64 = levels.iter().map(of).sum();
    let gain = (all / (rest + count * LEAST_NOISE.powi(2))).ln() * count / 2.0;
    gain >= PRICE * levels.len().saturating_sub(1) as f64
}

/// Standard deviation of a sample, relative to its level.
fn noise(samples: &[Sample]) -> f64 {
    let difference = |pair: &[Sample]| {
        let sum = pair[0].rate + pair[1].rate;
        if sum > 0.0 {
            2.0 * (pair[0].rate - pair[1].rate).abs() / sum
        } else {
            0.0
        }
    };
    let mut all: Vec<f64> = samples.windows(2).map(difference).collect();
    all.sort_by(f64::total_cmp);
    let quartile = all.get(all.len() / 4).copied().unwrap_or(0.0);
    (quartile / QUARTILE).max(LEAST_NOISE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples of 10 ns every 20 ns.
    fn check(counts: &[u32], expected: &[(f64, f64, Option<usize>)]) {
        let sample = |(slice, count): (usize, &u32)| Sample {
            slice,
            start: 20.0 * slice as f64,
            length: 10.0,
            rate: f64::from(*count) / 10.0,
        };
        let samples: Vec<_> = counts.iter().enumerate().map(sample).collect();
        let found: Vec<_> = jumps(&samples)
            .iter()
            .map(|jump| {
                let middle = jump.within.map(|within| within.slice);
                (jump.span.low, jump.span.high, middle)
            })
            .collect();
        assert_eq!(found.len(), expected.len(), "{counts:?}: {found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(found.2, expected.2, "{counts:?}");
            assert!((found.0 - expected.0).abs() < 0.01, "{counts:?}: {found:?}");
            assert!((found.1 - expected.1).abs() < 0.01, "{counts:?}: {found:?}");
        }
    }

    #[test]
    fn jumps_are_bracketed_by_samples_or_found_in_one() {
        check(&[], &[]);
        check(&[1000], &[]);
        check(&[1000, 1000, 1001, 999, 1000], &[]);
        check(&[0, 0, 0, 0], &[]);
        let between = (30.0, 40.0, None);
        check(&[1000, 1000, 9000, 9000, 9000, 9000], &[between]);
        check(&[1000, 1000, 0, 0, 0, 0], &[between]);
        // Three quarters of the third sample were at 8000: the jump is at 42.5,
        // to within six times the least noise of that level.
        check(
            &[0, 0, 6000, 8000, 8000, 8000],
            &[(42.5 - 0.06, 42.5 + 0.06, Some(2))],
        );
        // Beyond both neighbours: a phase of its own.
        check(
            &[1000, 1000, 1000, 5000, 1000, 1000, 1000, 1000],
            &[(50.0, 60.0, None), (70.0, 80.0, None)],
        );
        // All that differs is noise.
        check(&[1000, 2000, 1500, 500, 1200, 700], &[]);
    }
}
