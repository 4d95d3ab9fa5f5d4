//! `umpire arbiterd` on a real kernel: in an unmodified Linux guest in L1, whose PMU is Umpire's
//! own, with the kernel's NMI watchdog, CPUs that go offline, a user without any right, and events
//! of control groups beside a hog that has no lease.

use guest_tests::linux::{LinuxImage, Script, UnderUmpire};

/// The kernel has an event for instructions only where somebody counts them.
const RATES: &str = "[event.instructions]\nrate = 1000\n";
const TWO_CPUS: [&str; 6] = ["--cpu-vendor", "intel", "--pmu", "intel-v2", "--cpus", "2"];
const WATCHDOG: &str = "/proc/sys/kernel/nmi_watchdog";
const CPU1: &str = "/sys/devices/system/cpu/cpu1/online";
/// What each step begins with.
const ENV: &str = "export UMPIRE_ARBITER=/tmp/arbiter";
/// Shell: starts the arbiter, and waits until it listens.
const START: &str = "rm -f /tmp/arbiter; \
     umpire arbiterd -v --config /tmp/arbiter.toml --state /tmp/state >>/tmp/arbiter.log 2>&1 & \
     echo $! >/tmp/pid; for i in $(seq 300); do [ -S /tmp/arbiter ] && break; sleep 0.1; done; \
     [ -S /tmp/arbiter ] || cat /tmp/arbiter.log";
/// Shell: the number of the caller's only lease.
const OWN: &str = "umpire leases -j | tr ',{' '\\n\\n' | grep '\"id\":' | head -n 1 | tr -dc 0-9";

/// Events that do not all find a counter.
const HOG: &str = "r1c0,r1c0:u,r1c0:k,r1c0,r1c0:u,r1c0:k";
/// Shell: the number of a lease that was just granted, as `n`.
const NUMBER: &str = "n=$(sed -n 's/^lease \\([0-9]*\\):.*/\\1/p' /tmp/lease)";

/// Waits until the watchdog is so.
fn soon(value: u32) -> String {
    format!(
        "for i in $(seq 300); do [ $(cat {WATCHDOG}) = {value} ] && break; sleep 0.1; done; \
         cat {WATCHDOG}"
    )
}

