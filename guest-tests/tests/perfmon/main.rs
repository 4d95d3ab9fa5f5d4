//! Host tools and micro-guests: the real server, the real run loop, a real KVM.

mod bad_input;
mod bed;
#[allow(dead_code)]
#[path = "../../../pmu-virt/tests/perfmon/cells.rs"]
mod cells;
mod counting;
mod ends;
mod errors;
#[allow(dead_code)]
#[path = "../../../pmu-virt/tests/limited/mod.rs"]
mod limited;
mod played;
mod raw;
mod sampling;

use std::process::ExitCode;

use guest_tests::micro::{Test, run_suite};

fn main() -> ExitCode {
    let themes: &[&[Test]] = &[
        counting::TESTS,
        sampling::TESTS,
        ends::TESTS,
        errors::TESTS,
        bad_input::TESTS,
        played::TESTS,
    ];
    run_suite(&themes.concat(), &[])
}
