//! The hardware events of the `perf` backend at a kernel that has a PMU: in an unmodified Linux
//! guest in L1, whose PMU is Umpire's own, counted by `sim` and `clock`.

use std::path::PathBuf;

use guest_tests::linux::exit_cost::are_dear;
use guest_tests::linux::{LinuxImage, UnderUmpire};
use guest_tests::umpire;

const CONTRACT: &str = "perf-contract";
/// An instruction a nanosecond. Cycles are for `clock` to count.
const RATES: &str = "[event.instructions]\nrate = 1000\n";
/// Promises of `perf` beyond the contract, in the program.
const PROMISES: usize = 9;

/// The program beside `umpire`, built with the same profile.
fn contract() -> PathBuf {
    let path = umpire::path().with_file_name(CONTRACT);
    assert!(
        path.exists(),
        "{} is missing; build it with: cargo build -p guest-tests --bins",
        path.display()
    );
    path
}

/// The hardware event `event` keeps the contract; `found`: how many counters there are for it.
fn check(test: &str, flags: &[&str], event: &str, found: &str) {
    let image = LinuxImage::fetch().expect("the guest's image");
    let image = image.with_program(CONTRACT, contract());
    let guest = UnderUmpire::with_rates(image, flags, RATES);
    let steps = guest.run(&format!("{CONTRACT} {event}")).steps;
    let [step] = steps.as_slice() else {
        panic!("one step");
    };
    println!("{}", step.output);
    // A ring is charged by where exits find the guest, which programs share with them.
    if step.status != Some(0) && are_dear(test) {
        return;
    }
    assert_eq!(step.status, Some(0), "{}", step.output);
    assert!(step.output.contains(found), "{}", step.output);
    let lines = |start| {
        let lines = step.output.lines();
        lines.filter(|line| line.starts_with(start)).count()
    };
    assert_eq!(lines("kept: "), pmu_virt::contract::all_clauses().count());
    assert_eq!(lines("promise kept: "), PROMISES);
}

/// A raw code of the processor's vendor, on counters that are all alike.
#[test]
fn a_raw_code_on_an_amd_processor_keeps_the_contract() {
    let test = "perf_contract::a_raw_code_on_an_amd_processor_keeps_the_contract";
    check(test, &["--pmu", "amd-core"], "instructions", ": 6 counters");
}

/// The kernel's generic event, on four programmable counters and a fixed one.
#[test]
fn a_generic_event_on_an_intel_processor_keeps_the_contract() {
    let flags = ["--cpu-vendor", "intel", "--pmu", "intel-v2"];
    let test = "perf_contract::a_generic_event_on_an_intel_processor_keeps_the_contract";
    check(test, &flags, "cycles", ": 5 counters");
}
