//! The fuzz target `commands` of `pmu-virt/fuzz` on its seeds and on random bytes,
//! so that it cannot rot; `docs/internals/testing.md` says how to let it run for long.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

use proptest::prelude::{any, prop};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::play;

/// What sequences have to bring about; else they test less than it seems.
const PLACES: [&str; 24] = [
    "a blind spot to be told",
    "a full block",
    "a full buffer",
    "a full half",
    "a limit exceeded",
    "a mask",
    "a message dropped",
    "a preemption",
    "a puppet",
    "a restart",
    "a restart that masks",
    "a second load",
    "a spurious overflow",
    "a switch by overflow",
    "a switch by time",
    "a switch that waited",
    "a vCPU that is blocked",
    "both halves full",
    "compact",
    "default",
    "double",
    "no format",
    "samples lost",
    "switches in a row",
];
/// Those that random bytes are too short or too unlikely for.
const RARE: [&str; 3] = ["a full block", "a switch that waited", "both halves full"];

#[test]
fn contexts_do_what_the_model_does_on_the_seeds() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/commands");
    let mut seen = BTreeSet::new();
    for seed in std::fs::read_dir(seeds).expect("the folder of the seeds") {
        let bytes = std::fs::read(seed.expect("a seed").path()).expect("its bytes");
        seen.extend(play::run(&bytes).names);
    }
    reaches(&seen, |_| true);
}

#[test]
fn contexts_do_what_the_model_does_on_random_bytes() {
    let seen = RefCell::new(BTreeSet::new());
    // The same inputs each time, as they have to come by all of the above.
    let config = Config {
        failure_persistence: None,
        ..Config::with_cases(3000)
    };
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    TestRunner::new_with_rng(config, random)
        .run(&prop::collection::vec(any::<u8>(), 100..1500), |bytes| {
            seen.borrow_mut().extend(play::run(&bytes).names);
            Ok(())
        })
        .expect("the context and the model agree");
    reaches(&seen.into_inner(), |place| !RARE.contains(&place));
}

fn reaches(seen: &BTreeSet<&str>, wanted: impl Fn(&str) -> bool) {
    let missing = PLACES
        .into_iter()
        .filter(|&place| wanted(place) && !seen.contains(place));
    assert_eq!(missing.collect::<Vec<_>>(), [""; 0]);
}
