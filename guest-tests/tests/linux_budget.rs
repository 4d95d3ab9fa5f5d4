//! The budget of a real kernel's counters: measured in an unmodified Linux guest in L1, whose PMU
//! is Umpire's own, beside `perf` and the NMI watchdog.

use std::time::Duration;

use guest_tests::linux::exit_cost::are_dear;
use guest_tests::linux::{LinuxImage, Log, Script, UnderUmpire};

const PROGRAM: &str = "host-budget";
/// The kernel has an event for instructions only where somebody counts them.
const RATES: &str = "[event.instructions]\nrate = 1000\n";
const TWO_CPUS: [&str; 6] = ["--cpu-vendor", "intel", "--pmu", "intel-v2", "--cpus", "2"];
const WATCHDOG: &str = "/proc/sys/kernel/nmi_watchdog";
const CPU1: &str = "/sys/devices/system/cpu/cpu1/online";

/// The program, without what differs from run to run.
fn report() -> String {
    format!("{PROGRAM} 2>/dev/null")
}

/// What `program` prints while `perf stat -a` has these events open, so many per CPU.
fn beside(events: &str, program: &str) -> String {
    let descriptors = 2 * events.split(',').count();
    format!(
        "perf stat -a -o /tmp/stat -e {events} & {}; sleep 0.3; {program} 2>/dev/null; kill $!; \
         wait; true",
        until_open(descriptors)
    )
}

/// Waits until what was last started in the background has so many events open.
fn until_open(descriptors: usize) -> String {
    until(&format!(
        "[ $(ls -l /proc/$!/fd 2>/dev/null | grep -c perf_event) = {descriptors} ]"
    ))
}

/// Waits until `condition` holds, or for some ten seconds.
fn until(condition: &str) -> String {
    format!("for i in $(seq 100); do {condition} && break; sleep 0.1; done")
}

/// What anybody sees at a level of `perf_event_paranoid`.
fn as_anybody(level: &str) -> String {
    format!(
        "grep -q ^any: /etc/passwd || echo any:x:1000:1000::/:/bin/sh >>/etc/passwd; \
         echo {level} >/proc/sys/kernel/perf_event_paranoid; su any -c /usr/bin/{PROGRAM}"
    )
}

/// The line of a CPU with four programmable counters, of which `free` can be had, and those
/// fixed-function counters that are not in `held`.
fn line(cpu: u32, free: u32, held: &[&str], flexible: &str) -> String {
    let state = |fixed: &str| {
        if held.contains(&fixed) {
            "held"
        } else {
            "free"
        }
    };
    format!(
        "cpu {cpu}: programmable {free}, instructions {}, cycles {}, ref-cycles {}, slots absent, \
         flexible {flexible}, of 4 missing {}",
        state("instructions"),
        state("cycles"),
        state("ref-cycles"),
        4 - free
    )
}

/// Both CPUs have this budget, and these are the holders.
fn check(log: &Log, step: &str, free: u32, held: &[&str], flexible: &str, holders: &[&str]) {
    let mut expected = vec!["pmu cpu cpus 0-1".to_owned()];
    expected.extend([0, 1].map(|cpu| line(cpu, free, held, flexible)));
    expected.extend(holders.iter().map(|holder| format!("holder {holder}")));
    expected.push("hidden 0".to_owned());
    assert_eq!(log.of(step).lines().collect::<Vec<_>>(), expected, "{step}");
}

/// A guest with two CPUs, the program and `umpire`.
fn guest() -> UnderUmpire {
    let image = LinuxImage::fetch().expect("the guest's image");
    let image = image.with_program(PROGRAM, env!("CARGO_BIN_EXE_host-budget"));
    let image = image.with_program("umpire", guest_tests::umpire::path());
    UnderUmpire::with_rates(image, &TWO_CPUS, RATES)
}

