//! Registers that belong to several counters reach those whose owners let them.

use super::machine::Op::{As, R, Run, W, WGp};
use super::machine::*;
use arbiter::abi;

const REF: u64 = 0x43_013c;
const ALL: u64 = 0x7_0000_000f;

#[test]
fn global_control_reaches_whom_its_owner_lets() {
    let mut machine = check(&Setup::of("intel-v2"), &[W(0x38f, ALL)]);
    play(&mut machine, &private(1));
    let ops = [
        // The owner has cleared nothing: started and stopped by everybody.
        As(KERNEL, A),
        W(select(1), REF),
        Run(5),
        As(KERNEL, 0),
        W(0x38f, 0),
        Run(5),
        As(KERNEL, A),
        R(counter(1), 5),
    ];
    play(&mut machine, &ops);
    // Out of reach: it counts at once, by its own control.
    play(&mut machine, &controlled(1, 0xff));
    let ops = [
        Run(7),
        As(KERNEL, A),
        R(counter(1), 12),
        As(KERNEL, 0),
        W(0x38f, ALL),
        R(0x38f, ALL & !2),
        W(0x38f, 0),
        Run(1),
        As(KERNEL, A),
        R(counter(1), 13),
        W(select(1), 0x03_013c),
        Run(50),
        R(counter(1), 13),
        W(select(1), REF),
        Run(2),
        R(counter(1), 15),
    ];
    play(&mut machine, &ops);
    // In reach again: its bit is as it was left, which is off.
    play(&mut machine, &controlled(1, abi::CONTROL_INITIAL));
    let ops = [
        R(0x38f, 0),
        Run(9),
        As(KERNEL, A),
        R(counter(1), 15),
        As(KERNEL, 0),
        W(0x38f, 2),
        Run(3),
        As(KERNEL, A),
        R(counter(1), 18),
    ];
    play(&mut machine, &ops);
}

#[test]
fn a_counter_out_of_reach_runs_though_its_bit_was_never_set() {
    // FIXED2: off in global control after reset.
    let mut machine = check(&Setup::of("intel-v2"), &private(34));
    play(&mut machine, &controlled(34, 0xff));
    let ops = [As(KERNEL, A), W(select(34), 3), Run(11), R(counter(34), 11)];
    play(&mut machine, &ops);
    assert!(machine.pmu.needs().counting);
    play(&mut machine, &[As(KERNEL, M), W(management(34), 0)]);
    assert!(!machine.pmu.needs().counting);
}

#[test]
fn global_status_shows_and_clears_whom_its_owner_lets() {
    let near = (1 << 48) - 1;
    // FIXED2, reference cycles, which the clock counts.
    for (owned, seen) in [(abi::CONTROL_INITIAL, 0x4_0000_0002), (0xb_00ff, 2)] {
        let mut machine = check(&Setup::of("intel-v2"), &[W(0x38f, ALL)]);
        play(&mut machine, &private(34));
        play(&mut machine, &controlled(34, owned));
        let ops = [
            As(KERNEL, A),
            W(select(34), 3),
            W(counter(34), near),
            As(KERNEL, 0),
            W(0x187, REF),
            W(counter(1), near),
            Run(2),
            R(0x38e, seen),
            // Its owner sees it in any case.
            As(KERNEL, A),
            R(overflow(34), 1),
            As(KERNEL, 0),
            W(0x390, ALL),
            R(0x38e, 0),
            As(KERNEL, A),
            R(overflow(34), u64::from(seen == 2)),
            W(overflow(34), 1),
            R(overflow(34), 0),
        ];
        play(&mut machine, &ops);
    }
}

#[test]
fn amd_sets_and_clears_whom_the_owner_lets() {
    let mut machine = check(&Setup::of("amd-perfmonv2"), &private(2));
    play(&mut machine, &controlled(2, 0xb_00ff));
    let ops = [
        W(0xc000_0303, 0x3f),
        R(0xc000_0300, 0x3b),
        As(KERNEL, A),
        R(overflow(2), 0),
        As(KERNEL, 0),
        W(0xc000_0302, 0x3f),
        R(0xc000_0300, 0),
        // Bits that there are not are dropped as ever.
        W(0xc000_0301, u64::MAX),
        R(0xc000_0301, 0x3f),
    ];
    play(&mut machine, &ops);
}

#[test]
fn fixed_control_reaches_whom_its_owner_lets() {
    let mut machine = check(&Setup::of("intel-v2"), &[W(0x38f, ALL)]);
    play(&mut machine, &private(34));
    let ops = [
        // A private counter, and FIXED_CTR_CTRL still is everybody's.
        W(0x38d, 0x333),
        R(0x38d, 0x333),
        As(KERNEL, A),
        R(select(34), 3),
    ];
    play(&mut machine, &ops);
    play(&mut machine, &controlled(34, 0x7_00ff));
    let ops = [
        R(0x38d, 0x033),
        Run(4),
        W(0x38d, 0x0b0),
        R(0x38d, 0x0b0),
        Run(4),
        As(KERNEL, A),
        R(select(34), 3),
        R(counter(34), 8),
        W(select(34), 0),
        As(KERNEL, 0),
        W(0x38d, 0x333),
        Run(4),
        As(KERNEL, A),
        R(counter(34), 8),
        R(select(34), 0),
    ];
    play(&mut machine, &ops);
}

#[test]
fn reserved_bits_raise_gp_as_ever() {
    let mut machine = check(&Setup::of("intel-v2"), &private(1));
    play(&mut machine, &controlled(1, 0xff));
    let ops = [
        W(0x38f, 1),
        WGp(0x38f, 1 << 4),
        WGp(0x38f, 1 << 35),
        WGp(0x390, 1 << 35),
        W(0x390, 0b11 << 62),
        WGp(0x38d, 0x4),
        WGp(0x38d, 0x1000),
        WGp(0x38e, 0),
        // A bit that does not reach its counter is no reserved bit.
        W(0x38f, 3),
        R(0x38f, 1),
        W(0x390, 2),
    ];
    play(&mut machine, &ops);
}
