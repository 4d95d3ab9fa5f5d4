//! Whatever is accessed: no panic, and what [`play`] says of each step.

mod play;

use proptest::prelude::*;

/// Inputs that are the same every time, and what they come to: the harness is no use if it
/// does not get anywhere.
#[test]
fn accesses_reach_what_they_are_for() {
    let mut state = 1u64;
    let mut byte = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        state.to_le_bytes()[7]
    };
    let mut all = play::Reached::default();
    for _ in 0..300 {
        let bytes: Vec<u8> = (0..3000).map(|_| byte()).collect();
        all.add(&play::run(&bytes));
    }
    assert!(all.everything(), "{all:?}");
}

proptest! {
    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        play::run(&bytes);
    }
}
