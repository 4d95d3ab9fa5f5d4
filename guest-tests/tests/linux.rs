//! The main job, end to end: `umpire run` boots an unmodified Debian kernel in L1, and its own
//! `perf` works with the virtual PMU.

use guest_tests::linux::perf::{
    LOG, check_cycles, check_cycles_within, count, cycle_ratios, field, near, tsc_mhz,
};
use guest_tests::linux::{LinuxImage, Step, UnderUmpire};

/// How far the number of samples may be from count / period.
const SAMPLES_TOLERANCE: f64 = 0.10;
/// How far the cycles of two vCPUs may be from those of the processor that they share.
const BOTH_TOLERANCE: f64 = 0.10;
/// About 100 Hz on a TSC of 2 to 3 GHz.
const SAMPLE_PERIOD: f64 = 25_000_000.0;

fn guest(flags: &[&str]) -> UnderUmpire {
    UnderUmpire::new(LinuxImage::fetch().expect("the guest's image"), flags)
}

/// Samples of `spin` taken by PMI, against the count of the same run.
fn check_samples(stat: &str, samples: &str) {
    let symbols: Vec<&str> = samples.lines().map(str::trim).collect();
    let number = symbols.len();
    let expected = count(stat, "cycles") / SAMPLE_PERIOD;
    let (found, busy) = (
        f64::from(u32::try_from(number).expect("some hundred")),
        symbols
            .iter()
            .filter(|line| line.contains("spin_hot"))
            .count(),
    );
    near("samples", found, expected, SAMPLES_TOLERANCE);
    assert!(
        2 * busy > number,
        "{busy} of {number} in spin_hot:\n{samples}"
    );
}

const RECORD: &str = "perf record -q -e cycles -c 25000000 -o /tmp/data \
     perf stat -x, -o /tmp/stat -e cycles taskset 1 spin 2";
const SAMPLES: &str = "perf script -i /tmp/data --comm spin,taskset -F ip,sym";
/// Both vCPUs at once; then the reports of the first one.
const BOTH: &str = "for i in 1 2 3; do \
     taskset 1 perf stat -x, --append -o /tmp/a -e cycles,task-clock spin 1 & \
     taskset 2 perf stat -x, --append -o /tmp/b -e cycles,task-clock spin 1; wait; done; \
     cat /tmp/a";

/// Counters of the second vCPU, read by the guest's own program while `perf` has them: one that is
/// counted, and one whose event nobody counts.
const ACCOUNTS: &str = "insmod /lib/modules/msr.ko && \
     taskset 2 perf stat -x, -o /tmp/c -e cycles,r1d1 -- pmu-accounting -x, 1 && cat /tmp/c";
const ACCOUNTS_OF_ALL: &str = "perf stat -a -o /tmp/c -e r1d1 -- pmu-accounting";

/// The steps that every model shares, with the events of `stat`.
fn script(stat: &str) -> String {
    [
        LOG,
        // In emulation a PMI takes so long that the kernel would lower the rate.
        "echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent",
        &format!(
            "for i in 1 2 3; do \
             perf stat -x, --append -o /tmp/s -e {stat},task-clock taskset 1 spin 1; \
             done; cat /tmp/s"
        ),
        RECORD,
        "cat /tmp/stat",
        SAMPLES,
        BOTH,
        "cat /tmp/b",
        ACCOUNTS,
        ACCOUNTS_OF_ALL,
    ]
    .join("\n")
}

