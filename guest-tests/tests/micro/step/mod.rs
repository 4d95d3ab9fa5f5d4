//! The `step` backend on a real KVM: counts worked out by hand.

mod cases;
mod losses;
mod region;

use guest_tests::micro::Test;

pub(crate) fn tests() -> Vec<Test> {
    [cases::TESTS, losses::TESTS].concat()
}
