//! What the estimates of multiplexed events cost: a slice, and a look.

use criterion::{Criterion, criterion_group, criterion_main};
use perfmon::Nanos;
use perfmon::estimate::Estimator;

const EVENTS: usize = 12;
const SETS: usize = 4;

/// The slice of that number of a run whose phases change.
fn slice(number: usize) -> Vec<(usize, u64)> {
    let phase = number / 37 % 5;
    let events = (0..EVENTS).filter(|event| event % SETS == number % SETS);
    let count = |event: usize| 10_000 + 7_000 * ((event * 5 + phase * 11) % 13);
    events
        .map(|event| (event, u64::try_from(count(event)).unwrap_or(0)))
        .collect()
}

fn estimate(criterion: &mut Criterion) {
    let slices: Vec<_> = (0..10_000).map(slice).collect();
    let mut estimator = Estimator::new(EVENTS);
    let mut next = slices.iter().cycle();
    criterion.bench_function("push a slice, 12 events in 4 sets", |bencher| {
        bencher.iter(|| {
            if let Some(slice) = next.next() {
                estimator.push(Nanos(1_000_000), slice);
            }
        });
    });
    criterion.bench_function("estimates of 12 events", |bencher| {
        bencher.iter(|| estimator.estimates());
    });
}

criterion_group!(benches, estimate);
criterion_main!(benches);
