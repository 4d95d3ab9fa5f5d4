//! PEBS in Debian's kernel 6.1: its driver takes the debug store, `perf record` of precise
//! events takes the records, and nothing is said of trouble. Skidding ones on KVM in L1, exact ones on
//! the engine emu.

use guest_tests::linux::perf::{count, count_samples, near, samples};
use guest_tests::linux::{LinuxImage, UnderUmpire};
use vmm::config::Engine;

const LOG: &str = "dmesg | grep -E 'PEBS|PMU driver|... version|generic registers'";
/// The highest precision that the driver offers, and whether branch trace storage is there.
const CAPABILITIES: &str = "cat /sys/bus/event_source/devices/cpu/caps/max_precise; \
     ls /sys/bus/event_source/devices | grep -c bts; grep -o -w -E 'ds|dtes64|pebs|bts' \
     /proc/cpuinfo | sort -u";
/// What a kernel says when it meets something that should not be.
const TROUBLE: &str = "dmesg | grep -E 'WARNING|unchecked MSR|Call Trace|BUG:|Broken BIOS|\
     dazed|perfevents: irq loop|hw perf events|lockup|PEBS record size' || true";

/// Cycles and samples are as exact as a busy L1 lets them be: `linux` measures them.
const TOLERANCE: f64 = 0.3;
/// About 100 Hz on a TSC of 2 to 3 GHz.
const PERIOD: f64 = 25_000_000.0;
/// `instructions:upp` with a period of 10,006 records the instruction behind each overflow: every
/// 10,007th.
const APART: usize = 10_007;

fn check(model: &str, format: &str) {
    let record = |flags: &str, file: &str| {
        format!(
            "perf record -q -e cycles:pp {flags} -o {file} \
             perf stat -x, -o /tmp/stat -e cycles taskset 1 spin 1; cat /tmp/stat"
        )
    };
    let script = [
        LOG,
        CAPABILITIES,
        "echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent",
        "grep NMI /proc/interrupts",
        &record("-c 25000000", "/tmp/period"),
        "grep NMI /proc/interrupts",
        &count_samples("/tmp/period"),
        &record("-F 100", "/tmp/rate"),
        &count_samples("/tmp/rate"),
        // Groups of a record: general registers; memory.
        &record("-F 100 --intr-regs=ax,sp,ip", "/tmp/regs"),
        &count_samples("/tmp/regs"),
        "perf script -i /tmp/regs --comm spin -F ip,iregs | head -n 3",
        &record("-F 100 -d", "/tmp/data"),
        &count_samples("/tmp/data"),
        TROUBLE,
    ]
    .join("\n");
    let flags = [
        "--cpu-vendor",
        "intel",
        "--pmu",
        model,
        "--counters",
        "clock",
    ];
    let image = LinuxImage::fetch().expect("the guest's image");
    let run = UnderUmpire::new(image, &flags).run(&script);
    for step in &run.steps {
        println!("{}\n{}", step.command, step.output);
    }
    let steps = run.successes();
    let [
        log,
        caps,
        _,
        _,
        stat,
        _,
        period,
        _,
        rate,
        _,
        regs,
        values,
        _,
        data,
        trouble,
    ] = steps.as_slice()
    else {
        panic!("fifteen steps");
    };
    assert!(log.output.contains(format), "{format:?} in {}", log.output);
    let words: Vec<&str> = caps.output.split_whitespace().collect();
    assert_eq!(words, ["2", "0", "ds", "dtes64", "pebs"], "{}", caps.output);
    let found = samples(&period.output);
    near(
        "samples",
        found.busy.into(),
        count(&stat.output, "cycles") / PERIOD,
        TOLERANCE,
    );
    assert_eq!(found.exact, found.all, "all are exact");
    for (what, step) in [("-F", rate), ("registers", regs), ("-d", data)] {
        let found = samples(&step.output);
        assert!(found.busy >= 20, "{what}: {found:?}");
        assert_eq!(found.exact, found.all, "{what}: all are exact");
    }
    assert!(values.output.contains("AX:0x"), "{}", values.output);
    assert_eq!(trouble.output.trim(), "", "{model}");
}

#[test]
fn linux_6_1_samples_with_pebs_on_version_2() {
    check("intel-v2,pebs=skid", "PEBS fmt4+-baseline");
}

#[test]
fn linux_6_1_samples_with_pebs_on_version_5() {
    check("intel-v5,pebs=skid", "PEBS fmt4+-baseline");
}

/// On the engine emu, which is exact. From a record to the next it is an odd number of instructions,
/// so the two of the program's loop, `dec` and `jnz`, take turns. The first record is of `jnz`:
/// before the loop there is one instruction.
#[test]
fn linux_6_1_samples_exactly_on_emu() {
    const LOOP: [&str; 2] = ["loops_hot+0x0", "loops_hot+0x2"];
    let record = format!(
        "perf record -q -e instructions:upp -c {} -o /tmp/data loops",
        APART - 1
    );
    let script = [
        LOG,
        &record,
        "perf script -i /tmp/data -F ip,sym,symoff",
        &count_samples("/tmp/data"),
        TROUBLE,
    ];
    let flags = ["--cpu-vendor", "intel", "--pmu", "intel-v5,pebs=exact"];
    let image = LinuxImage::fetch().expect("the guest's image");
    let guest = UnderUmpire::on(Engine::Emu, image, &flags);
    let steps = guest.run(&script.join("\n")).successes();
    let [log, _, places, marked, trouble] = steps.as_slice() else {
        panic!("five steps");
    };
    assert!(log.output.contains("PEBS fmt4+-baseline"), "{}", log.output);
    let places = places.output.lines();
    let places: Vec<&str> = places
        .filter_map(|line| line.split_whitespace().nth(1))
        .collect();
    assert_eq!(places.len(), 2_000_004 / APART, "{places:?}");
    for (n, place) in places.iter().enumerate() {
        assert_eq!(*place, LOOP[(n + 1) % 2], "record {n} of {places:?}");
    }
    let marked = samples(&marked.output);
    assert_eq!(marked.exact, marked.all, "all are exact");
    assert_eq!(trouble.output.trim(), "");
}
