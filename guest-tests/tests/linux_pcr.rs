//! Counter reservations under an unmodified Debian kernel: its own driver beside counters that
//! others hold, and the three arbiters of `guest-tests/linux/pcr` as its modules.

use std::time::Duration;

use arbiter::abi::{MSR_BASE, MSR_STATUS, STATUS_PRIVATE};
use guest_tests::linux::perf::{LOG, check_cycles_within, count, field, tsc_mhz};
use guest_tests::linux::{self, Image, MODULES, Step, UnderUmpire};

/// Firmware that keeps the first counter for itself.
const FIRMWARE: [&str; 4] = [
    "--firmware",
    "builtin",
    "--firmware-counter",
    "cycles,on=PMC0",
];
/// The NMI watchdog would hold counters from the start.
const NO_WATCHDOG: &str = "nmi_watchdog=0";
/// Cycles by `perf`, twice, with its reports as output.
const PERF: &str = "rm -f /tmp/s; for i in 1 2; do \
     perf stat -x, --append -o /tmp/s -e cycles,task-clock taskset 1 spin 0.4; done; cat /tmp/s";
/// How far cycles may be from run time times TSC frequency. The tests in `linux.rs` look at the
/// percents; a counter that somebody else has shows in orders of magnitude.
const TOLERANCE: f64 = 0.4;
/// What no kernel that works says.
const TROUBLE: &str =
    "dmesg | grep -cE 'WARNING|BUG|Oops|lockup|general protection|unchecked MSR' || true";

/// A script whose steps have names.
#[derive(Default)]
struct Script {
    names: Vec<&'static str>,
    lines: Vec<String>,
}

/// What its steps printed.
struct Log {
    names: Vec<&'static str>,
    steps: Vec<Step>,
    errors: String,
}

impl Script {
    fn step(mut self, name: &'static str, line: impl Into<String>) -> Self {
        self.names.push(name);
        self.lines.push(line.into());
        self
    }

    /// Loads a module; its messages are the output.
    fn load(self, name: &'static str, module: &str, options: &str) -> Self {
        let line = format!(
            "insmod /lib/modules/{module}.ko {options} && dmesg | grep '{module}: '; dmesg -c >/tmp/{module}"
        );
        self.step(name, line)
    }

    fn run(self, image: Image, flags: &[&str], options: &str) -> Log {
        let guest = UnderUmpire::new(image, flags).with_kernel_options(options);
        let ran = guest.run(&self.lines.join("\n"));
        let (names, errors) = (self.names, ran.errors);
        for (name, step) in names.iter().zip(&ran.steps) {
            println!("--- {name}: {:?}\n{}", step.status, step.output);
        }
        Log {
            names,
            steps: ran.steps,
            errors,
        }
    }
}

impl Log {
    fn step(&self, name: &str) -> &Step {
        let at = self.names.iter().position(|found| *found == name);
        &self.steps[at.expect("a step of that name")]
    }

    /// What the step printed.
    fn of(&self, name: &str) -> &str {
        &self.step(name).output
    }

    /// Checks that each of `lines` is part of what the step printed.
    fn has(&self, name: &str, lines: &[&str]) {
        let output = self.of(name);
        for line in lines {
            assert!(
                output.contains(line),
                "{name} has no {line:?}:\n{output}\n{}",
                self.errors
            );
        }
    }

    /// Checks that the kernel is well.
    fn is_well(&self) {
        assert_eq!(
            self.of("trouble"),
            "0",
            "{:#?}\n{}",
            self.steps,
            self.errors
        );
    }
}

fn image() -> Image {
    let image = Image::fetch().and_then(Image::with_arbiters);
    image.expect("the guest's image")
}

