//! The main job, end to end: `umpire run` boots an unmodified Debian kernel in L1, and its own
//! `perf` works with the virtual PMU.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use guest_tests::l1::{End, Machine, Run};
use guest_tests::linux::{self, Image, Step};
use guest_tests::umpire;

/// One guest at a time: two emulated machines on two processors would measure each other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const TIMEOUT: Duration = Duration::from_secs(240);
/// How far cycles may be from run time times TSC frequency.
const CYCLES_TOLERANCE: f64 = 0.05;
/// How far the number of samples may be from count / period.
const SAMPLES_TOLERANCE: f64 = 0.10;
/// About 100 Hz on a TSC of 2 to 3 GHz.
const SAMPLE_PERIOD: f64 = 25_000_000.0;

/// Boots the guest with `flags`, runs `script` and gives its steps; every step has to succeed.
fn boot(flags: &[&str], script: &str) -> Vec<Step> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let guest = Image::fetch()
        .and_then(|image| image.with_script(script))
        .expect("the guest's image");
    let run = Run::new(umpire::path())
        .args(["run", "--memory", "512", "--timeout", "180"])
        .args(["--cmdline", linux::COMMAND_LINE])
        .args(flags)
        .arg("--kernel")
        .arg(guest.kernel())
        .arg("--initrd")
        .arg(guest.initrd());
    let output = Machine::new()
        .memory_mib(2048)
        .timeout(TIMEOUT)
        .output(&run)
        .expect("L1 works");
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(
        output.outcome.end,
        End::Exited(0),
        "{out}\n{err}\n{}",
        tail(&output.outcome.console)
    );
    let steps = linux::steps(&out);
    for step in &steps {
        assert_eq!(step.status, Some(0), "{}:\n{}", step.command, step.output);
    }
    assert_eq!(steps.len(), script.lines().count(), "{out}\n{err}");
    steps
}

/// The end of a long log.
fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// The kernel's own figure of the TSC's frequency in MHz.
fn tsc_mhz(dmesg: &str) -> f64 {
    let line = dmesg
        .lines()
        .find(|line| line.contains("tsc: Detected"))
        .expect("dmesg names the TSC's frequency");
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words
        .iter()
        .position(|word| *word == "MHz")
        .expect("a number of MHz");
    words[at - 1].parse().expect("a number")
}

/// What `perf stat -x,` says of `event`: the first field of its line.
fn field<'a>(csv: &'a str, event: &str) -> &'a str {
    csv.lines()
        .find_map(|line| {
            let fields: Vec<&str> = line.split(',').collect();
            (fields.get(2) == Some(&event)).then(|| fields[0])
        })
        .unwrap_or_else(|| panic!("no {event} in:\n{csv}"))
}

fn count(csv: &str, event: &str) -> f64 {
    let text = field(csv, event);
    text.parse()
        .unwrap_or_else(|_| panic!("{event} is {text:?} in:\n{csv}"))
}

fn near(what: &str, found: f64, expected: f64, tolerance: f64) {
    let ratio = found / expected;
    println!("{what}: {found:.0}, expected {expected:.0}, ratio {ratio:.4}");
    assert!(
        (ratio - 1.0).abs() <= tolerance,
        "{what}: {found} is not within {tolerance} of {expected}"
    );
}

/// The worst ratio of `events` in one `perf stat` to its task-clock (milliseconds) times the TSC.
fn cycle_ratio(csv: &str, events: &[&str], mhz: f64) -> f64 {
    let expected = count(csv, "task-clock") * mhz * 1000.0;
    let ratios = events.iter().map(|event| count(csv, event) / expected);
    let worst = ratios.max_by(|a, b| (a - 1.0).abs().total_cmp(&(b - 1.0).abs()));
    worst.expect("an event")
}

/// Checks cycle events of the reports in `output`, all of the same measurement.
///
/// One of them has to be right. Time that the VMM takes to answer a trap runs on the guest's
/// task-clock but is not counted, and on a host with other work that time has no bound: noise
/// can make a count smaller, never right.
fn check_cycles(output: &str, events: &[&str], mhz: f64) {
    let reports = output.split("# started").skip(1);
    let ratios: Vec<f64> = reports.map(|csv| cycle_ratio(csv, events, mhz)).collect();
    println!("{events:?} to task-clock: {ratios:.4?}");
    assert!(
        ratios
            .iter()
            .any(|ratio| (ratio - 1.0).abs() <= CYCLES_TOLERANCE),
        "{events:?} to task-clock: {ratios:?}\n{output}"
    );
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

/// What the kernel said that tests look for. Not all of it: much output of a guest with several
/// vCPUs ends L1 (docs/testing.md, "Limits of L1").
const LOG: &str =
    "dmesg | grep -E 'tsc: Detected|PMU|[.]{3} |Broken BIOS|CPUID marked|lockup|self-detected'";

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
    ]
    .join("\n")
}

fn check_model(flags: &[&str], stat: &str, cycle_events: &[&str], log: &[&str]) -> Vec<Step> {
    let steps = boot(flags, &script(stat));
    let [dmesg, _, counted, _, stat, samples, first, second] = steps.as_slice() else {
        panic!("eight steps");
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
    for vcpu in [first, second] {
        check_cycles(&vcpu.output, &["cycles"], mhz);
    }
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

/// Four vCPUs on two cores, all busy: each gets on, and their cycles are those of two cores.
#[test]
fn vcpus_share_cores_under_debians_kernel() {
    let load = "nproc\n\
         for c in 1 2 4 8; do \
         taskset $c perf stat -x, -o /tmp/s$c -e cycles,task-clock spin 2 & done; wait\n\
         cat /tmp/s1\ncat /tmp/s2\ncat /tmp/s4\ncat /tmp/s8\n\
         sleep 1";
    let steps = boot(
        &["--pmu", "amd-core", "--cpus", "4", "--cores", "2"],
        &format!("{load}\n{LOG}"),
    );
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
        let steps = boot(flags, &format!("{LOG}\n{stat}"));
        let dmesg = &steps[0].output;
        for driver in ["AMD PMU driver", "Intel PMU driver"] {
            assert!(!dmesg.contains(driver), "{dmesg}");
        }
        assert!(!dmesg.contains("Broken BIOS"), "{dmesg}");
        assert_eq!(field(&steps[1].output, "cycles"), "<not supported>");
    }
}
