//! Debian's kernels, 6.1 and 6.12, on the PMU models: each driver takes the number of counters,
//! the fixed ones and the version that were announced, counts and samples, and warns of nothing.

mod identities;
mod watchdog;

use guest_tests::linux::perf::{LOG, check_cycles_within, count, field, near, tsc_mhz};
use guest_tests::linux::{LinuxImage, Step, UnderUmpire};

/// One model, and what the kernel's log says of it.
struct Case {
    vendor: &'static str,
    model: &'static str,
    /// What the line that names the driver has.
    driver: &'static [&'static str],
    /// Version, programmable counters, their bits, fixed-function counters.
    counts: [u8; 4],
    mask: u64,
}

/// `clock` counts no instructions: only version 5 can say that their fixed counter is absent.
const fn intel(model: &'static str, counts: [u8; 4], mask: u64) -> Case {
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
        mask,
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
        counts: [version, counters, 48, 0],
        mask: (1 << counters) - 1,
    }
}

const INTEL: [Case; 5] = [
    intel("intel-v1", [1, 2, 40, 0], 0b11),
    intel("intel-v2", [2, 4, 48, 3], 0x7_0000_000f),
    intel("intel-v3", [3, 4, 48, 3], 0x7_0000_000f),
    intel("intel-v4", [4, 4, 48, 3], 0x7_0000_000f),
    intel("intel-v5", [5, 8, 48, 2], 0x6_0000_00ff),
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
/// About 100 Hz on a TSC of 2 to 3 GHz.
const PERIOD: f64 = 25_000_000.0;
const RECORD: &str = "perf record -q -e cycles -c 25000000 -o /tmp/data \
     perf stat -x, -o /tmp/stat -e cycles taskset 1 spin 1";
const SAMPLES: &str = "perf script -i /tmp/data --comm spin,taskset -F ip | wc -l";

fn check(case: &Case, image: LinuxImage) {
    let model = case.model;
    let ref_cycles = if case.counts[3] > 0 {
        ",ref-cycles"
    } else {
        ""
    };
    let stat = format!(
        "for i in 1 2 3; do perf stat -x, --append -o /tmp/s \
         -e cycles{ref_cycles},instructions,task-clock taskset 1 spin 0.4; done; cat /tmp/s"
    );
    let script = [
        LOG,
        "echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent",
        &stat,
        RECORD,
        "cat /tmp/stat",
        SAMPLES,
        TROUBLE,
    ]
    .join("\n");
    let flags = [
        "--cpu-vendor",
        case.vendor,
        "--pmu",
        model,
        "--counters",
        "clock",
    ];
    let guest = UnderUmpire::new(image, &flags);
    let steps = guest.run(&script).successes();
    let [log, _, counted, _, stat, samples, trouble] = steps.as_slice() else {
        panic!("seven steps");
    };
    check_log(case, log);
    let mhz = tsc_mhz(&log.output);
    let events: &[&str] = if ref_cycles.is_empty() {
        &["cycles"]
    } else {
        &["cycles", "ref-cycles"]
    };
    check_cycles_within(&counted.output, events, mhz, TOLERANCE);
    if case.vendor == "intel" {
        assert_eq!(field(&counted.output, "instructions"), "<not supported>");
    }
    let found: f64 = samples.output.trim().parse().expect("a number of samples");
    near(
        "samples",
        found,
        count(&stat.output, "cycles") / PERIOD,
        TOLERANCE,
    );
    assert_eq!(trouble.output.trim(), "", "{model}");
}

fn check_log(case: &Case, log: &Step) {
    let [version, counters, width, fixed] = case.counts;
    let lines = [
        format!("... version: {version}"),
        format!("... generic registers: {counters}"),
        format!("... bit width: {width}"),
        format!("... fixed-purpose events: {fixed}"),
        format!("... event mask: {:016x}", case.mask),
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

/// A log with one blank where it has several: kernels indent differently.
fn folded(log: &str) -> String {
    let line = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    log.lines().map(line).collect::<Vec<_>>().join("\n")
}

fn check_all(cases: &[Case], image: impl Fn() -> LinuxImage) {
    for case in cases {
        println!("{}", case.model);
        check(case, image());
    }
}

fn older() -> LinuxImage {
    LinuxImage::fetch().expect("the guest's image")
}

/// 6.12, or with `UMPIRE_TEST_KERNEL=newest` the newest that Debian has, for a look at it: what
/// its driver says in the log may differ from what the tests expect.
fn newer() -> LinuxImage {
    let newer = match std::env::var("UMPIRE_TEST_KERNEL").as_deref() {
        Ok("newest") => LinuxImage::fetch_newest(),
        _ => LinuxImage::fetch_newer(),
    };
    newer.expect("the guest's newer image")
}

#[test]
fn linux_6_1_takes_intels_first_versions() {
    check_all(&INTEL[..3], older);
}

#[test]
fn linux_6_1_takes_intels_version_4() {
    check_all(&INTEL[3..4], older);
}

#[test]
fn linux_6_1_takes_intels_version_5() {
    check_all(&INTEL[4..], older);
}

/// Versions 4 and 5 that kernel has with the processors of [`identities`].
#[test]
fn linux_6_12_takes_intels_first_versions() {
    check_all(&INTEL[..3], newer);
}

#[test]
fn linux_6_1_takes_amds_models() {
    check_all(&AMD, older);
}

/// The other models that kernel has with the processors of [`identities`].
#[test]
fn linux_6_12_takes_amds_first_and_last_model() {
    check_all(&AMD[..1], newer);
    check_all(&AMD[3..], newer);
}
