//! How good the estimates are, beside linear scaling.
//!
//! `cargo test -p pmu-virt --test all -- --nocapture estimate::accuracy` prints the
//! figures of `docs/internals/multiplexing.md`.

use super::workload::{CONSTANT, Kind, PHASES, Random, Run, run};
use pmu_virt::Nanos;
use pmu_virt::perfmon::estimate::Estimator;
use std::ops::Range;

/// One event of one workload.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    /// Events that linear scaling is off by, and the estimator.
    linear: u64,
    estimate: u64,
    truth: u64,
    apart: bool,
}

fn outcomes(run: &Run) -> Vec<Outcome> {
    let mut estimator = Estimator::new(run.truth.len());
    for (length, counts) in &run.slices {
        estimator.push(Nanos(*length), counts);
    }
    let estimates = estimator.estimates().into_iter();
    estimates
        .zip(run.truth.iter().zip(&run.apart))
        .map(|(estimate, (truth, apart))| {
            let estimate = estimate.expect("every event is in a set");
            assert!(*truth > 0, "every event happens");
            Outcome {
                linear: estimate.linear().abs_diff(*truth),
                estimate: estimate.value.abs_diff(*truth),
                truth: *truth,
                apart: *apart,
            }
        })
        // One that is always counted is exact by either.
        .filter(|outcome| outcome.linear > 0 || outcome.estimate > 0)
        .collect()
}

fn all(kind: &Kind, seeds: Range<u64>) -> Vec<Outcome> {
    seeds.flat_map(|seed| outcomes(&run(kind, seed))).collect()
}

/// Relative errors in percent: median and 90th percentile of linear scaling,
/// then of the estimator.
fn figures(outcomes: &[Outcome]) -> [f64; 4] {
    let quantile = |part: f64, off: fn(&Outcome) -> u64| {
        let relative = |outcome: &Outcome| 100.0 * off(outcome) as f64 / outcome.truth as f64;
        let mut errors: Vec<f64> = outcomes.iter().map(relative).collect();
        errors.sort_by(f64::total_cmp);
        errors[(part * (errors.len() - 1) as f64).round() as usize]
    };
    [
        quantile(0.5, |outcome| outcome.linear),
        quantile(0.9, |outcome| outcome.linear),
        quantile(0.5, |outcome| outcome.estimate),
        quantile(0.9, |outcome| outcome.estimate),
    ]
}

/// Prints a row of the table, and checks that median and 90th percentile are at
/// most that part of linear scaling's.
fn check(name: &str, outcomes: &[Outcome], most: f64) {
    let [linear50, linear90, own50, own90] = figures(outcomes);
    let (part50, part90) = (own50 / linear50, own90 / linear90);
    println!(
        "| {name} | {} | {linear50:.3} | {own50:.3} | {part50:.2} | {linear90:.2} | {own90:.2} | {part90:.2} |",
        outcomes.len()
    );
    assert!(part50 <= most, "{name}: median {part50:.2} of linear's");
    assert!(
        part90 <= most,
        "{name}: 90th percentile {part90:.2} of linear's"
    );
}

