//! The fuzz target `wire` of `pmu-virt/fuzz` on its seeds and on random bytes, so
//! that it cannot rot; `docs/internals/testing.md` says how to let it run for long.

mod play;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

use proptest::prelude::{any, prop};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// What has to come about, else this tests less than it seems: bytes that are
/// something, and bytes that are not.
const KINDS: [&str; 13] = [
    "answer",
    "call",
    "compact sample",
    "document",
    "extension",
    "framed reply",
    "framed request",
    "halves",
    "record",
    "reply",
    "request",
    "ring",
    "samples",
];

#[test]
fn the_seeds_are_all_that_can_come() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/wire");
    let mut accepted = BTreeSet::new();
    for seed in std::fs::read_dir(seeds).expect("the folder of the seeds") {
        let bytes = std::fs::read(seed.expect("a seed").path()).expect("its bytes");
        let (kind, right) = play::run(&bytes);
        if right {
            accepted.insert(kind);
        }
        // Cut anywhere, they must not be worse than refused.
        for end in 0..bytes.len() {
            play::run(&bytes[..end]);
        }
    }
    assert_eq!(accepted.into_iter().collect::<Vec<_>>(), KINDS);
}

#[test]
fn random_bytes_decode_or_are_refused() {
    let refused = RefCell::new(BTreeSet::new());
    let config = Config {
        failure_persistence: None,
        ..Config::with_cases(20_000)
    };
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    TestRunner::new_with_rng(config, random)
        .run(&prop::collection::vec(any::<u8>(), 1..300), |bytes| {
            let (kind, right) = play::run(&bytes);
            if !right {
                refused.borrow_mut().insert(kind);
            }
            Ok(())
        })
        .expect("any bytes");
    assert_eq!(refused.into_inner().into_iter().collect::<Vec<_>>(), KINDS);
}
