//! Three events share one counter in turn: what each would have counted.
//!
//! `cargo run -p perfmon --example estimate`

use perfmon::Nanos;
use perfmon::estimate::Estimator;

const MS: Nanos = Nanos(1_000_000);

fn main() {
    let mut estimator = Estimator::new(3);
    for slice in 0..30 {
        let event = slice % 3;
        // The second event becomes ten times as frequent half-way through.
        let per_ms = match (event, slice < 15) {
            (1, true) => 100,
            (1, false) => 1_000,
            (event, _) => 50 * (event as u64 + 1),
        };
        estimator.push(MS, &[(event, per_ms)]);
    }
    for (event, estimate) in estimator.estimates().iter().enumerate() {
        println!("event {event} over 30 ms: {estimate:?}");
    }
}
