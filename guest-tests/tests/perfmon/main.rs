//! Host tools and micro-guests: the real server, the real run loop, a real KVM.

mod bad_input;
mod bed;
mod c_errors;
mod c_programs;
mod c_raw;
mod cc;
#[allow(dead_code)]
#[path = "../../../pmu-virt/perfmon/tests/perfmon/cells.rs"]
mod cells;
mod counting;
mod ends;
mod errors;
mod formats;
mod ibs;
mod known;
#[allow(dead_code)]
#[path = "../../../pmu-virt/tests/limited/mod.rs"]
mod limited;
mod played;
mod raw;
mod sampling;

use std::process::ExitCode;

use guest_tests::micro::{Limit, Test, run_suite};

/// Tests that build programs in C. L1 has no compiler; the host that it runs on
/// has, and runs them.
const IN_C: &[&[Test]] = &[
    c_errors::TESTS,
    c_raw::TESTS,
    c_programs::TESTS,
    c_programs::DESCRIPTORS,
    c_programs::LIBRARY,
    c_programs::SPECIFICATION,
];

fn main() -> ExitCode {
    let in_c: Vec<&str> = IN_C.concat().iter().map(|test| test.name).collect();
    let limits = [Limit {
        applies: |_| !cc::is_there(),
        reason: "there is no C compiler or no cargo here; L1 has none, its host runs these",
        tests: in_c.leak(),
    }];
    let themes: &[&[Test]] = &[
        counting::TESTS,
        sampling::TESTS,
        formats::TESTS,
        ibs::TESTS,
        ends::TESTS,
        errors::TESTS,
        bad_input::TESTS,
        played::TESTS,
        c_errors::TESTS,
        c_programs::TESTS,
        c_raw::TESTS,
        c_programs::DESCRIPTORS,
        c_programs::LIBRARY,
        c_programs::SPECIFICATION,
    ];
    run_suite(&themes.concat(), &limits)
}
