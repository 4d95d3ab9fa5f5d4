//! Save and restore, and reset.

use super::machine::Op::{As, R, Reset, Run, W};
use super::machine::*;
use arbiter::abi;

const INT: u64 = 0x53_013c;
const NEAR: u64 = (1 << 48) - 10;

/// PMC0 and FIXED2 belong to the kernel's own cookies, PMC1 to nobody; all have
/// overflowed.
fn busy() -> Machine {
    let mut machine = check(&Setup::of("intel-v2"), &[W(0x38f, 0x7_0000_000f)]);
    play(&mut machine, &private(0));
    play(&mut machine, &private(34));
    let ops = [
        As(KERNEL, A),
        W(select(0), INT),
        W(counter(0), NEAR),
        W(select(34), 0xb),
        W(counter(34), NEAR),
        As(KERNEL, 0),
        W(0x187, INT),
        W(counter(1), NEAR),
        W(0x38d, 0x3b3),
        Run(40),
        R(SNAPSHOT, 1),
    ];
    play(&mut machine, &ops);
    machine
}

#[test]
fn a_reserved_counter_is_saved_as_given_back() {
    let mut first = busy();
    let state = first.pmu.save();
    let text = serde_json::to_string(&state).expect("a state can be written");
    assert!(!text.contains(&format!("{M:x}")) && !text.contains(&format!("{A:x}")));
    let mut second = Machine::new(&Setup::of("intel-v2"));
    second.pmu.restore(&state).expect("it is of this model");
    let ops = [
        As(KERNEL, 0),
        R(status(0), 0),
        R(select(0), 0),
        R(counter(0), 0),
        R(overflow(0), 0),
        R(select(34), 0),
        R(counter(34), 0),
        R(word(0, 0), 0),
        R(word(0, 3), 0),
        R(word(34, 3), 0),
        // The others as they were.
        R(select(1), INT),
        R(counter(1), 30),
        R(0x38d, 0x0b3),
        R(0x38e, 2),
        R(0x38f, 0x7_0000_000f),
        R(word(1, 3), 30),
        Op::Pmi(2),
    ];
    play(&mut second, &ops);
    // And saving has changed nothing.
    let ops = [
        As(KERNEL, A),
        R(counter(0), 30),
        R(select(34), 3),
        Op::Pmi(3),
    ];
    play(&mut first, &ops);
}

#[test]
fn a_state_does_not_overwrite_a_reservation() {
    let mut plain = check(&Setup::of("intel-v2"), &[W(0x186, INT), W(0xc1, 5), Run(7)]);
    let state = plain.pmu.save();
    let mut machine = check(&Setup::of("intel-v2"), &private(0));
    machine.pmu.restore(&state).expect("it is of this model");
    let ops = [
        As(KERNEL, A),
        R(select(0), 0),
        R(counter(0), 0),
        As(KERNEL, 0),
        R(
            status(0),
            abi::STATUS_RESERVED | 2 << 1 | abi::STATUS_PRIVATE,
        ),
    ];
    play(&mut machine, &ops);
}

#[test]
fn a_state_does_not_stop_a_counter_that_is_reserved() {
    let mut plain = check(&Setup::of("intel-v2"), &[W(0x38f, 2)]);
    let state = plain.pmu.save();
    let mut machine = check(&Setup::of("intel-v2"), &[W(0x38f, 1)]);
    play(&mut machine, &private(0));
    machine.pmu.restore(&state).expect("it is of this model");
    // PMC0's bit is its owner's, all others come from the state.
    play(&mut machine, &[As(KERNEL, 0), R(0x38f, 3)]);
}

#[test]
fn a_reset_ends_the_guests_reservations() {
    let mut machine = busy();
    let ops = [
        Reset,
        As(KERNEL, 0),
        R(status(0), 0),
        R(status(34), 0),
        R(0x186, 0),
        R(0xc1, 0),
        R(0x38e, 0),
        R(0x38f, 0xf),
        W(management(0), A),
    ];
    play(&mut machine, &ops);
}
