//! Counters that come and go under a kernel that counts: the arbiter that answers, leases,
//! processors that go down and come up. On both of Debian's kernels.

use std::fs;

use arbiter::abi::{MSR_BASE, MSR_STATUS};
use guest_tests::linux::perf::{LOG, check_cycles_within, count, near, tsc_mhz};
use guest_tests::linux::{LinuxImage, Log, Script, lines};
use vmm::config::Engine;

use super::{EVENTS, guest, image, is_private, newer_image};

/// How far cycles may be from run time times TSC frequency. What goes wrong here does so by
/// orders of magnitude, or with one event and not with the other, which no noise does.
const TOLERANCE: f64 = 0.6;
/// Two events that start and stop one after the other, in two counters.
const ALIKE: f64 = 0.05;
/// The same of events that take turns.
const MOSTLY: f64 = 0.8;
/// How far such events may be from each other.
const TURNS: f64 = 0.2;
/// As many physical counters as the kernel can reserve, so that a tool of the host has none. As many
/// cycles in a microsecond as the TSC has, about.
const RATES: &str = "counters = COUNT\n[event.cycles]\nrate = MHZ\n";
/// A lease in ms that a busy machine leaves time to renew, three times, and in which `perf` has
/// started; and one of virtual time, which no neighbour takes.
const LEASES: [&str; 2] = ["kernel:lease=3600", "kernel:lease=1200"];
const FLAGS: [&str; 6] = [
    "--scheme",
    "interacting",
    "--host-policy",
    "host-first",
    "--grace",
    "1000",
];
/// Longer than such a lease.
const LONG: [&str; 2] = [
    "taskset 1 spin 4.5 >/dev/null",
    "taskset 1 spin 1.5 >/dev/null",
];
/// Some turns of events that have too few counters.
const TURNS_OF_EVENTS: &str = "taskset 1 spin 1.5 >/dev/null";
/// Longer than a module waits before it takes a counter back, on a busy machine too.
const LONGER: &str = "taskset 1 spin 3 >/dev/null";
const OFFLINE: &str = "echo 0 >/sys/devices/system/cpu/cpu1/online";
const ONLINE: &str = "echo 1 >/sys/devices/system/cpu/cpu1/online";
/// The modules' messages since the last look.
const MESSAGES: &str = "dmesg -c | tee -a /tmp/log | grep pcr_";

/// The one of KVM, or of the processor in software.
fn of<T>(engine: Engine, [kvm, emu]: [T; 2]) -> T {
    match engine {
        Engine::Kvm => kvm,
        Engine::Emu => emu,
    }
}

/// Waits until a counter that was given away is the module's again on both processors: with it
/// away the module cannot go, and its lease is not one that ends.
fn until_back(counter: &str) -> String {
    format!(
        "for try in $(seq 100); do \
         cat /tmp/log >/tmp/all; dmesg >>/tmp/all; \
         [ $(grep -c \"{counter} is ours again\" /tmp/all) -ge 2 ] && break; sleep 0.1; done"
    )
}

/// A report of `perf` about commands.
fn counted(commands: &str) -> String {
    format!(
        "rm -f /tmp/s; perf stat -x, -o /tmp/s -e cycles,cpu-cycles,task-clock \
         sh -c '{commands}'; cat /tmp/s; {MESSAGES}"
    )
}

/// A report about all that a processor does, while the host revokes a counter, which its owner
/// hears of in time. Events of a task would leave the counter for as long as the module works.
fn counted_under_revocation(counter: &str) -> String {
    let commands = format!("echo host: pcr revoke {counter} --grace 1000; {LONGER}");
    counted(&commands).replace("perf stat", "perf stat -C 0")
}

/// A report about as many events as there are counters, while a tool of the host needs one: the
/// hypervisor asks for it. So the events have to take turns.
fn counted_while_asked(events: &str) -> String {
    let commands = format!("echo host: stat -j -e cycles --for 500ms; {TURNS_OF_EVENTS}");
    let report = counted(&commands).replace("perf stat", "perf stat -C 0");
    report.replace("-e cycles,cpu-cycles", &format!("-e {events}"))
}