/// What the guest's own program says of a counted event and of one that nobody counts, to scripts
/// and to people.
fn check_accounts(csv: &str, table: &str) {
    println!("{csv}\n{table}");
    let of = |state: &str, provenance: &str| -> Vec<&str> {
        let found = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
        let mut found =
            found.filter(|fields| fields.len() == 10 && fields[4..6] == [state, provenance]);
        found
            .next_back()
            .unwrap_or_else(|| panic!("no {state} counter in:\n{csv}"))
    };
    let counted = of("counting", "derived");
    let dead = of("unavailable", "none");
    assert_eq!((counted[0], counted[3]), ("1", "uk"), "{csv}");
    assert_eq!(dead[..4], ["1", dead[1], "r1d1", "uk"], "{csv}");
    let ticks = |fields: &[&str], at: usize| -> u64 { fields[at].parse().expect("a number") };
    assert!(ticks(&counted, 7) > 0, "{csv}");
    assert_eq!(counted[7], counted[8], "{csv}");
    assert!(ticks(&dead, 7) > 0, "{csv}");
    assert_eq!(ticks(&dead, 8), 0, "{csv}");
    assert_eq!(
        (counted[9], dead[9]),
        ("", "no source of the host counts the event")
    );
    // The same of both vCPUs; and nothing there looks like a count of 0.
    for vcpu in ["0", "1"] {
        let line = table.lines().find(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.len() > 4 && [words[0], words[2], words[4]] == [vcpu, "r1d1", "unavailable"]
        });
        let line = line.unwrap_or_else(|| panic!("no line for vCPU {vcpu} in:\n{table}"));
        assert!(line.contains("<not counted>   0.00 %"), "{line}");
        assert!(line.ends_with(dead[9]), "{line}");
    }
}

/// Two busy vCPUs on one processor of L1: each counts what it ran, together that processor.
fn check_both(first: &str, second: &str, mhz: f64) {
    let [first, second] = [first, second].map(|output| cycle_ratios(output, &["cycles"], mhz));
    println!("cycles to task-clock: {first:.4?} and {second:.4?}");
    assert!(first.len() == 3 && second.len() == 3);
    let part = |ratio: &f64| (0.25..0.75).contains(ratio);
    assert!(first.iter().chain(&second).all(part));
    // Exits and switches take time of the processor that nobody counts.
    let mut both = first.iter().zip(&second).map(|(a, b)| a + b);
    assert!(both.any(|both| (both - 1.0).abs() <= BOTH_TOLERANCE));
}

fn check_model(flags: &[&str], stat: &str, cycle_events: &[&str], log: &[&str]) -> Vec<Step> {
    let steps = guest(flags).alone().run(&script(stat)).successes();
    let [
        dmesg,
        _,
        counted,
        _,
        stat,
        samples,
        first,
        second,
        accounts,
        all,
    ] = steps.as_slice()
    else {
        panic!("ten steps");
    };
    for line in log {
        assert!(
            dmesg.output.contains(line),
            "no {line:?} in:\n{}",
            dmesg.output
        );
    }
    assert!(!dmesg.output.contains("Broken BIOS"), "{}", dmesg.output);
    let mhz = tsc_mhz(&dmesg.output);
    check_cycles(&counted.output, cycle_events, mhz);
    check_samples(&stat.output, &samples.output);
    check_both(&first.output, &second.output, mhz);
    check_accounts(&accounts.output, &all.output);
    steps
}

#[test]
fn amd_core_counts_and_samples_in_debians_kernel() {
    check_model(
        &["--pmu", "amd-core", "--cpus", "2"],
        "cycles",
        &["cycles"],
        &[
            "core perfctr, AMD PMU driver",
            "... generic registers:      6",
            "... bit width:              48",
        ],
    );
}

#[test]
fn intel_v2_counts_and_samples_in_debians_kernel() {
    let steps = check_model(
        &["--cpu-vendor", "intel", "--pmu", "intel-v2", "--cpus", "2"],
        "cycles,ref-cycles,instructions",
        &["cycles", "ref-cycles"],
        &[
            "Intel PMU driver",
            "... version:                2",
            "... generic registers:      4",
            "... fixed-purpose events:   3",
            "CPUID marked event: 'instructions' unavailable",
        ],
    );
    assert_eq!(field(&steps[2].output, "instructions"), "<not supported>");
}