#[test]
fn an_arbiter_on_a_real_kernel() {
    let image = LinuxImage::fetch().expect("the guest's image");
    let image = image.with_program("umpire", guest_tests::umpire::path());
    let guest = UnderUmpire::with_rates(image, &TWO_CPUS, RATES);
    let config = "grace-ms = 10\\nclaim-window-ms = 20000\\n[watchdog]\\nkeep = false\\n\
         [[tenant]]\\nname = \"root\"\\nusers = [0]\\noperator = true\\nopens-events = true\\n\
         for-others = true\\n\
         [[tenant]]\\nname = \"any\"\\nusers = [1000]\\nwhole-cpus = true\\nopens-events = true\\n";
    let all = "umpire lease --fixed 3 --wait --";
    let steps = [
        (
            "start",
            format!(
                "mkdir -p /tmp/state; chmod 777 /tmp; printf '{config}' >/tmp/arbiter.toml; \
                 echo any:x:1000:1000::/:/bin/sh >>/etc/passwd; echo 1 >{WATCHDOG}; {START}"
            ),
        ),
        ("leases", "umpire leases".to_owned()),
        ("needed", format!("{all} cat {WATCHDOG}")),
        ("needless", soon(1)),
        (
            "killed",
            format!(
                "{all} sleep 600 >/dev/null 2>&1 & echo $! >/tmp/lease; {}; \
                 kill -9 $(cat /tmp/pid); sleep 1; cat {WATCHDOG}",
                soon(0)
            ),
        ),
        ("again", format!("{START}; sleep 3; cat {WATCHDOG}")),
        (
            "released",
            format!(
                "kill $(cat /tmp/lease); {}; sleep 1; ls /tmp/state",
                soon(1)
            ),
        ),
        (
            "offline",
            format!(
                "umpire lease --counters 2 -- sleep 600 >/tmp/told 2>&1 & echo $! >/tmp/lease; \
                 for i in $(seq 100); do umpire leases | grep -q sleep && break; sleep 0.1; done; \
                 echo 0 >{CPU1}; sleep 2; umpire lease --counters 1 --cpus 1 -- true; \
                 echo 1 >{CPU1}; sleep 2; umpire lease --counters 1 --cpus 1 -- echo back; \
                 kill $(cat /tmp/lease); grep -o 'CPUs 1 [a-z ]*' /tmp/arbiter.log"
            ),
        ),
        (
            "any",
            format!(
                "echo 3 >/proc/sys/kernel/perf_event_paranoid; \
                 echo \"event-holder /tmp/arbiter \\$({}) 192\" >/tmp/any; \
                 su any -c 'perf stat -e r1c0:u true' 2>&1 | grep -c -i 'permission\\|access'; \
                 su any -c 'UMPIRE_ARBITER=/tmp/arbiter umpire lease --counters 1 -- sh /tmp/any'",
                OWN.replace('"', "\\\"")
            ),
        ),
        (
            "group",
            // What runs in the group shares two CPUs with as much outside, where somebody counts
            // more events than there are counters.
            format!(
                "mkdir -p /tmp/groups; mount -t cgroup2 none /tmp/groups; \
                 mkdir /tmp/groups/job; for i in 1 2; do \
                 sh -c 'echo $$ >/tmp/groups/job/cgroup.procs; while :; do :; done' & \
                 sh -c 'while :; do :; done' & done; \
                 perf stat -C 1 -e {HOG} sleep 8 >/tmp/hog 2>&1 & echo $! >/tmp/hogs; \
                 umpire lease --cgroup /job --counters 1 >/tmp/lease; {NUMBER}; \
                 event-holder /tmp/arbiter $n 192 1; wait $(cat /tmp/hogs); \
                 grep -c '%)' /tmp/hog; echo 1 >/tmp/groups/job/cgroup.kill"
            ),
        ),
        (
            "job",
            // The prolog asks for the job's user, whose process has an event of its own then.
            format!(
                "mkdir /tmp/groups/own; umpire lease --cgroup /own --for-user 1000 \
                 --for-group 1000 --counters 1 >/tmp/lease; {NUMBER}; \
                 sh -c 'echo $$ >/tmp/groups/own/cgroup.procs; \
                 exec su any -c \"event-holder /tmp/arbiter '$n' 192 child; \
                 event-holder /tmp/arbiter '$n' 192 1\"'"
            ),
        ),
        (
            "end",
            "kill $(cat /tmp/pid); sleep 2; cat /tmp/arbiter.log".to_owned(),
        ),
    ];
    let script = steps
        .into_iter()
        .fold(Script::default(), |script, (name, line)| {
            script.step(name, format!("{ENV}; {line}"))
        });
    let log = script.run_on(&guest);

    assert!(
        log.of("leases").contains("nmi-watchdog"),
        "{}",
        log.of("leases")
    );
    assert_eq!(log.of("needed").lines().last(), Some("0"));
    assert_eq!(log.of("needless"), "1");
    // The arbiter is killed, and its lease goes on: so does what it needs.
    assert_eq!(log.of("killed"), "0\n0");
    assert_eq!(log.of("again"), "0");
    let (watchdog, kept) = log.of("released").split_once('\n').expect("two lines");
    assert_eq!(watchdog, "1");
    assert!(!kept.contains("nmi-watchdog"), "{kept}");
    log.has(
        "offline",
        &[
            "CPU 1 does not exist or is offline",
            "back",
            "CPUs 1 went offline",
            "CPUs 1 are online again",
        ],
    );
    // Nobody but the arbiter may open an event, and this one counts all the time.
    let any = log.of("any");
    assert!(any.contains("counted ") && any.contains(", whole"), "{any}");
    // The hog's events have taken turns; the lease's was on its counter all the time.
    let group = log.of("group");
    let (counted, hog) = group.split_once('\n').expect("two lines");
    assert!(
        counted.contains("counted ") && counted.contains(", whole"),
        "{group}"
    );
    assert!(!counted.contains("counted 0,"), "{group}");
    assert!(
        hog.trim().parse().is_ok_and(|turns: u32| turns > 0),
        "{group}"
    );
    // What it starts counts along; all that runs in the group is not for the job.
    let (counted, refused) = log.of("job").split_once('\n').expect("two lines");
    assert!(
        counted.contains("counted ") && counted.contains(", whole"),
        "{counted}"
    );
    assert!(!counted.contains("counted 0,"), "{counted}");
    assert!(refused.contains("for operators"), "{refused}");
}