/// Every event of that report is right, and one at least says that it had turns; the tool counted.
fn check_asked(log: &Log, audit: &[String], counter: &str) {
    let right = count(log.of("asked"), "task-clock") * 1000.0 * tsc_mhz(log.of("log"));
    let rows: Vec<Vec<&str>> = log
        .of("asked")
        .lines()
        .map(|line| line.split(',').collect())
        .filter(|row: &Vec<&str>| row.len() > 4 && row[2] != "task-clock")
        .collect();
    let counts = rows.iter().map(|row| row[0].parse().expect("a count"));
    let counts: Vec<f64> = counts.collect();
    // To write all counters at each turn takes much of the time here, and is not counted.
    near("the first", counts[0], right, MOSTLY);
    for one in &counts {
        near("another", *one, counts[0], TURNS);
    }
    let turns = rows.iter().filter(|row| row[4] != "100.00");
    assert!(turns.count() > 0, "{}", log.of("asked"));
    let yielded = format!("{counter} yielded on CPU 0");
    log.has("asked", &[&yielded]);
    let told = log.errors();
    let counted = |line: &str| line.contains("counter-value") && !line.contains("<not counted>");
    assert!(told.lines().any(counted), "{told}");
    let answers = ["\"asked\"", "\"yielded\""];
    for line in audit
        .iter()
        .filter(|line| answers.iter().any(|word| line.contains(word)))
    {
        println!("{line}");
    }
    let yields = audit
        .iter()
        .filter(|line| line.contains("\"event\":\"yielded\""));
    assert_eq!(yields.count(), 2, "on each processor");
}

/// Runs the script; its log, and the lines of the audit.
fn run(
    engine: Engine,
    script: Script,
    (image, counters): (LinuxImage, u32),
    flags: &[&str],
) -> (Log, Vec<String>) {
    let folder = tempfile::tempdir().expect("a folder");
    let rates = folder.path().join("rates.toml");
    let [mhz, lease] = of(engine, [["2500", LEASES[0]], ["1000", LEASES[1]]]);
    let text = RATES.replace("COUNT", &counters.to_string());
    let text = text.replace("MHZ", mhz);
    fs::write(&rates, text).expect("a file");
    let (rates, out) = (
        format!("sim={}", rates.display()),
        folder.path().join("out"),
    );
    let flags = [flags, &FLAGS, &["--counters", &rates, "--policy", lease]].concat();
    let log = script.run_on(&guest(engine, image, &flags).with_host(&out));
    let audit = fs::read_to_string(out.join("audit.json")).expect("the audit");
    (log, audit.lines().map(str::to_owned).collect())
}

/// Both events of a report are right, whichever counter they were in.
fn check(log: &Log, report: &str) {
    let mhz = tsc_mhz(log.of("log"));
    check_cycles_within(log.of(report), &EVENTS, mhz, TOLERANCE);
    let [one, other] = EVENTS.map(|event| count(log.of(report), event));
    near(report, one, other, ALIKE);
}

fn decisions<'a>(audit: &'a [String], event: &str, reason: &str) -> Vec<&'a String> {
    let event = format!("\"event\":\"{event}\",\"reason\":\"{reason}\"");
    audit.iter().filter(|line| line.contains(&event)).collect()
}

#[test]
fn linux_6_1_never_counts_wrong_where_a_module_looks_after_its_counters() {
    linux_6_1(Engine::Kvm);
}