#[test]
fn a_kernels_budget_is_what_can_be_had() {
    let guest = guest();
    let events = format!(
        "{PROGRAM} events 0 c4 c4 3c 3c 300 300; {PROGRAM} events 0 c4 c0 c4 c4 c4 c4 c4; \
         {PROGRAM} events 7 c4"
    );
    let log = Script::default()
        .step("nothing", report())
        .step("two pinned", beside("cycles:D,instructions:D", &report()))
        .step("cycles twice", beside("cycles:D,cycles:D", &report()))
        .step("three pinned", beside("r1c4:D,r1c4:D,r1c4:D", &report()))
        .step(
            "all pinned",
            beside("r1c4:D,r1c4:D,r1c4:D,r1c4:D", &report()),
        )
        .step("flexible", beside("r1c4,r1c4,r1c4,r1c4,r1c4", &report()))
        .step("events", events)
        .step(
            "events beside",
            beside(
                "cycles:D,cycles:D",
                &format!("{PROGRAM} events 0 3c c4 c4 c4"),
            ),
        )
        .step("offline", format!("echo 0 >{CPU1}; {}", report()))
        .step("online", format!("echo 1 >{CPU1}; {}", report()))
        .step("watchdog", format!("echo 1 >{WATCHDOG}; {}", report()))
        .step(
            "given back",
            format!("mkdir /tmp/kept; {PROGRAM} give-back /tmp/kept; cat {WATCHDOG}"),
        )
        .step("without", report())
        .step(
            "restored",
            format!("{PROGRAM} restore /tmp/kept; cat {WATCHDOG}; ls /tmp/kept"),
        )
        .step("with", report())
        .step("anybody", as_anybody("2"))
        .step("nobody", as_anybody("3"))
        .run_on(&guest);

    check(&log, "nothing", 4, &[], "runs", &[]);
    let perf = |events: u32| format!("perf uid 0 events {events} msr none");
    let both = ["cycles", "instructions"];
    // An event and a descriptor of it for each CPU.
    check(&log, "two pinned", 4, &both, "runs", &[&perf(4)]);
    check(&log, "cycles twice", 3, &["cycles"], "runs", &[&perf(4)]);
    check(&log, "three pinned", 1, &[], "runs", &[&perf(6)]);
    check(&log, "all pinned", 0, &[], "waits", &[&perf(8)]);
    check(&log, "flexible", 4, &[], "waits", &[&perf(10)]);
    let events: Vec<&str> = log.of("events").lines().collect();
    assert_eq!(events[..2], ["5 of 6", "5 of 7"]);
    assert!(events[2].starts_with("CPU 7 is offline"), "{events:?}");
    assert_eq!(log.of("events beside"), "3 of 4");

    let offline = log.of("offline");
    let alone = ["pmu cpu cpus 0", &line(0, 4, &[], "runs"), "hidden 0"];
    assert_eq!(offline.lines().collect::<Vec<_>>(), alone);
    check(&log, "online", 4, &[], "runs", &[]);

    let watchdog = "nmi-watchdog cpus 0-1";
    check(&log, "watchdog", 4, &["cycles"], "runs", &[watchdog]);
    assert_eq!(log.of("given back"), "Freed\n0");
    check(&log, "without", 4, &[], "runs", &[]);
    assert_eq!(log.of("restored"), "Done\n1");
    check(&log, "with", 4, &["cycles"], "runs", &[watchdog]);

    // Debian's kernels know a level 3, at which nobody may open an event.
    log.has("anybody", &[&line(1, 4, &["cycles"], "runs")]);
    log.has(
        "nobody",
        &["cpu 1: not allowed (Permission denied", "CAP_PERFMON"],
    );
}

/// Starts the arbiter, and waits until it has measured.
fn arbiter() -> String {
    let measured =
        until("umpire who 2>/dev/null | grep -q '^CPU 1, cpu: 4 programmable, 3 fixed$'");
    format!(
        "export UMPIRE_ARBITER=/tmp/arbiter; umpire arbiterd -v >/tmp/log 2>&1 & {measured}; \
         umpire who"
    )
}

/// Prints after how many tenths of a second `umpire who` shows so many counters in use outside
/// of leases on each CPU.
fn outside(count: u32) -> String {
    format!(
        "for i in $(seq 100); do [ $(umpire who -j --arbiter /tmp/arbiter | \
         grep -o '\"outside\":{count}[,}}]' | wc -l) = 2 ] && break; sleep 0.1; done; \
         echo after $i tenths"
    )
}

/// What the holder of a lease does: it has it, it is told to begin, it counts, it is told to end.
fn holder() -> String {
    let until_end = "until [ -e /tmp/end ]; do sleep 0.1; done";
    format!(
        "touch /tmp/held; {}; perf stat -a -o /tmp/own -e r1c4:D,r1c4:D,r1c4:D \
         sh -c \"touch /tmp/counts; {until_end}\"",
        until("[ -e /tmp/go ]")
    )
}

