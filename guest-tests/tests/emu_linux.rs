//! Debian's kernels on the engine emu, end to end, on this machine: no KVM, no L1. A stock kernel
//! boots, its own `perf` counts exactly, samples at the very instruction, and a seed makes two
//! runs equal.

use std::time::Duration;

use guest_tests::linux::perf::{COUNT_LOOPS, LOG, LOOPS, check_loops, count, field};
use guest_tests::linux::{LinuxImage, Log, SIMULATED_CYCLES, Script, UnderUmpire, lines, steps};
use pmu_virt::Vendor;

/// Instructions between two samples, of which each has to come: fewer than a KVM host would let
/// be between two PMIs.
const PERIOD: u32 = 10_007;
const RECORD: &str = "perf record -q -e instructions:u -c 10007 -o /tmp/data loops && \
     perf script -i /tmp/data -F ip,sym | sort | uniq -c";
/// A kernel that finds a hypervisor does not switch the watchdog on by itself. Its period is a
/// second of cycles; NMIs before and after four of them.
const WATCHDOG: &str = "echo 1 >/proc/sys/kernel/watchdog_thresh; \
     echo 1 2>/dev/null >/proc/sys/kernel/nmi_watchdog; \
     awk '/NMI:/ { print $2 }' /proc/interrupts; cat /proc/sys/kernel/nmi_watchdog; \
     taskset 1 spin 4 >/dev/null; awk '/NMI:/ { print $2 }' /proc/interrupts";
const CLOCKS: &str = "cat /sys/devices/system/clocksource/clocksource0/current_clocksource; \
     nproc; dmesg | grep -E 'TSC unstable|clocksource: timekeeping watchdog' || true";

fn guest(image: LinuxImage, flags: &[&str]) -> UnderUmpire {
    UnderUmpire::new(image, flags).emulated()
}

fn script() -> Script {
    Script::default()
        .step("log", LOG)
        .step("count", COUNT_LOOPS)
        .step("record", RECORD)
        .step("clocks", CLOCKS)
}

fn check(log: &Log, vcpus: &str) {
    check_loops(log.of("count"), Vendor::Intel);
    let samples = log.of("record");
    let taken: u32 = samples
        .lines()
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            assert_eq!(words[2], "loops_hot", "{samples}");
            words[0].parse::<u32>().expect("how many")
        })
        .sum();
    assert_eq!(taken, 2_000_004 / PERIOD, "{samples}");
    check_clocks(log, vcpus);
}

/// Newer kernels stay with the hypervisor's clock. Neither was found unstable.
fn check_clocks(log: &Log, vcpus: &str) {
    let clocks: Vec<&str> = log.of("clocks").lines().collect();
    assert!(["tsc", "kvm-clock"].contains(&clocks[0]), "{clocks:?}");
    assert_eq!(clocks[1..], [vcpus], "{clocks:?}");
}

#[test]
fn debians_kernel_counts_exactly() {
    let image = LinuxImage::fetch().expect("the guest's image");
    let log = script().run_on(&guest(image, &[]));
    log.has("log", &["Performance Events: ", "Intel PMU driver"]);
    check(&log, "1");
}

#[test]
fn two_vcpus_share_a_clock_that_never_goes_back() {
    let image = LinuxImage::fetch().expect("the guest's image");
    let both = "taskset 1 perf stat -x, -o /tmp/a -e instructions:u loops & \
         taskset 2 perf stat -x, -o /tmp/b -e instructions:u loops; wait; cat /tmp/a /tmp/b";
    let script = script().step("both", both);
    let log = script.run_on(&guest(image, &["--cpus", "2"]));
    check(&log, "2");
    // `perf` counts from the exec of `loops` on.
    let of_both = log.of("both");
    let counts: Vec<f64> = of_both
        .lines()
        .filter(|line| line.contains("instructions:u"))
        .map(|line| field(line, "instructions:u").parse().expect("a count"))
        .collect();
    assert_eq!(counts, [LOOPS[0]; 2], "{of_both}");
}

/// The kernel compares the TSCs of all processors as these start; the last one of them counts.
#[test]
fn four_and_eight_vcpus_share_a_clock_too() {
    let image = LinuxImage::fetch().expect("the guest's image");
    for (cpus, last) in [("4", "8"), ("8", "80")] {
        let script = Script::default()
            .step("count", format!("taskset {last} {COUNT_LOOPS}"))
            .step("clocks", CLOCKS);
        let log = script.run_on(&guest(image.clone(), &["--cpus", cpus]));
        check_loops(log.of("count"), Vendor::Intel);
        check_clocks(&log, cpus);
    }
}

