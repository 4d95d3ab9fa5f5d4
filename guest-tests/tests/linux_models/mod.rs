//! Debian's kernels, 6.1 and 6.12, on the PMU models: each driver takes the number of counters,
//! the fixed ones and the version that were announced, counts and samples, and warns of nothing.
//! 6.1 on KVM in L1, and 6.12 on the engine emu, which counts instructions too; a model of each
//! vendor has 6.12 on both.

mod identities;
mod on_emu;
mod watchdog;

use guest_tests::linux::perf::{
    COUNT_LOOPS, LOG, check_cycles_within, check_loops, count, field, near, tsc_mhz,
};
use guest_tests::linux::{LinuxImage, SIMULATED_CYCLES, Step, UnderUmpire};
use pmu_virt::Vendor;
use vmm::config::Engine;

/// One model, and what the kernel's log says of it.
struct Case {
    vendor: &'static str,
    model: &'static str,
    /// What the line that names the driver has.
    driver: &'static [&'static str],
    /// Version, programmable counters, their bits.
    counts: [u8; 3],
}

const fn intel(model: &'static str, counts: [u8; 3]) -> Case {
    Case {
        vendor: "intel",
        model,
        driver: match counts[0] {
            1 => &["generic architected perfmon v1, core PMU driver"],
            5 => &[
                "generic architected perfmon",
                "AnyThread deprecated",
                "full-width counters, Intel PMU driver",
            ],
            _ => &["generic architected perfmon, full-width counters, Intel PMU driver"],
        },
        counts,
    }
}

const fn amd(
    model: &'static str,
    driver: &'static [&'static str],
    [version, counters]: [u8; 2],
) -> Case {
    Case {
        vendor: "amd",
        model,
        driver,
        counts: [version, counters, 48],
    }
}

/// Fixed-function counters that a model of this version has, by bit. `clock` counts no
/// instructions: only version 5 can say that their counter is absent.
fn fixed(vendor: &str, version: u8, engine: Engine) -> u64 {
    match (vendor, version, engine) {
        ("amd", ..) | (_, 1, _) => 0,
        (_, 5, Engine::Kvm) => 0b110,
        _ => 0b111,
    }
}

const INTEL: [Case; 5] = [
    intel("intel-v1", [1, 2, 40]),
    intel("intel-v2", [2, 4, 48]),
    intel("intel-v3", [3, 4, 48]),
    intel("intel-v4", [4, 4, 48]),
    intel("intel-v5", [5, 8, 48]),
];

const AMD: [Case; 4] = [
    amd("amd-k7", &["AMD PMU driver"], [0, 4]),
    amd("amd-fam10h", &["AMD PMU driver"], [0, 4]),
    amd("amd-core", &["core perfctr, AMD PMU driver"], [0, 6]),
    amd("amd-perfmonv2", &["AMD PMU driver"], [2, 6]),
];

/// What a kernel says when it meets something that should not be.
const TROUBLE: &str = "dmesg | grep -E 'WARNING|unchecked MSR|Call Trace|BUG:|Broken BIOS|\
     dazed|perfevents: irq loop|hw perf events|lockup' || true";

/// Cycles and samples are as exact as a busy L1 lets them be: `linux` measures them.
const TOLERANCE: f64 = 0.3;
const SAMPLES: &str = "perf script -i /tmp/data --comm spin,taskset -F ip | wc -l";

/// Where cycles come from, as flags.
fn cycles(engine: Engine) -> [&'static str; 2] {
    match engine {
        Engine::Kvm => ["--counters", "clock"],
        Engine::Emu => SIMULATED_CYCLES,
    }
}

/// Reports of `perf stat` about so many rounds of `spin`, one of which has to be right on a busy
/// L1. No neighbour disturbs emu, where a second of a guest takes some of the host's.
fn counted(engine: Engine, events: &str) -> String {
    let (rounds, seconds) = match engine {
        Engine::Kvm => ("1 2 3", 0.4),
        Engine::Emu => ("1", 0.1),
    };
    format!(
        "for i in {rounds}; do perf stat -x, --append -o /tmp/s \
         -e {events},task-clock taskset 1 spin {seconds}; done; cat /tmp/s"
    )
}

/// [`COUNT_LOOPS`] on a model with so many programmable counters. The one with two has no others, and
/// three events would take turns there.
fn exact(counters: u8) -> &'static str {
    match counters {
        2 => {
            "perf stat -x, -o /tmp/s -e instructions:u,branches:u loops && \
             perf stat -x, --append -o /tmp/s -e instructions loops && cat /tmp/s"
        }
        _ => COUNT_LOOPS,
    }
}

/// For how long cycles are sampled, in seconds, and how many lie between two samples: about 100 Hz
/// on a TSC of 2 to 3 GHz, and 1 kHz on emu's.
fn sampling(engine: Engine) -> (f64, u32) {
    match engine {
        Engine::Kvm => (1.0, 25_000_000),
        Engine::Emu => (0.1, 1_000_000),
    }
}

