//! The fuzz target's harness on some random inputs, so that it
//! cannot rot; `docs/internals/testing.md` says how to let it run for long.

use std::cell::RefCell;
use std::collections::BTreeSet;

use proptest::prelude::{any, prop};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::play;

/// What random sequences have to bring about; else they test less than it seems.
const EVENTS: [&str; 21] = [
    "access-set",
    "asked",
    "barred",
    "control-set",
    "deaf",
    "declined",
    "drop-value-set",
    "dropped-read",
    "dropped-write",
    "faulted",
    "gathered",
    "handed-over",
    "phase-ended",
    "released",
    "renewed",
    "reserved",
    "returned",
    "revoked",
    "revoking",
    "spared",
    "yielded",
];
const REFUSALS: [&str; 15] = [
    "busy",
    "cookie",
    "held",
    "layer",
    "malformed",
    "master",
    "maximum",
    "minimum",
    "no-answer",
    "no-counter",
    "none-free",
    "phase",
    "refused",
    "unreserved",
    "withdrawn",
];

#[test]
fn the_unit_does_what_the_naive_model_does() {
    let seen = RefCell::new((BTreeSet::new(), BTreeSet::new()));
    // The inputs are fixed, because they have to reach all of the above.
    let config = Config {
        failure_persistence: None,
        ..Config::with_cases(2000)
    };
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, random);
    let inputs = prop::collection::vec(any::<u8>(), 0..900);
    let played = runner.run(&inputs, |bytes| {
        let (events, refusals) = &mut *seen.borrow_mut();
        for event in play::run(&bytes) {
            match (event.name(), event.reason()) {
                ("refused", Some(reason)) => refusals.insert(reason.name()),
                (name, _) => events.insert(name),
            };
        }
        Ok(())
    });
    played.unwrap_or_else(|error| panic!("{error}"));
    let (events, refusals) = seen.into_inner();
    assert_eq!(Vec::from_iter(events), EVENTS);
    // Others can come up; these must.
    for name in REFUSALS {
        assert!(refusals.contains(name), "{name} is not in {refusals:?}");
    }
}