/// On a machine without reservations the modules say so, and leave nothing behind.
#[test]
fn arbiters_find_no_reservations_elsewhere() {
    let load = |module: &&str| format!("insmod /lib/modules/{module}.ko");
    let script: Vec<String> = MODULES[..3].iter().map(load).collect();
    let script = format!(
        "{}\ndmesg | grep pcr_\ncat /proc/modules /sys/kernel/debug/kprobes/list",
        script.join("\n")
    );
    let guest = image().with_script(&script).expect("the initramfs");
    let console = guest.emulate(Duration::from_secs(120)).expect("QEMU works");
    let steps = linux::steps(&console);
    let [loads @ .., log, left] = steps.as_slice() else {
        panic!("five steps:\n{console}");
    };
    for (module, step) in MODULES.iter().zip(loads) {
        assert!(step.output.contains("No such device"), "{}", step.output);
        let line = format!("{module}: no counter reservations on this machine");
        assert!(log.output.contains(&line), "{}", log.output);
    }
    assert!(!log.output.contains("WARNING"), "{}", log.output);
    assert_eq!(left.output, "");
}

/// What the client of the fully enforcing arbiter gets.
#[derive(Clone, Copy)]
enum Client {
    TakesOneOfLinux,
    /// CPUID announces fewer counters than are free.
    TakesOneWithoutName,
}

/// Names of the registers by which the kernel reaches a counter.
struct Names {
    select: u32,
    counter: u32,
    /// Counts cycles.
    cycles: u32,
}

const AMD: Names = Names {
    select: 0xc001_0200,
    counter: 0xc001_0201,
    cycles: 0x53_0076,
};
const INTEL: Names = Names {
    select: 0x186,
    counter: 0xc1,
    cycles: 0x53_003c,
};

/// A component that knows nothing of reservations: programs the first counter of CPU 1 and looks
/// at it. Four lines.
fn rogue(names: &Names) -> String {
    let Names {
        select,
        counter,
        cycles,
    } = names;
    format!(
        "msr 1 {select:#x} {cycles:#x}; msr 1 {select:#x}; msr 1 {counter:#x} 4660; msr 1 {counter:#x}"
    )
}

/// Status of the counter at position 1, the first one that the kernel has.
fn status(cpu: u32) -> String {
    format!("msr {cpu} {:#x}", MSR_BASE + MSR_STATUS + 1)
}

fn is_private(line: &str) -> bool {
    let digits = line.trim().trim_start_matches("0x");
    let word = u64::from_str_radix(digits, 16).expect("a status word");
    word & STATUS_PRIVATE != 0
}

