//! `umpire arbiterd` on a real kernel: in an unmodified Linux guest in L1, whose PMU is Umpire's
//! own, with the kernel's NMI watchdog, CPUs that go offline, and a user without any right. And in
//! L1 itself, of which the control groups are of version 2 alone.

use std::path::Path;
use std::time::Duration;

use guest_tests::l1::{Machine, Run};
use guest_tests::linux::{LinuxImage, Script, UnderUmpire};

/// The kernel has an event for instructions only where somebody counts them.
const RATES: &str = "[event.instructions]\nrate = 1000\n";
const TWO_CPUS: [&str; 6] = ["--cpu-vendor", "intel", "--pmu", "intel-v2", "--cpus", "2"];
const WATCHDOG: &str = "/proc/sys/kernel/nmi_watchdog";
const CPU1: &str = "/sys/devices/system/cpu/cpu1/online";
/// In L1, all tests of groups; a third of it is enough on a quiet machine.
const MOST_SECONDS: u64 = 300;
/// What each step begins with.
const ENV: &str = "export UMPIRE_ARBITER=/tmp/arbiter";
/// Shell: starts the arbiter, and waits until it listens.
const START: &str = "rm -f /tmp/arbiter; \
     umpire arbiterd -v --config /tmp/arbiter.toml --state /tmp/state >>/tmp/arbiter.log 2>&1 & \
     echo $! >/tmp/pid; for i in $(seq 300); do [ -S /tmp/arbiter ] && break; sleep 0.1; done; \
     [ -S /tmp/arbiter ] || cat /tmp/arbiter.log";
/// Shell: the number of the caller's only lease.
const OWN: &str = "umpire leases -j | tr ',{' '\\n\\n' | grep '\"id\":' | head -n 1 | tr -dc 0-9";

/// Shell: how far an event of all that runs in a control group is counted, while others run on its
/// CPU and take all of its counters in turns. The group is of version 2, which has events from its
/// first controller on. A job in the background is not interrupted by SIGINT, so what counts beside
/// ends with a program of its own.
const GROUP: &str = "mkdir -p /tmp/groups; mount -t cgroup2 none /tmp/groups; \
     echo +cpu >/tmp/groups/cgroup.subtree_control; mkdir /tmp/groups/job; rm -f /tmp/over; \
     sh -c 'echo $$ >/tmp/groups/job/cgroup.procs; exec taskset 2 spin 1000000' >/dev/null & \
     job=$!; taskset 2 spin 1000000 >/dev/null & hog=$!; \
     perf stat -a -C 1 -x, -o /tmp/hog -e r0c0,r0c0:u,r0c0:k,r0c0,r0c0:u,r0c0:k \
         -- sh -c 'until [ -e /tmp/over ]; do sleep 0.1; done' & perf=$!; \
     until grep -q job /proc/$job/cgroup; do sleep 0.1; done; \
     told=$(umpire lease --counters 1 --cgroup /job 2>&1); echo \"$told\"; \
     id=${told#*lease }; id=${id%%:*}; \
     event-holder /tmp/arbiter $id 192 1; touch /tmp/over; wait $perf; \
     kill $job $hog; wait $job $hog; cat /tmp/hog; \
     for i in $(seq 100); do umpire leases | grep -q /job || break; sleep 0.1; done; \
     umpire leases; rmdir /tmp/groups/job";

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
         [[tenant]]\\nname = \"root\"\\nusers = [0]\\noperator = true\\n\
         opens-events = true\\n\
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
        ("group", GROUP.to_owned()),
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
    let group = log.of("group");
    let counted = group.lines().find_map(|line| {
        let count = line.strip_prefix("counted ")?.strip_suffix(", whole")?;
        count.parse::<u64>().ok()
    });
    assert!(counted.is_some_and(|count| count > 0), "{group}");
    // Otherwise nobody would have stood in its way.
    let shares: Vec<f64> = group
        .lines()
        .filter(|line| line.contains(",r0c0"))
        .filter_map(|line| line.split(',').nth(4)?.parse().ok())
        .collect();
    assert!(shares.len() == 6, "{group}");
    assert!(shares.iter().any(|share| *share < 90.0), "{group}");
    assert_eq!(
        group.lines().filter(|line| line.contains("/job")).count(),
        1,
        "{group}"
    );
}

/// What is seen on a host whose control groups are of version 2 alone.
const PURE: [&str; 8] = [
    "what_a_group_holds_is_the_groups_until_nothing_runs_there",
    "groups_in_groups_end_in_every_order",
    "who_does_not_come_in_time_has_nothing",
    "a_name_that_is_anothers_by_now_holds_nothing",
    "threads_with_leases_and_groups_do_not_mix",
    "a_lease_within_a_lease_is_found_by_itself",
    "who_leaves_the_group_loses_its_part",
    "a_container_has_a_lease_for_itself_and_parts_of_it",
];

/// L1's kernel has no version 1 mounted beside it.
#[test]
fn groups_are_the_same_where_there_is_version_2_alone() {
    let tests = std::env::current_exe().expect("this test has a file");
    let names = PURE.map(|name| format!("arbiterd::groups::{name}"));
    let script = "mount -t cgroup2 none /sys/fs/cgroup && exec \"$@\"";
    let run = Run::new("sh").args(["-c", script, "sh"]).arg(tests);
    let run = run
        .args(["--exact", "--nocapture", "--test-threads=1"])
        .args(names);
    let run = ["unshare", "cat"].into_iter().fold(run, |run, name| {
        let here = Path::new("/usr/bin").join(name);
        if here.exists() { run.file(here) } else { run }
    });
    let run = run.file(guest_tests::umpire::path());
    let machine = Machine::new()
        .memory_mib(2048)
        .timeout(Duration::from_secs(MOST_SECONDS));
    let output = machine.output(&run).expect("L1 works");
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!out.contains("skipped"), "{out}");
    let passed = format!("test result: ok. {} passed", PURE.len());
    assert!(
        out.contains(&passed),
        "{out}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
