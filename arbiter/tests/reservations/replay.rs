//! The fuzz target's harness on a fixed number of random inputs, so that it
//! cannot rot; `docs/testing.md` says how to let it run for long.

use crate::play;
use proptest::prelude::{any, prop};
use proptest::test_runner::{Config, TestRunner};
use std::cell::Cell;

#[test]
fn the_unit_does_what_the_naive_model_does() {
    let played = Cell::new(0);
    let mut runner = TestRunner::new(Config {
        failure_persistence: None,
        ..Config::with_cases(500)
    });
    runner
        .run(&prop::collection::vec(any::<u8>(), 0..900), |bytes| {
            played.set(played.get() + play::run(&bytes));
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
    let played = played.get();
    assert!(played > 10_000, "only {played} operations were played");
}