/// What counts each instruction counts those of a program to the last one.
fn check_instructions(engine: Engine, name: &str, vendor: &str, counted: &Step, exact: &Step) {
    match engine {
        Engine::Emu if vendor == "amd" => check_loops(&exact.output, Vendor::Amd),
        Engine::Emu => check_loops(&exact.output, Vendor::Intel),
        Engine::Kvm if vendor == "intel" => {
            let instructions = field(&counted.output, "instructions");
            assert_eq!(instructions, "<not supported>", "{name}");
        }
        Engine::Kvm => {}
    }
}

fn check(engine: Engine, case: &Case, image: LinuxImage) {
    let model = case.model;
    let [version, counters, _] = case.counts;
    let events: &[&str] = match fixed(case.vendor, version, engine) {
        0 => &["cycles"],
        _ => &["cycles", "ref-cycles"],
    };
    let (seconds, period) = sampling(engine);
    let record = format!(
        "perf record -q -e cycles -c {period} -o /tmp/data \
         perf stat -x, -o /tmp/stat -e cycles taskset 1 spin {seconds}"
    );
    let script = [
        LOG,
        "echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent",
        &counted(engine, &format!("{},instructions", events.join(","))),
        exact(counters),
        &record,
        "cat /tmp/stat",
        SAMPLES,
        TROUBLE,
    ]
    .join("\n");
    let flags = [
        ["--cpu-vendor", case.vendor],
        ["--pmu", model],
        cycles(engine),
    ];
    let guest = UnderUmpire::on(engine, image, flags.as_flattened());
    let steps = guest.run(&script).successes();
    let [log, _, counted, exact, _, stat, samples, trouble] = steps.as_slice() else {
        panic!("eight steps");
    };
    check_log(engine, case, log);
    check_cycles_within(&counted.output, events, tsc_mhz(&log.output), TOLERANCE);
    check_instructions(engine, model, case.vendor, counted, exact);
    let found: f64 = samples.output.trim().parse().expect("a number of samples");
    let expected = count(&stat.output, "cycles") / f64::from(period);
    near("samples", found, expected, TOLERANCE);
    assert_eq!(trouble.output.trim(), "", "{model}");
}

fn check_log(engine: Engine, case: &Case, log: &Step) {
    let [version, counters, width] = case.counts;
    let fixed = fixed(case.vendor, version, engine);
    let mask = fixed << 32 | ((1 << counters) - 1);
    let lines = [
        format!("... version: {version}"),
        format!("... generic registers: {counters}"),
        format!("... bit width: {width}"),
        format!("... fixed-purpose events: {}", fixed.count_ones()),
        format!("... event mask: {mask:016x}"),
    ];
    let driver = case.driver.iter().map(|part| (*part).to_owned());
    let said = folded(&log.output);
    for line in driver.chain(lines) {
        assert!(
            said.contains(&line),
            "{}: no {line:?} in:\n{said}",
            case.model
        );
    }
}

/// A log with one blank where it has several, and in the words of 6.1: kernels indent differently,
/// and those of 7.x call three things otherwise.
fn folded(log: &str) -> String {
    const NEWER: [(&str, &str); 3] = [
        ("generic counters:", "generic registers:"),
        ("fixed-purpose counters:", "fixed-purpose events:"),
        ("global_ctrl mask:", "event mask:"),
    ];
    let line = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let log = log.lines().map(line).collect::<Vec<_>>().join("\n");
    let older = |log: String, (newer, older): (&str, &str)| log.replace(newer, older);
    NEWER.into_iter().fold(log, older)
}

fn check_all(engine: Engine, cases: &[Case], image: impl Fn() -> LinuxImage) {
    for case in cases {
        println!("{}", case.model);
        check(engine, case, image());
    }
}

fn older() -> LinuxImage {
    LinuxImage::fetch().expect("the guest's image")
}

/// 6.12, or with `UMPIRE_TEST_KERNEL=newest` the newest that Debian has, for a look at it.
fn newer() -> LinuxImage {
    let newer = match std::env::var("UMPIRE_TEST_KERNEL").as_deref() {
        Ok("newest") => LinuxImage::fetch_newest(),
        _ => LinuxImage::fetch_newer(),
    };
    newer.expect("the guest's newer image")
}

#[test]
fn linux_6_1_takes_intels_first_versions() {
    check_all(Engine::Kvm, &INTEL[..3], older);
}

#[test]
fn linux_6_1_takes_intels_version_4() {
    check_all(Engine::Kvm, &INTEL[3..4], older);
}

#[test]
fn linux_6_1_takes_intels_version_5() {
    check_all(Engine::Kvm, &INTEL[4..], older);
}

#[test]
fn linux_6_1_takes_amds_models() {
    check_all(Engine::Kvm, &AMD, older);
}

/// All of its other models are in [`on_emu`], as are these.
#[test]
fn linux_6_12_takes_a_model_of_each_vendor() {
    check_all(Engine::Kvm, &INTEL[1..2], newer);
    check_all(Engine::Kvm, &AMD[3..], newer);
}
