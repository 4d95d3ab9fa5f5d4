//! The `step` backend on a real KVM: counts worked out by hand.

mod amd;
mod cases;
mod classes;
mod conditional;
mod events;
mod losses;
pub(crate) mod region;

use guest_tests::micro::Test;

pub(crate) fn tests() -> Vec<Test> {
    [
        cases::TESTS,
        events::TESTS,
        classes::TESTS,
        conditional::TESTS,
        amd::TESTS,
        losses::TESTS,
    ]
    .concat()
}
