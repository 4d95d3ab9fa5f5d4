//! Whatever a guest is: no panic, no end that does not come, nothing touched outside of its
//! memory, and the same end by large budgets and small ones.

mod play;
#[allow(unsafe_code, reason = "a mapping with nothing around")]
mod sys;

use proptest::prelude::*;

/// Inputs that are the same every time, and what they come to: the harness is no use if it
/// does not get anywhere.
#[test]
fn guests_reach_what_they_are_for() {
    let guests = std::env::var("EMU_ANY_GUESTS");
    let guests = guests.ok().and_then(|n| n.parse().ok()).unwrap_or(600);
    let mut state = 1u64;
    let mut byte = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        state.to_le_bytes()[7]
    };
    let mut all = play::Reached::default();
    for _ in 0..guests {
        let bytes: Vec<u8> = (0..1200).map(|_| byte()).collect();
        all.add(&play::run(&bytes));
    }
    let play::Reached {
        instructions,
        users,
        deliveries,
        interrupts,
        devices,
        ports,
        registers,
        halts,
        shutdowns,
        unimplemented,
    } = all.clone();
    let often = [instructions, users, deliveries].iter().all(|n| *n > 5_000);
    let seldom = [interrupts, devices, ports, registers, halts, shutdowns];
    assert!(often && seldom.iter().all(|n| *n > 5), "{all:?}");
    println!("{all:?}; {unimplemented} ended at what is missing");
}

proptest! {
    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..1500)) {
        play::run(&bytes);
    }
}
