//! Linux without arbiters: with nothing reserved, and with counters taken that CPUID announces.

use guest_tests::linux::Script;
use guest_tests::linux::perf::{LOG, check_cycles_within, count, field, tsc_mhz};
use vmm::config::Engine;

use super::{EVENTS, FIRMWARE, NO_WATCHDOG, TOLERANCE, image, perf};

/// CPUID announces what others hold.
const UNTOLD: [&str; 6] = [
    "--pmu",
    "amd-core",
    "--cpus",
    "2",
    "--cpuid-follows-grants",
    "off",
];

/// A kernel's lines about its PMU, without their times.
fn without_times(log: &str) -> Vec<&str> {
    let text = |line| str::split_once(line, "] ").map_or(line, |(_, text)| text);
    let lines = log.lines().filter(|line| !line.contains("tsc:"));
    lines.map(text).collect()
}

/// With nothing reserved the kernel sees the machine that it sees without reservations. (And the
/// tests in `linux.rs` run with reservations possible, as that is the default.)
#[test]
fn nothing_reserved_changes_nothing() {
    let [with, without] = ["on", "off"].map(|pcr| {
        let flags = ["--cpu-vendor", "intel", "--pmu", "intel-v2", "--pcr", pcr];
        let script = Script::default()
            .step("log", LOG)
            .step("perf", perf(Engine::Kvm));
        let log = script.run(image(), &flags, "");
        let mhz = tsc_mhz(log.of("log"));
        check_cycles_within(log.of("perf"), &EVENTS, mhz, TOLERANCE);
        log
    });
    assert_eq!(
        without_times(with.of("log")),
        without_times(without.of("log"))
    );
}

/// The counter drops: the kernel uses it without knowing, and counts wrong. The minimal arbiter at
/// least makes it refuse.
#[test]
fn a_kernel_that_is_not_told_counts_wrong_on_a_counter_that_drops() {
    let script = Script::default()
        .step("log", LOG)
        .step("wrong", perf(Engine::Kvm))
        .load("minimal", "pcr_minimal", "")
        .step("refused", "perf stat -x, -e cycles,task-clock true; true")
        .step("out", "rmmod pcr_minimal");
    let flags = [&FIRMWARE[..], &UNTOLD].concat();
    let log = script.run(image(), &flags, NO_WATCHDOG);
    log.has("log", &["... generic registers:      6"]);
    let counted = count(log.of("wrong"), "cycles");
    let right = count(log.of("wrong"), "task-clock") * 1000.0 * tsc_mhz(log.of("log"));
    // Linux starts a counter below zero, by half of its width; what it reads is 0.
    assert!(counted > 1000.0 * right, "{counted}, {right}");
    log.has(
        "minimal",
        &["PMC0 is the firmware's on CPU 0", "PMC1 locked on 2 CPUs"],
    );
    log.has("refused", &["Device or resource busy"]);
    assert!(log.succeeded("out"));
}

/// The counter faults: the kernel's driver gives up at boot, and the kernel goes on without one.
#[test]
fn a_kernel_that_is_not_told_gives_up_on_a_counter_that_faults() {
    let script = Script::default()
        .step("log", LOG)
        .step("perf", "perf stat -x, -e cycles,task-clock spin 0.1");
    let counter = format!("{},error=fault", FIRMWARE[3]);
    let flags = [&FIRMWARE[..3], &[&counter], &UNTOLD].concat();
    let log = script.run(image(), &flags, "");
    log.has("log", &["using software events only."]);
    assert_eq!(field(log.of("perf"), "cycles"), "<not supported>");
    assert!(count(log.of("perf"), "task-clock") > 0.0);
}
