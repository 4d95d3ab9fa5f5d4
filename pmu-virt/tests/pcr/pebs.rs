//! `IA32_PEBS_ENABLE` and counters that somebody has reserved.

use super::machine::Op::{As, Pmi, R, Run, W};
use super::machine::*;
use arbiter::abi;

const MODEL: &str = "intel-v4,pebs=skid";
const REF_INT: u64 = 0x53_013c;
const NEAR: u64 = (1 << 48) - 10;

#[test]
fn it_reaches_a_counter_unless_its_owner_says_no() {
    let mut machine = check(&Setup::of(MODEL), &[W(0x3f1, 3), R(0x3f1, 3)]);
    play(&mut machine, &private(1));
    play(
        &mut machine,
        &[
            As(KERNEL, 0),
            R(0x3f1, 3),
            W(0x3f1, 1),
            R(0x3f1, 1),
            W(0x3f1, 3),
        ],
    );
    // Out of reach: no PEBS, no bit, and writes leave it alone.
    play(
        &mut machine,
        &controlled(1, abi::CONTROL_INITIAL & !abi::CONTROL_PEBS_ENABLE),
    );
    let ops = [
        As(KERNEL, 0),
        R(0x3f1, 1),
        W(0x3f1, 3),
        R(0x3f1, 1),
        // Its overflow is that of any counter.
        As(KERNEL, A),
        W(select(1), REF_INT),
        W(counter(1), NEAR),
        Run(10),
        Pmi(2),
        As(KERNEL, 0),
        R(0x38e, 2),
    ];
    play(&mut machine, &ops);
    // In reach again.
    play(&mut machine, &controlled(1, abi::CONTROL_INITIAL));
    play(
        &mut machine,
        &[As(KERNEL, 0), R(0x3f1, 1), W(0x3f1, 3), R(0x3f1, 3)],
    );
    // Given back: nothing of the owner's is left.
    play(&mut machine, &[As(KERNEL, M), W(management(1), 0)]);
    play(&mut machine, &[As(KERNEL, 0), R(0x3f1, 1)]);
}