/// Each way of trapping RDPMC serves the kernel's driver; patched, the guest keeps all
/// of its debug registers, and its breakpoints work beside its counters.
#[test]
fn each_rdpmc_trap_serves_debians_kernel() {
    let script = format!(
        "{LOG}\n\
         for i in 1 2 3; do \
         perf stat -x, --append -o /tmp/s -e cycles,task-clock taskset 1 spin 1; \
         done; cat /tmp/s\n\
         perf test 23 2>&1"
    );
    // Beside a breakpoint the VMM kicks the vCPU every millisecond, which takes a loop 11 to 22 %
    // of its time in L1. That time runs on the guest's task-clock and is not counted.
    for (mode, said, tolerance) in [
        ("patch", "RDPMC is trapped by a patch", 0.10),
        ("breakpoint", "RDPMC is trapped by a breakpoint", 0.25),
    ] {
        let flags = [
            "--pmu",
            "amd-core",
            "--cpus",
            "2",
            "--rdpmc-trap",
            mode,
            "-vv",
        ];
        let run = guest(&flags).alone().run(&script);
        assert!(run.errors.contains(said), "{mode}:\n{}", run.errors);
        let steps = run.successes();
        let mhz = tsc_mhz(&steps[0].output);
        check_cycles_within(&steps[1].output, &["cycles"], mhz, tolerance);
        // Watchpoints, after a counter was used.
        let watched = &steps[2].output;
        println!("{watched}");
        assert!(mode != "patch" || !watched.contains("FAILED"), "{watched}");
    }
}

/// Four vCPUs on two cores, all busy: each gets on, and their cycles are those of two cores.
#[test]
fn vcpus_share_cores_under_debians_kernel() {
    let load = "nproc\n\
         for c in 1 2 4 8; do \
         taskset $c perf stat -x, -o /tmp/s$c -e cycles,task-clock spin 2 & done; wait\n\
         cat /tmp/s1\ncat /tmp/s2\ncat /tmp/s4\ncat /tmp/s8\n\
         sleep 1";
    let flags = ["--pmu", "amd-core", "--cpus", "4", "--cores", "2"];
    // Both cores' threads take turns on L1's processor.
    let script = format!("{load}\n{LOG}");
    let steps = guest(&flags).run(&script).successes();
    let [nproc, _, reports @ .., _, dmesg] = steps.as_slice() else {
        panic!("eight steps");
    };
    assert_eq!(nproc.output.trim(), "4");
    let mhz = tsc_mhz(&dmesg.output);
    let (mut all, mut longest) = (0.0, 0.0f64);
    for Step { output, .. } in reports {
        let (cycles, clock) = (
            count(output, "cycles"),
            count(output, "task-clock") * mhz * 1000.0,
        );
        println!("cycles to task-clock: {:.3}", cycles / clock);
        // Traps take their part on a busy host, and so does the neighbour on the core.
        assert!(cycles > 0.05 * clock, "{output}");
        all += cycles;
        longest = longest.max(clock);
    }
    // They do not start all at once.
    let cores = all / longest;
    assert!(cores < 2.5, "the cycles of {cores:.2} cores: {reports:#?}");
    for trouble in ["soft lockup", "self-detected stall"] {
        assert!(!dmesg.output.contains(trouble), "{}", dmesg.output);
    }
}

#[test]
fn without_a_pmu_the_kernel_finds_none() {
    for flags in [
        &["--pmu", "none"][..],
        &["--pmu", "none", "--cpu-vendor", "intel"],
    ] {
        let stat = "perf stat -x, -o /tmp/s -e cycles true; cat /tmp/s";
        let steps = guest(flags).run(&format!("{LOG}\n{stat}")).successes();
        let dmesg = &steps[0].output;
        for driver in ["AMD PMU driver", "Intel PMU driver"] {
            assert!(!dmesg.contains(driver), "{dmesg}");
        }
        assert!(!dmesg.contains("Broken BIOS"), "{dmesg}");
        assert_eq!(field(&steps[1].output, "cycles"), "<not supported>");
    }
}

/// Without a trap KVM's #GP ends the kernel, at its first RDPMC and not before.
#[test]
fn without_a_trap_the_kernel_ends_at_its_first_rdpmc() {
    let guest = guest(&["--pmu", "amd-core", "--rdpmc-trap", "none"])
        .with_kernel_options("nmi_watchdog=0 oops=panic");
    let script = format!("{LOG}\nperf stat -e cycles true\necho went on");
    let (console, errors) = guest.run_to_any_end(&script);
    for line in [
        "AMD PMU driver",
        "general protection fault",
        "RIP: 0010:native_read_pmc",
        "Kernel panic - not syncing: Fatal exception",
    ] {
        assert!(
            console.contains(line),
            "no {line:?} in:\n{console}\n{errors}"
        );
    }
    assert!(!console.contains("#### begin 3"), "{console}");
}