pub(super) fn linux_6_1(engine: Engine) {
    let long = of(engine, LONG);
    let script = Script::default()
        .step("log", LOG)
        .step("msr", "insmod /lib/modules/msr.ko")
        .load("interacting", "pcr_interacting", "")
        .step("revoked", counted_under_revocation("PMC0"))
        .step(
            "asked",
            counted_while_asked("cycles,cpu-cycles,r76,r76,r76,r76"),
        )
        .step("back", until_back("PMC5"))
        .step("offline", format!("{OFFLINE}; sleep 4.5"))
        .step("online", format!("{ONLINE}; {MESSAGES}"))
        .step("second", counted("taskset 2 spin 0.4 >/dev/null"))
        .step("interacting out", "rmmod pcr_interacting")
        .load("keeping", "pcr_interacting", "keep=6")
        .step("kept", counted_while_asked("cycles,cpu-cycles"))
        .step("keeping out", "rmmod pcr_interacting")
        .load("unrenewed", "pcr_minimal", "renew=0")
        .step("expired", counted(&format!("{long}; pmu-accounting")))
        .step("unrenewed out", "rmmod pcr_minimal")
        .load("enforcing", "pcr_enforcing", "")
        .step("renewed", counted(long))
        .step("enforcing out", "rmmod pcr_enforcing");
    let flags = ["--pmu", "amd-perfmonv2"];
    let (log, audit) = run(engine, script, (image(), 6), &flags);

    for report in ["revoked", "second", "kept", "renewed"] {
        check(&log, report);
    }
    let told = ["PMC0 given back on CPU 0", "PMC0 is ours again on CPU 0"];
    log.has("revoked", &told);
    assert_eq!(decisions(&audit, "revoking", "administrator").len(), 2);
    assert!(decisions(&audit, "revoked", "administrator").is_empty());
    check_asked(&log, &audit, "PMC5");
    // It keeps all of them: the tool is told who does, and `perf` loses no time.
    let told = log.errors();
    assert!(told.contains("the guest kernel holds"), "{told}");
    let whole = log.of("kept").matches(",100.00,").count();
    assert!(whole >= 2, "{}", log.of("kept"));
    let declined = audit.iter().filter(|line| line.contains("\"declined\""));
    assert!(declined.count() > 0);
    // A processor that is down renews nothing.
    let taken: Vec<String> = (0..6)
        .map(|n| format!("PMC{n} taken anew on CPU 1"))
        .collect();
    for line in &taken {
        log.has("online", &[line]);
    }
    assert!(!log.of("renewed").contains("taken anew"));
    // The lease ends under `perf`, which takes a difference from a counter that was cleared.
    for event in EVENTS {
        let counted = count(log.of("expired"), event);
        let right = count(log.of("expired"), "task-clock") * 1000.0 * tsc_mhz(log.of("log"));
        assert!(counted > 1000.0 * right, "{event}: {counted}, {right}");
    }
    log.has("expired", &["its reservation ended while it counted"]);
    // Six of the processor that was down, and twice six of the module that did not renew.
    assert_eq!(decisions(&audit, "revoked", "expired").len(), 18);
    for out in [
        "interacting out",
        "keeping out",
        "unrenewed out",
        "enforcing out",
    ] {
        assert!(log.succeeded(out), "{}", log.of(out));
    }
}

#[test]
fn linux_6_12_never_counts_wrong_either() {
    linux_6_12(Engine::Kvm);
}

/// Debian's newer kernel, with fixed-function counters, and without an interrupt for notices.
pub(super) fn linux_6_12(engine: Engine) {
    let status = |cpu: u32| format!("msr {cpu} {:#x}", MSR_BASE + MSR_STATUS);
    let statuses = format!("{}; {}", status(0), status(1));
    let script = Script::default()
        .step("log", LOG)
        .step("msr", "insmod /lib/modules/msr.ko")
        .load("interacting", "pcr_interacting", "poll=20")
        .step("revoked", counted_under_revocation("FIXED1"))
        .step("asked", counted_while_asked("cycles,r3c,r3c,r3c,r3c"))
        .step("back", until_back("PMC3"))
        .step("interacting out", "rmmod pcr_interacting")
        .load("enforcing", "pcr_enforcing", "")
        .step("locked", statuses.as_str())
        .step("offline", OFFLINE)
        // What is in force changes while the processor is down.
        .step(
            "opened",
            format!("perf stat -o /tmp/s -e cycles sh -c '{ONLINE}; {statuses}'"),
        )
        .step("closed", statuses.as_str())
        .step("enforcing out", "rmmod pcr_enforcing")
        .load("full", "pcr_full", "")
        .load("client", "pcr_client", "")
        .step("client out", "rmmod pcr_client; dmesg | grep release")
        .step("full out", "rmmod pcr_full");
    let flags = ["--cpu-vendor", "intel", "--pmu", "intel-v2"];
    let (log, audit) = run(engine, script, (newer_image(), 5), &flags);

    check(&log, "revoked");
    check_asked(&log, &audit, "PMC3");
    // On either engine its source is RATES, which counts cycles only: the other two fixed-function
    // counters cannot be reserved.
    let fixed = ["PMC32 is not to be had", "PMC33 locked on 2 CPUs"];
    log.has("interacting", &fixed);
    log.has("revoked", &["PMC33 given back on CPU 0"]);
    assert!(decisions(&audit, "revoked", "administrator").is_empty());
    // Leases are renewed, but not on a processor that is down.
    let mut expired = decisions(&audit, "revoked", "expired").into_iter();
    assert!(expired.all(|line| line.contains("\"vcpu\":1,")));
    let is_private = |step| lines::<2>(log.of(step)).map(is_private);
    assert_eq!(is_private("locked"), [true, true]);
    assert_eq!(is_private("opened"), [false, false]);
    assert_eq!(is_private("closed"), [true, true]);
    log.has("client", &["with the default cookie it reads 0"]);
    log.has("client out", &["release: error 0"]);
    for out in ["interacting out", "enforcing out", "full out"] {
        assert!(log.succeeded(out), "{}", log.of(out));
    }
}