#[test]
fn accuracy_on_twenty_workloads_and_on_further_ones() {
    println!(
        "| workloads | events | median, linear | estimator | part | p90, linear | estimator | part |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    check("20", &all(&PHASES, 700_000..700_020), 0.6);
    let further = all(&PHASES, 800_000..800_200);
    check("200 further", &further, 0.6);
    let (apart, together): (Vec<_>, Vec<_>) = further.iter().partition(|o| o.apart);
    check("of these: events that change together", &together, 0.6);
    check("of these: events with phases of their own", &apart, 0.9);
    for sets in 2..=4 {
        let kind = Kind {
            sets: (sets, sets),
            ..PHASES
        };
        let seeds = 900_000 + sets * 1000;
        check(
            &format!("200 of {sets} sets"),
            &all(&kind, seeds..seeds + 200),
            0.6,
        );
    }
}

/// Events of one workload share its phases, so twenty workloads are few, and
/// their figures scatter.
#[test]
fn accuracy_on_many_twenties() {
    let mut parts = [Vec::new(), Vec::new()];
    for twenty in 0..50 {
        let first = 960_000 + twenty * 20;
        let [linear50, linear90, own50, own90] = figures(&all(&PHASES, first..first + 20));
        parts[0].push(own50 / linear50);
        parts[1].push(own90 / linear90);
    }
    let held = parts[0].iter().zip(&parts[1]);
    let held = held
        .filter(|(median, p90)| **median <= 0.6 && **p90 <= 0.6)
        .count();
    for (name, parts) in ["median", "p90"].iter().zip(&mut parts) {
        parts.sort_by(f64::total_cmp);
        println!(
            "| {name} | {:.2} | {:.2} | {:.2} |",
            parts[0], parts[25], parts[49]
        );
    }
    println!("both at most 0.60 in {held} of 50");
    assert!(held >= 45, "{held} of 50");
}

#[test]
fn accuracy_by_length_of_phases() {
    let lengths = [
        (0.1, 0.2, 1.1),
        (0.3, 0.6, 1.1),
        (0.5, 1.0, 1.1),
        (1.0, 2.0, 1.1),
        (2.0, 4.0, 0.7),
        (5.0, 10.0, 0.6),
        (10.0, 20.0, 0.6),
        (20.0, 40.0, 0.6),
    ];
    for (index, (shortest, longest, most)) in (0..).zip(lengths) {
        let kind = Kind {
            phase_rounds: Some((shortest, longest)),
            ..PHASES
        };
        let seeds = 910_000 + index * 1000;
        let name = format!("200, phases of {shortest} to {longest} rounds");
        check(&name, &all(&kind, seeds..seeds + 200), most);
    }
}

/// Events that change together only, or hardly any that do.
#[test]
fn accuracy_by_share_of_events_with_phases_of_their_own() {
    for (index, (apart, most)) in (0..).zip([(0.0, 0.6), (0.5, 0.8), (1.0, 1.0)]) {
        let kind = Kind { apart, ..PHASES };
        let seeds = 920_000 + index * 1000;
        let name = format!("200, {} % of the events on their own", 100.0 * apart);
        check(&name, &all(&kind, seeds..seeds + 200), most);
    }
}

/// Prints in how many cases the error is above 1.05 times that of linear
/// scaling, and checks that these are at most that part of all. An error of 0
/// beside one of 0 is as good.
fn check_constant(name: &str, outcomes: &[Outcome], most: f64) {
    let worse = |outcome: &&Outcome| outcome.estimate * 100 > outcome.linear * 105;
    let worse: Vec<_> = outcomes.iter().filter(worse).collect();
    let [linear50, linear90, own50, own90] = figures(outcomes);
    println!(
        "| {name} | {} | {linear50:.4} | {own50:.4} | {linear90:.3} | {own90:.3} | {} |",
        outcomes.len(),
        worse.len()
    );
    let part = worse.len() as f64 / outcomes.len() as f64;
    assert!(part <= most, "{name}: {worse:?}");
    assert!(
        own50 <= 1.05 * linear50 && own90 <= 1.05 * linear90,
        "{name}"
    );
}

#[test]
fn accuracy_at_constant_rates_is_never_below_linear_scaling() {
    let quiet = Kind {
        noise: 0.0,
        ..CONSTANT
    };
    check_constant("without noise", &all(&quiet, 930_000..930_200), 0.0);
    check_constant("with noise", &all(&CONSTANT, 931_000..931_200), 0.0);
    let noisy = Kind {
        noise: 0.9,
        ..CONSTANT
    };
    check_constant("with much noise", &all(&noisy, 932_000..932_200), 0.0);
}

/// Counts that scatter far more than those of `sim` do.
fn scattered(seed: u64, draw: fn(&mut Random) -> f64) -> Run {
    let random = &mut Random(seed);
    let sets = random.whole(2, 4) as usize;
    let slices = random.whole(20, 800) as usize;
    let mean = random.scale(5.0, 1e6);
    let mut truth = vec![0; sets * 2];
    let mut taken = Vec::new();
    for slice in 0..slices {
        let mut counts = Vec::new();
        for (event, total) in truth.iter_mut().enumerate() {
            let count = (mean * draw(random)) as u64;
            *total += count;
            if event % sets == slice % sets {
                counts.push((event, count));
            }
        }
        taken.push((1_000_000, counts));
    }
    Run {
        slices: taken,
        apart: vec![false; truth.len()],
        truth,
    }
}

#[test]
fn accuracy_at_constant_rates_that_scatter() {
    type Draw = fn(&mut Random) -> f64;
    let draws: [(&str, Draw); 4] = [
        ("even by 5 %", |random| 0.95 + 0.1 * random.unit()),
        ("even by 50 %", |random| 0.5 + random.unit()),
        ("near normal, 10 %", |random| {
            let sum: f64 = (0..12).map(|_| random.unit()).sum();
            1.0 + 0.1 * (sum - 6.0)
        }),
        ("exponential", |random| -(1.0 - random.unit()).ln()),
    ];
    for (index, (name, draw)) in (0..).zip(draws) {
        let seeds = 940_000 + index * 1000;
        let outcomes: Vec<_> = (seeds..seeds + 200)
            .flat_map(|seed| outcomes(&scattered(seed, draw)))
            .collect();
        check_constant(name, &outcomes, 0.01);
    }
}
