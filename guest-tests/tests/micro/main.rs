//! Guests that are nothing but a test, on the real run loop and a real KVM.
//!
//! One binary without libtest, so that what this host cannot run is counted
//! and told; `cargo l1 -- BINARY` runs it on the faithful KVM.

mod accounting;
mod amd;
mod arbiters;
mod cores;
mod debug;
mod ibs;
mod intel;
mod intel_versions;
mod oracle;
mod overflow;
mod patch;
mod pcr;
mod pebs;
mod perf;
mod rdpmc;
mod rings;
mod selftests;
mod smm;
mod standing;
mod step;
mod time;
mod vcpus;

use std::process::ExitCode;

use guest_tests::micro::{LIMITS, Test, run_suite_on_each_engine};

fn main() -> ExitCode {
    let step = step::tests();
    let themes: &[&[Test]] = &[
        intel::TESTS,
        intel_versions::TESTS,
        amd::TESTS,
        ibs::TESTS,
        arbiters::TESTS,
        accounting::TESTS,
        rdpmc::TESTS,
        patch::TESTS,
        debug::TESTS,
        debug::REFERENCE,
        overflow::TESTS,
        pebs::TESTS,
        perf::TESTS,
        vcpus::TESTS,
        cores::TESTS,
        pcr::access::TESTS,
        pcr::asking::TESTS,
        pcr::cookies::TESTS,
        pcr::layers::TESTS,
        pcr::replayed::TESTS,
        pcr::guard::TESTS,
        pcr::interrupts::TESTS,
        oracle::TESTS,
        rings::TESTS,
        selftests::TESTS,
        smm::TESTS,
        standing::TESTS,
        time::TESTS,
        &step,
    ];
    run_suite_on_each_engine(&themes.concat(), LIMITS)
}
