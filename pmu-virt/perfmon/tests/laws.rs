//! What holds of every estimate.

use perfmon::Nanos;
use perfmon::estimate::{Estimate, Estimator, linear};
use proptest::prelude::*;

type Slices = Vec<(u64, Vec<(usize, u64)>)>;

fn estimates(events: usize, slices: &Slices) -> Vec<Option<Estimate>> {
    let mut estimator = Estimator::new(events);
    for (length, counts) in slices {
        estimator.push(Nanos(*length), counts);
    }
    let all = estimator.estimates();
    for (event, estimate) in all.iter().enumerate() {
        assert_eq!(estimator.estimate(event), *estimate);
    }
    all
}

#[test]
fn the_specification_s_example() {
    // Figure 3.32: 5, 6 and 5 of event A in slices 1, 3 and 5; 10, 15 and 15 of
    // event B in the others.
    assert_eq!(linear(16, Nanos(3), Nanos(6)), Some(32));
    assert_eq!(linear(40, Nanos(3), Nanos(6)), Some(80));
    let counts = [5, 10, 6, 15, 5, 15].into_iter().enumerate();
    let slices: Slices = counts
        .map(|(slice, count)| (1_000_000, vec![(slice % 2, count)]))
        .collect();
    let expected = |counted, value| {
        Some(Estimate {
            value,
            counted,
            active: Nanos(3_000_000),
            total: Nanos(6_000_000),
        })
    };
    // Three counts so small tell no phases.
    assert_eq!(estimates(2, &slices), [expected(16, 32), expected(40, 80)]);
}

#[test]
fn what_was_never_counted_has_no_estimate() {
    assert_eq!(estimates(0, &vec![(10, vec![(0, 5)])]), []);
    assert_eq!(estimates(1, &vec![]), [None]);
    assert_eq!(estimates(2, &vec![(10, vec![(0, 5)])])[1], None);
    assert_eq!(estimates(1, &vec![(10, vec![])]), [None]);
    // A count in no time tells no rate.
    assert_eq!(estimates(1, &vec![(0, vec![(0, 5)]), (10, vec![])]), [None]);
    assert_eq!(Estimator::new(1).estimate(1), None);
}

/// One set of two, 10 ms each; the phase changes a quarter into the twentieth
/// slice, for both events.
#[test]
fn a_change_that_another_event_shows_is_found() {
    let slices: Slices = (0..60)
        .map(|slice| {
            let rate = |before: u64, after: u64| match slice {
                0..19 => before,
                19 => (before + 3 * after) / 4,
                _ => after,
            };
            let count = match slice % 2 {
                0 => rate(40_000, 400_000),
                _ => rate(8000, 2000),
            };
            (10_000_000, vec![(slice % 2, count)])
        })
        .collect();
    let truth = [
        (19 * 4 + 1) * 10_000 + (3 + 40 * 4) * 100_000,
        (19 * 4 + 1) * 2000 + (3 + 40 * 4) * 500,
    ];
    for (estimate, truth) in estimates(2, &slices).into_iter().zip(truth) {
        let estimate = estimate.expect("counted");
        assert!(
            estimate.value.abs_diff(truth) * 1000 < truth,
            "{estimate:?} {truth}"
        );
        assert!(
            estimate.linear().abs_diff(truth) * 100 > truth,
            "{estimate:?} {truth}"
        );
    }
}

/// Slices of up to five events with phases, and the sets in no order.
fn slices(most: usize) -> impl Strategy<Value = Slices> {
    let counts = prop::collection::btree_map(0..5usize, 10_000..50_000u64, 0..4);
    let slice = (1_000..20_000_000u64, counts, 0..8u64);
    prop::collection::vec(slice, 1..most).prop_map(|slices| {
        let mut factor = 1;
        slices
            .into_iter()
            .map(|(length_ns, counts, change)| {
                if change == 0 {
                    factor = 1 + factor * 7 % 30;
                }
                let scaled = |(event, count)| (event, count * factor);
                (length_ns, counts.into_iter().map(scaled).collect())
            })
            .collect()
    })
}