/// Firmware holds PMC0, CPUID follows: the kernel has `counters` and counts right, without and
/// with each arbiter; rogues are dropped, and faulted.
fn check_arbiters(flags: &[&str], names: &Names, counters: u32, client: Client) {
    let watch = format!("{}; {}", status(0), status(1));
    let under_perf =
        format!("perf stat -x, -o /tmp/e -e cycles,task-clock sh -c '{watch}; spin 0.1'; {watch}");
    let script = Script::default()
        .step("log", LOG)
        .step("plain", PERF)
        .step(
            "msr",
            "insmod /lib/modules/msr.ko allow_writes=on; dmesg -c >/tmp/boot",
        )
        .load("minimal", "pcr_minimal", "")
        .step("minimal perf", PERF)
        .step("minimal rogue", rogue(names))
        .step(
            "minimal out",
            format!("msr 1 {:#x} 0; rmmod pcr_minimal", names.select),
        )
        .load("enforcing", "pcr_enforcing", "")
        .step("drop", rogue(names))
        .step("open", under_perf)
        .step("enforcing perf", PERF)
        .step("enforcing out", "rmmod pcr_enforcing")
        .step(
            "watched",
            "echo 1 >/proc/sys/kernel/nmi_watchdog; insmod /lib/modules/pcr_enforcing.ko",
        )
        .step("watched status", watch)
        .step("watched out", "rmmod pcr_enforcing")
        .step(
            "unwatched out",
            "echo 0 >/proc/sys/kernel/nmi_watchdog; rmmod pcr_enforcing",
        )
        .load("faulting", "pcr_enforcing", "fault=1")
        .step("fault", rogue(names))
        .step("faulting perf", PERF)
        .step("faulting out", "rmmod pcr_enforcing")
        .load("full", "pcr_full", "")
        .load("client", "pcr_client", "")
        .step("busy", "rmmod pcr_full")
        .step("full perf", "perf stat -x, -e cycles true")
        .step(
            "client out",
            "rmmod pcr_client; dmesg | grep 'pcr_client: release'",
        )
        .step("full perf again", PERF)
        .step("full out", "rmmod pcr_full; cat /proc/modules")
        .step(
            "trouble",
            format!("cat /tmp/pcr_* /tmp/boot >/dev/null; {TROUBLE}"),
        );
    let all = [&FIRMWARE, flags, &["--cpus", "2"]].concat();
    let log = script.run(image(), &all, NO_WATCHDOG);

    log.has("log", &[&format!("... generic registers:      {counters}")]);
    let mhz = tsc_mhz(log.of("log"));
    check_cycles_within(log.of("plain"), &["cycles"], mhz, TOLERANCE);

    let found = [
        "PMC0 is the firmware's on CPU 0",
        "PMC0 is the firmware's on CPU 1",
    ];
    let locked = ["PMC1 locked on 2 CPUs", "PMC2 locked on 2 CPUs"];
    for loaded in ["minimal", "enforcing", "faulting", "full"] {
        log.has(loaded, &found);
        log.has(loaded, &locked);
        assert_eq!(log.step(loaded).status, Some(0));
    }
    for report in [
        "minimal perf",
        "enforcing perf",
        "faulting perf",
        "full perf again",
    ] {
        check_cycles_within(log.of(report), &["cycles"], mhz, TOLERANCE);
    }
    // The minimal arbiter enforces nothing within the kernel.
    let cycles = format!("{:#x}", names.cycles);
    let [written, select, _, counted] = lines(log.of("minimal rogue"));
    assert_eq!((written, select), ("written", cycles.as_str()));
    assert_ne!(counted, "0x0");
    assert_eq!(lines(log.of("drop")), ["written", "0x0", "written", "0x0"]);
    assert_eq!(lines(log.of("fault")), ["fault"; 4]);
    let [first, second, _, after_first, after_second] = lines(log.of("open"));
    assert!(
        !is_private(first) && !is_private(second),
        "open while perf counts"
    );
    assert!(
        is_private(after_first) && is_private(after_second),
        "closed after it"
    );
    // A module that comes later leaves the watchdog its counters, and stays while it has them.
    let [first, second] = lines(log.of("watched status"));
    assert!(
        !is_private(first) && !is_private(second),
        "the watchdog counts on"
    );
    assert_ne!(log.step("watched out").status, Some(0));
    check_client(&log, mhz, client);
    for out in [
        "minimal out",
        "enforcing out",
        "unwatched out",
        "faulting out",
        "full out",
    ] {
        assert_eq!(log.step(out).status, Some(0), "{}", log.of(out));
    }
    log.is_well();
}

/// The client's counter is its own, and comes back clean.
fn check_client(log: &Log, mhz: f64, client: Client) {
    let output = log.of("client");
    let reports: Vec<&str> = output
        .lines()
        .filter(|line| line.contains("counted"))
        .collect();
    assert_eq!(reports.len(), 2, "{output}");
    for (line, cpu) in reports.iter().zip(["CPU 0", "CPU 1"]) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words
            .iter()
            .position(|word| *word == "counted")
            .expect("the verb");
        let cycles: f64 = words[at + 1].parse().expect("a count");
        let ratio = cycles / (2000.0 * mhz);
        println!("{cpu}: {ratio:.3} of the cycles of 2 ms");
        // It waits by the TSC; an emulated processor may take longer for it.
        assert!(ratio > 0.5, "{line}");
        assert!(line.ends_with("it reads 0"), "{line}");
    }
    assert_ne!(log.step("busy").status, Some(0), "a client holds it");
    match client {
        // Linux reserves all of its counters or none.
        Client::TakesOneOfLinux => log.has("full perf", &["Device or resource busy"]),
        Client::TakesOneWithoutName => assert_eq!(log.step("full perf").status, Some(0)),
    }
    log.has(
        "client out",
        &["release with a forged cookie: error -1", "release: error 0"],
    );
}

/// The lines of an output that has `N`.
fn lines<const N: usize>(output: &str) -> [&str; N] {
    let found: Vec<&str> = output.lines().collect();
    found
        .try_into()
        .unwrap_or_else(|_| panic!("{N} lines:\n{output}"))
}

