//! Host tools and micro-guests: the real server, the real run loop, a real KVM.

mod bed;
mod counting;

use std::process::ExitCode;

use guest_tests::micro::{Test, run_suite};

fn main() -> ExitCode {
    let themes: &[&[Test]] = &[counting::TESTS];
    run_suite(&themes.concat(), &[])
}
