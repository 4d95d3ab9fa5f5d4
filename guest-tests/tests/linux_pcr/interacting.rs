//! Counters that come and go under a kernel that counts: the arbiter that answers, leases,
//! processors that go down and come up. On both of Debian's kernels.

use std::fs;
use std::path::Path;

use arbiter::abi::{MSR_BASE, MSR_STATUS};
use guest_tests::linux::perf::{LOG, check_cycles_within, count, near, tsc_mhz};
use guest_tests::linux::{Log, Script, UnderUmpire, lines};

use super::{EVENTS, NO_WATCHDOG, image, is_private, newer_image};

/// How far cycles may be from run time times TSC frequency. What goes wrong here does so by
/// orders of magnitude, or with one event and not with the other, which no noise does.
const TOLERANCE: f64 = 0.6;
/// Two events that start and stop one after the other, in two counters.
const ALIKE: f64 = 0.05;
/// A lease that a busy machine leaves time to renew, three times.
const LEASES: [&str; 2] = ["--policy", "kernel:lease=1500"];
/// Longer than a lease.
const LONG: &str = "taskset 1 spin 1.8 >/dev/null";
const OFFLINE: &str = "echo 0 >/sys/devices/system/cpu/cpu1/online";
const ONLINE: &str = "echo 1 >/sys/devices/system/cpu/cpu1/online";
/// The modules' messages since the last look.
const MESSAGES: &str = "dmesg -c | tee -a /tmp/log | grep pcr_";

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
    let commands = format!("echo host: pcr revoke {counter} --grace 1000; {LONG}");
    counted(&commands).replace("perf stat", "perf stat -C 0")
}

/// Runs the script; its log, and the lines of the audit.
fn run(script: Script, guest: UnderUmpire, out: &Path) -> (Log, Vec<String>) {
    let guest = guest.with_kernel_options(NO_WATCHDOG).with_host(out);
    let log = script.run_on(&guest);
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
    let script = Script::default()
        .step("log", LOG)
        .step("msr", "insmod /lib/modules/msr.ko")
        .load("interacting", "pcr_interacting", "")
        .step("revoked", counted_under_revocation("PMC0"))
        .step("offline", format!("{OFFLINE}; sleep 1.8"))
        .step("online", format!("{ONLINE}; {MESSAGES}"))
        .step("second", counted("taskset 2 spin 0.4 >/dev/null"))
        .step("interacting out", "rmmod pcr_interacting")
        .load("unrenewed", "pcr_minimal", "renew=0")
        .step("expired", counted(&format!("{LONG}; pmu-accounting")))
        .step("unrenewed out", "rmmod pcr_minimal")
        .load("enforcing", "pcr_enforcing", "")
        .step("renewed", counted(LONG))
        .step("enforcing out", "rmmod pcr_enforcing");
    let flags = ["--pmu", "amd-perfmonv2", "--cpus", "2"];
    let flags = [&flags[..], &["--scheme", "interacting"], &LEASES].concat();
    let out = tempfile::tempdir().expect("a folder");
    let (log, audit) = run(script, UnderUmpire::new(image(), &flags), out.path());

    for report in ["revoked", "second", "renewed"] {
        check(&log, report);
    }
    let told = ["PMC0 given back on CPU 0", "PMC0 is ours again on CPU 0"];
    log.has("revoked", &told);
    assert_eq!(decisions(&audit, "revoking", "administrator").len(), 2);
    assert!(decisions(&audit, "revoked", "administrator").is_empty());
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
    for out in ["interacting out", "unrenewed out", "enforcing out"] {
        assert!(log.succeeded(out), "{}", log.of(out));
    }
}

/// Debian's newer kernel, with fixed-function counters, and without an interrupt for notices.
#[test]
fn linux_6_12_never_counts_wrong_either() {
    let status = |cpu: u32| format!("msr {cpu} {:#x}", MSR_BASE + MSR_STATUS);
    let statuses = format!("{}; {}", status(0), status(1));
    let script = Script::default()
        .step("log", LOG)
        .step("msr", "insmod /lib/modules/msr.ko")
        .load("interacting", "pcr_interacting", "poll=20")
        .step("revoked", counted_under_revocation("FIXED1"))
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
        .step("renewed", counted(LONG))
        .step("enforcing out", "rmmod pcr_enforcing")
        .load("full", "pcr_full", "")
        .load("client", "pcr_client", "")
        .step("client out", "rmmod pcr_client; dmesg | grep release")
        .step("full out", "rmmod pcr_full");
    let flags = ["--cpu-vendor", "intel", "--pmu", "intel-v2", "--cpus", "2"];
    let flags = [&flags[..], &["--scheme", "interacting"], &LEASES].concat();
    let out = tempfile::tempdir().expect("a folder");
    let (log, audit) = run(script, UnderUmpire::new(newer_image(), &flags), out.path());

    for report in ["revoked", "renewed"] {
        check(&log, report);
    }
    // Its source counts no instructions, so the first of them cannot be reserved.
    let fixed = ["PMC32 is not to be had", "PMC33 locked on 2 CPUs"];
    log.has("interacting", &fixed);
    log.has("revoked", &["PMC33 given back on CPU 0"]);
    assert!(decisions(&audit, "revoked", "administrator").is_empty());
    assert!(decisions(&audit, "revoked", "expired").is_empty());
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