/// Events that happen in `ns` at the rate of a slice, rounded up.
fn at_rate(count: u64, length_ns: u64, ns: u64) -> u128 {
    (u128::from(count) * u128::from(ns)).div_ceil(u128::from(length_ns))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn blind_time_is_filled_at_a_rate_between_those_seen(slices in slices(400)) {
        let total: u64 = slices.iter().map(|slice| slice.0).sum();
        for (event, estimate) in estimates(5, &slices).into_iter().enumerate() {
            let own: Vec<(u64, u64)> = slices
                .iter()
                .flat_map(|(length, counts)| counts.iter().map(move |(e, c)| (*length, *e, *c)))
                .filter(|(_, e, _)| *e == event)
                .map(|(length, _, count)| (length, count))
                .collect();
            let Some(estimate) = estimate else {
                prop_assert!(own.is_empty());
                continue;
            };
            prop_assert_eq!(estimate.total, Nanos(total));
            prop_assert_eq!(estimate.active.0, own.iter().map(|own| own.0).sum::<u64>());
            prop_assert_eq!(estimate.counted, own.iter().map(|own| own.1).sum::<u64>());
            prop_assert!(estimate.value >= estimate.counted);
            let blind = total - estimate.active.0;
            let fill = u128::from(estimate.value - estimate.counted);
            let rates = || own.iter().map(|(length, count)| at_rate(*count, *length, blind));
            // Each phase is rounded once.
            let rounding = own.len() as u128;
            prop_assert!(fill <= rates().max().unwrap() + rounding);
            prop_assert!(fill + rounding + 1 >= rates().min().unwrap());
        }
    }

    #[test]
    fn what_is_always_counted_is_exact(
        slices in prop::collection::vec((1..u64::MAX >> 10, 0..u64::MAX >> 10), 1..400),
    ) {
        let all: Slices = slices.iter().map(|(ns, count)| (*ns, vec![(0, *count)])).collect();
        let estimate = estimates(1, &all)[0].expect("counted");
        prop_assert_eq!(estimate.value, slices.iter().map(|slice| slice.1).sum::<u64>());
    }

    #[test]
    fn counts_that_are_all_larger_make_the_estimate_larger_by_as_much(
        slices in slices(400),
        factor in 2..1000u64,
    ) {
        let times = |(ns, counts): &(u64, Vec<(usize, u64)>)| {
            (*ns, counts.iter().map(|(event, count)| (*event, count * factor)).collect())
        };
        let scaled: Slices = slices.iter().map(times).collect();
        for (one, many) in estimates(5, &slices).into_iter().zip(estimates(5, &scaled)) {
            prop_assert_eq!(one.is_some(), many.is_some());
            if let (Some(one), Some(many)) = (one, many) {
                // Each phase is rounded to whole events, its begin to nanoseconds.
                let rounding = factor * slices.len() as u64;
                let off = many.value.abs_diff(one.value * factor);
                prop_assert!(off <= rounding + many.value / 1_000_000, "{one:?} {many:?}");
            }
        }
    }

    #[test]
    fn a_clock_in_other_units_makes_no_difference(slices in slices(400), factor in 2..1000u64) {
        let slower: Slices = slices.iter().map(|(ns, counts)| (ns * factor, counts.clone())).collect();
        for (one, other) in estimates(5, &slices).into_iter().zip(estimates(5, &slower)) {
            prop_assert_eq!(one.is_some(), other.is_some());
            if let (Some(one), Some(other)) = (one, other) {
                let off = one.value.abs_diff(other.value);
                prop_assert!(off <= slices.len() as u64 + one.value / 1_000_000, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn blind_time_is_the_same_in_one_piece_and_in_two(
        slices in slices(60),
        part in 0.0..1.0f64,
    ) {
        let split: Slices = slices
            .iter()
            .flat_map(|(ns, counts)| {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a part of a count that fits"
                )]
                let first = (*ns as f64 * part) as u64;
                if counts.is_empty() {
                    vec![(first, vec![]), (ns - first, vec![])]
                } else {
                    vec![(*ns, counts.clone())]
                }
            })
            .collect();
        for (one, two) in estimates(5, &slices).into_iter().zip(estimates(5, &split)) {
            if let (Some(one), Some(two)) = (one, two) {
                prop_assert_eq!(one.total, two.total);
                let off = one.value.abs_diff(two.value);
                prop_assert!(off <= slices.len() as u64 + one.value / 1_000_000, "{one:?} {two:?}");
            }
        }
    }

    #[test]
    fn no_input_is_too_much(
        slices in prop::collection::vec(
            (
                prop_oneof![Just(0), Just(1), Just(u64::MAX), any::<u64>()],
                prop::collection::vec(
                    (0..6usize, prop_oneof![Just(0), Just(u64::MAX), any::<u64>()]),
                    0..8,
                ),
            ),
            0..300,
        ),
    ) {
        for estimate in estimates(4, &slices).into_iter().flatten() {
            prop_assert!(estimate.value >= estimate.counted);
            prop_assert!(estimate.linear() >= estimate.counted);
        }
    }

    #[test]
    fn linear_scaling_grows_with_count_and_time(
        counted in any::<u64>(),
        more in any::<u64>(),
        active in 1..=u64::MAX,
        total in any::<u64>(),
        longer in any::<u64>(),
    ) {
        let at = |counted, active, total| linear(counted, Nanos(active), Nanos(total)).expect("active");
        let here = at(counted, active, total);
        prop_assert!(here >= counted);
        prop_assert!(at(counted.max(more), active, total) >= here);
        prop_assert!(at(counted, active, total.max(longer)) >= here);
        prop_assert_eq!(linear(counted, Nanos(0), Nanos(total)), None);
        prop_assert_eq!(at(counted, active, active), counted);
    }
}