/// Each on one and on two vCPUs, with cycles on one of these, for the watchdog: they make no other
/// count inexact.
#[test]
fn debians_newer_kernels_count_exactly() {
    for (image, watched) in [
        (LinuxImage::fetch_newer(), "1"),
        (LinuxImage::fetch_newest(), "2"),
    ] {
        let image = image.expect("the guest's image");
        for cpus in ["1", "2"] {
            let (mut script, mut flags) = (script(), vec!["--cpus", cpus]);
            if cpus == watched {
                script = script.step("watchdog", WATCHDOG);
                flags.extend(SIMULATED_CYCLES);
            }
            let log = script.run_on(&guest(image.clone(), &flags));
            check(&log, cpus);
            if cpus == watched {
                check_watchdog(&log);
            }
        }
    }
}

/// One for each second of virtual time in which the guest runs.
fn check_watchdog(log: &Log) {
    let [before, switch, after] = lines(log.of("watchdog"));
    assert_eq!(switch, "1");
    let number = |text: &str| text.parse::<u32>().expect("a number of NMIs");
    let nmis = number(after) - number(before);
    assert!((3..=6).contains(&nmis), "{nmis} NMIs in four seconds");
}

/// Without a cycle that anybody counts Intel's models lack the event, which CPUID says; simulated
/// ones serve the watchdog.
#[test]
fn cycles_are_lacking_or_simulated() {
    let cycles = "perf stat -x, -o /tmp/s -e cycles:u loops; cat /tmp/s";
    let image = LinuxImage::fetch().expect("the guest's image");
    let lacking = Script::default().step("count", cycles);
    let log = lacking.run_on(&guest(image.clone(), &[]));
    assert_eq!(field(log.of("count"), "cycles:u"), "<not supported>");

    let simulated = Script::default()
        .step("count", cycles)
        .step("watchdog", WATCHDOG);
    let log = simulated.run_on(&guest(image, &SIMULATED_CYCLES));
    let counted = log.of("count");
    assert!(count(counted, "cycles:u") >= LOOPS[0], "{counted}");
    check_watchdog(&log);
}

/// To the last instruction, kernel included; and another seed is another run.
#[test]
fn a_seed_makes_runs_equal() {
    let image = LinuxImage::fetch().expect("the guest's image");
    let counts = |seed: &str| {
        let script = Script::default()
            .step(
                "all",
                "perf stat -x, -o /tmp/s -a -e instructions,branches loops; cat /tmp/s",
            )
            .step("random", "head -c 16 /dev/urandom | od -An -tx1; date");
        let log = script.run_on(&guest(image.clone(), &["--seed", seed, "--cpus", "2"]));
        ["all", "random"].map(|step| log.of(step).to_owned())
    };
    let first = counts("1");
    assert_eq!(first, counts("1"));
    let [_, random] = counts("2");
    assert_ne!(first[1], random);
}

/// Another emulator, with a plugin that counts, is the oracle: the same kernel, initramfs and
/// programs.
#[test]
fn a_programs_instructions_are_those_that_another_emulator_executes() {
    const NAME: &str = "a_programs_instructions_are_those_that_another_emulator_executes";
    let Some(program) = bench_programs::image() else {
        println!("skipped: {NAME}: the programs need the Rust target x86_64-unknown-none");
        return;
    };
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), program).expect("room for the programs");
    let image = LinuxImage::fetch().expect("the guest's image");
    let image = image.with_program("programs", file.path());
    // Each kind of program: integers and doubles, loops and calls. perf's start takes longest.
    let names: Vec<char> = ('a'..='m').step_by(4).collect();
    let commands: Vec<String> = names
        .iter()
        .map(|letter| {
            format!(
                "perf stat -x, -o /tmp/s -e instructions:u /opt/programs/programs {letter} 1 \
                 >/dev/null && cat /tmp/s"
            )
        })
        .collect();
    let script = commands.join("\n");

    let ours = guest(image.clone(), &[]).run(&script).successes();
    let counted: Vec<u64> = ours
        .iter()
        .map(|step| {
            field(&step.output, "instructions:u")
                .parse()
                .expect("a count")
        })
        .collect();

    let guest = image.with_script(&script).expect("a guest");
    let (console, executed) = guest
        .emulate_counting(program, Duration::from_secs(600))
        .expect("QEMU runs the guest");
    assert_eq!(steps(&console).len(), names.len(), "{console}");
    assert_eq!(counted, executed, "of {names:?}");
    assert!(counted.iter().all(|count| *count > 100_000), "{counted:?}");
}