#[test]
fn leases_on_a_kernels_counters() {
    if are_dear("linux_budget::leases_on_a_kernels_counters") {
        return;
    }
    // On a busy machine, where each program takes a second to start.
    let guest = guest().with_timeout(Duration::from_secs(300));
    let pinned = "perf stat -a -o /tmp/stat -e r1c4:D,r1c4:D & echo $! >/tmp/pid";
    let hog = "umpire hog 3 --no-lease & echo $! >/tmp/pid";
    let umpire = "UMPIRE_ARBITER=/tmp/arbiter umpire";
    let whole = "perf stat -a -x, -e r1c4:D,r1c4:D,instructions:D sleep 3";
    let log = Script::default()
        .step("start", arbiter())
        .step("outsiders", format!("{pinned}; {}", outside(2)))
        .step("who", format!("{umpire} who"))
        .step(
            "refused",
            format!("{umpire} lease --counters 3 -- true 2>&1"),
        )
        .step("no room", "umpire hog 3 --no-lease 2>&1")
        .step(
            "gone",
            format!("kill $(cat /tmp/pid); wait; {}", outside(0)),
        )
        .step("hog", format!("{hog}; {}; {umpire} who", outside(3)))
        .step(
            "hog gone",
            format!("kill $(cat /tmp/pid); wait; {}", outside(0)),
        )
        .step(
            "whole",
            format!(
                // Counts for as long as the lease is there, however long it takes to get it.
                "perf stat -a -x, -o /tmp/plain -e r1c4,r1c4,r1c4,r1c4 & {}; \
                 {umpire} lease --counters 2 --fixed 1 -- {whole} 2>&1; kill -INT $!; wait; \
                 grep r1c4 /tmp/plain",
                until_open(8)
            ),
        )
        .step(
            "broken",
            format!(
                "{umpire} lease --counters 3 -- sh -c '{}' 2>&1 & {}; {pinned}; {}; touch /tmp/go; \
                 {}; sleep 2; {umpire} leases; {umpire} who 0; touch /tmp/end; \
                 kill $(cat /tmp/pid); wait; grep -c 'not counted' /tmp/own",
                holder(),
                until("[ -e /tmp/held ]"),
                until(&format!("{umpire} leases | grep -q outsider")),
                until("[ -e /tmp/counts ]"),
            ),
        )
        .step("log", "cat /tmp/log")
        .run_on(&guest);

    for cpu in [0, 1] {
        let free = format!("CPU {cpu}, cpu: 4 programmable, 3 fixed\n");
        assert!(log.of("start").contains(&free), "{}", log.of("start"));
        let used =
            format!("CPU {cpu}, cpu: 4 programmable, 3 fixed; 2 used by somebody who has no lease");
        assert!(log.of("who").contains(&used), "{}", log.of("who"));
    }
    log.has("who", &["perf (process ", "4 perf events open"]);
    assert_eq!(log.step("refused").status, Some(2));
    log.has(
        "refused",
        &["2 counters of CPU 0 are used by somebody who has no lease"],
    );

    log.has(
        "no room",
        &["CPU 0 has 2 free counters, and 3 were asked for"],
    );
    log.has(
        "hog",
        &["3 used by somebody who has no lease", "6 perf events open"],
    );

    // Whole counts with the lease, and a part of the time without.
    let shares: Vec<(&str, f64)> = log
        .of("whole")
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split(',').collect();
            Some((*fields.get(2)?, fields.get(4)?.parse().ok()?))
        })
        .collect();
    let (pinned, plain): (Vec<_>, Vec<_>) =
        shares.iter().partition(|(event, _)| event.ends_with(":D"));
    assert_eq!((pinned.len(), plain.len()), (3, 4), "{shares:?}");
    assert!(
        pinned.iter().all(|(_, share)| *share == 100.0),
        "{shares:?}"
    );
    assert!(plain.iter().all(|(_, share)| *share < 90.0), "{shares:?}");

    // Somebody outside breaks a guarantee: before the holder counts it is told, and it
    // stays so while the holder counts less than it holds.
    log.has("broken", &["is broken: somebody who has no lease"]);
    log.has("broken", &["an outsider has its counters since"]);
    assert_eq!(
        log.of("broken").lines().last(),
        Some("1"),
        "one event of the holder"
    );
}
