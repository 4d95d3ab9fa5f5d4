//! The hardware events of the `perf` backend at a kernel that has a PMU: in an unmodified Linux
//! guest, whose PMU is Umpire's own, counted by `sim` and `clock` on KVM in L1, and on the engine emu
//! by ticks of its virtual time.

use std::path::PathBuf;

use guest_tests::linux::{LinuxImage, SIMULATED_CYCLES, UnderUmpire};
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

/// The guest's image, with the program.
fn image() -> LinuxImage {
    let image = LinuxImage::fetch().expect("the guest's image");
    image.with_program(CONTRACT, contract())
}

/// The hardware event `event` of a guest keeps the contract; `found`: how many counters there are
/// for it.
fn check(guest: &UnderUmpire, event: &str, found: &str) {
    let steps = guest.run(&format!("{CONTRACT} {event}")).steps;
    let [step] = steps.as_slice() else {
        panic!("one step");
    };
    println!("{}", step.output);
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
    let guest = UnderUmpire::with_rates(image(), &["--pmu", "amd-core"], RATES);
    check(&guest, "instructions", ": 6 counters");
}

/// The kernel's generic event, on four programmable counters and a fixed one.
const GENERIC: [&str; 4] = ["--cpu-vendor", "intel", "--pmu", "intel-v2"];

#[test]
fn a_generic_event_on_an_intel_processor_keeps_the_contract() {
    let guest = UnderUmpire::with_rates(image(), &GENERIC, RATES);
    check(&guest, "cycles", ": 5 counters");
}

#[test]
fn a_generic_event_on_emu_keeps_the_contract() {
    let flags = [&GENERIC, SIMULATED_CYCLES.as_slice()].concat();
    let guest = UnderUmpire::new(image(), &flags).emulated();
    let guest = guest.with_kernel_options("nmi_watchdog=0");
    check(&guest, "cycles", ": 5 counters");
}
