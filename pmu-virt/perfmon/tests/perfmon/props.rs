//! Any sequence of commands, counts and time, played to a context and to the
//! model: they agree on every answer, every error, and on all that can be seen
//! in between.

use proptest::prelude::{ProptestConfig, proptest};
use proptest::test_runner::FileFailurePersistence;

use super::play::{Pair, Sampling, Setup};
use super::steps::{flags, steps};

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1500,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..ProptestConfig::default()
    })]
    #[test]
    fn context_and_model_agree(flags in flags(), steps in steps()) {
        let setup = Setup { flags, sampling: Sampling::None, most: None };
        let mut pair = Pair::new(&setup);
        for step in &steps {
            pair.play(step);
            pair.compare();
        }
        pair.finish();
    }
}