#[test]
fn amd_perfmonv2_arbiters_share_with_firmware() {
    check_arbiters(
        &["--pmu", "amd-perfmonv2"],
        &AMD,
        5,
        Client::TakesOneOfLinux,
    );
}

#[test]
fn amd_core_arbiters_share_with_firmware() {
    check_arbiters(&["--pmu", "amd-core"], &AMD, 4, Client::TakesOneWithoutName);
}

#[test]
fn intel_v2_arbiters_share_with_firmware() {
    check_arbiters(
        &["--cpu-vendor", "intel", "--pmu", "intel-v2"],
        &INTEL,
        3,
        Client::TakesOneOfLinux,
    );
}

/// A kernel's lines about its PMU, without their times.
fn without_times(log: &str) -> Vec<&str> {
    let lines = log.lines().filter(|line| !line.contains("tsc:"));
    lines
        .map(|line| line.split_once("] ").map_or(line, |(_, text)| text))
        .collect()
}

/// With nothing reserved the kernel sees the machine that it sees without reservations. (And the
/// tests in `linux.rs` run with reservations possible, as that is the default.)
#[test]
fn nothing_reserved_changes_nothing() {
    let [with, without] = ["on", "off"].map(|pcr| {
        let flags = ["--cpu-vendor", "intel", "--pmu", "intel-v2", "--pcr", pcr];
        let script = Script::default().step("log", LOG).step("perf", PERF);
        let log = script.run(Image::fetch().expect("the image"), &flags, "");
        let mhz = tsc_mhz(log.of("log"));
        check_cycles_within(log.of("perf"), &["cycles"], mhz, TOLERANCE);
        log
    });
    assert_eq!(
        without_times(with.of("log")),
        without_times(without.of("log"))
    );
}

/// CPUID does not follow, and the firmware's counter drops: the kernel uses it without knowing
/// and counts wrong. The minimal arbiter at least makes it refuse.
#[test]
fn a_kernel_that_is_not_told_counts_wrong_on_a_counter_that_drops() {
    let script = Script::default()
        .step("log", LOG)
        .step("wrong", PERF)
        .load("minimal", "pcr_minimal", "")
        .step("refused", "perf stat -x, -e cycles,task-clock true; true")
        .step("out", "rmmod pcr_minimal")
        .step("trouble", TROUBLE);
    let flags = [
        &FIRMWARE[..],
        &[
            "--pmu",
            "amd-core",
            "--cpus",
            "2",
            "--cpuid-follows-grants",
            "off",
        ],
    ]
    .concat();
    let log = script.run(image(), &flags, NO_WATCHDOG);
    log.has("log", &["... generic registers:      6"]);
    let cycles = count(log.of("wrong"), "cycles");
    let right = count(log.of("wrong"), "task-clock") * 1000.0 * tsc_mhz(log.of("log"));
    assert!(
        cycles > 2.0 * right || cycles < 0.5 * right,
        "{cycles}, {right}"
    );
    log.has(
        "minimal",
        &["PMC0 is the firmware's on CPU 0", "PMC1 locked on 2 CPUs"],
    );
    log.has("refused", &["busy"]);
    log.is_well();
}

/// CPUID does not follow, and the firmware's counter faults: the kernel's driver gives up at
/// boot, and the kernel goes on without one.
#[test]
fn a_kernel_that_is_not_told_gives_up_on_a_counter_that_faults() {
    let script = Script::default()
        .step("log", LOG)
        .step("perf", "perf stat -x, -e cycles,task-clock spin 0.1")
        .step("trouble", TROUBLE);
    let firmware = [
        "--firmware",
        "builtin",
        "--firmware-counter",
        "cycles,on=PMC0,error=fault",
    ];
    let flags = [
        &firmware[..],
        &[
            "--pmu",
            "amd-core",
            "--cpus",
            "2",
            "--cpuid-follows-grants",
            "off",
        ],
    ]
    .concat();
    let log = script.run(Image::fetch().expect("the image"), &flags, "");
    log.has(
        "log",
        &["Broken PMU hardware detected, using software events only."],
    );
    assert_eq!(field(log.of("perf"), "cycles"), "<not supported>");
    assert!(count(log.of("perf"), "task-clock") > 0.0);
    log.is_well();
}
