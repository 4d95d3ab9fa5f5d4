//! Counters as a resource of Slurm, on a cluster of Debian's packages: two nodes on this machine,
//! each with an arbiter of four programmable and two fixed-function counters.

mod accounts;
mod cluster;
mod killed;
mod measured;
mod options;
mod programs;
mod traces;

use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use umpire_lease::{Counters, Next, Request, What};

use crate::arbiterd::fixture::Daemon;
use cluster::{NODES, POLICY, job_of, of_jobs, said, shared, soon, until_leases};

/// A lease of whole CPUs.
fn whole_cpus(count: u32, preemptible: bool) -> Request {
    Request {
        counters: vec![Counters::programmable(count)],
        preemptible: Some(preemptible),
        label: Some("site monitor".to_owned()),
        ..Request::default()
    }
}

/// Prints where and when it ran, in milliseconds.
const RUN_FOR_A_SECOND: &str =
    "echo $SLURM_JOB_ID $SLURMD_NODENAME $(date +%s%3N) $(sleep 1; date +%s%3N)";

#[test]
fn jobs_that_share_cpus_have_counters_in_turns() {
    let Some(cluster) = shared("jobs_that_share_cpus_have_counters_in_turns") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    let words = [
        "srun",
        "-p",
        "shared",
        "--counters=3",
        "sh",
        "-c",
        RUN_FOR_A_SECOND,
    ];
    let jobs = [(); 4].map(|()| {
        let mut job = cluster.user(&words);
        job.stdout(Stdio::piped()).spawn().expect("it starts")
    });
    // Both nodes have one, each with a lease.
    for daemon in &arbiters {
        let leases = until_leases(daemon, 1);
        assert_eq!((leases[0].holds, leases[0].uid), (3, 65534));
        assert!(leases[0].label.starts_with("slurm "), "{leases:?}");
    }
    let mut runs: Vec<(String, u64, u64)> = Vec::new();
    for job in jobs {
        let (status, text) = said(&job.wait_with_output().expect("it is ours"));
        let line: Vec<&str> = text.split_whitespace().collect();
        let [job, node, from, to] = line[..] else {
            panic!("{status:?}: {text}");
        };
        let time = |text: &str| text.parse::<u64>().expect("a time");
        runs.push((node.to_owned(), time(from), time(to)));
        let account = cluster.account(job.parse().expect("a number"));
        assert!(account.starts_with("COMPLETED|0:0|"), "{account}");
        assert!(account.contains("gres/pmc=3"), "{account}");
    }
    for node in NODES {
        let mut times: Vec<(u64, u64)> = Vec::new();
        for (_, from, to) in runs.iter().filter(|run| run.0 == node) {
            times.push((*from, *to));
        }
        times.sort_unstable();
        assert!(!times.is_empty(), "nothing ran on {node}: {runs:?}");
        assert!(
            times.windows(2).all(|two| two[0].1 <= two[1].0),
            "{node}: {runs:?}"
        );
    }
    arbiters
        .iter()
        .for_each(|daemon| drop(until_leases(daemon, 0)));
}

#[test]
fn jobs_on_cpus_of_their_own_have_counters_at_once() {
    let Some(cluster) = shared("jobs_on_cpus_of_their_own_have_counters_at_once") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    let start = |counters: &str| {
        let words = ["srun", "-p", "own", "-w", "n1", counters, "sleep", "2"];
        cluster.user(&words).spawn().expect("it starts")
    };
    let jobs = [start("--counters=3"), start("--counters=2,fixed=1")];
    let mut leases = until_leases(&arbiters[0], 2);
    leases.sort_by(|one, other| one.cpus.cmp(&other.cpus));
    let cpus: Vec<&str> = leases.iter().map(|lease| lease.cpus.as_str()).collect();
    assert_eq!(cpus, ["0", "1"], "{leases:?}");
    let mut holds: Vec<u32> = leases.iter().map(|lease| lease.holds).collect();
    holds.sort_unstable();
    assert_eq!(holds, [3, 3]);
    for mut job in jobs {
        assert!(job.wait().expect("it is ours").success());
    }
    until_leases(&arbiters[0], 0);
    // Counters are each CPU's: Slurm was asked for none.
    for lease in leases {
        let account = cluster.account(job_of(&lease.label));
        assert!(
            account.starts_with("COMPLETED|0:0|") && !account.contains("pmc"),
            "{account}"
        );
    }
}

#[test]
fn a_refused_step_fails_with_one_line_and_its_node_stays() {
    let Some(cluster) = shared("a_refused_step_fails_with_one_line") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    let monitor = arbiters[0].acquire(&whole_cpus(2, false));
    let words = [
        "srun",
        "-p",
        "own",
        "-w",
        "n1",
        "-n",
        "2",
        "--counters=3",
        "echo",
        "it ran",
    ];
    let (status, text) = cluster.said(&words);
    assert_eq!(status, Some(1), "{text}");
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("no counters:"))
        .collect();
    assert!(
        lines.len() == 1 && lines[0].contains("site monitor"),
        "{text}"
    );
    assert!(!text.contains("it ran"), "{text}");
    // The same of a job of sbatch, in its own output.
    let words = [
        "sbatch",
        "--wait",
        "-w",
        "n1",
        "--counters=3",
        "-o",
        "refused.%j",
        "--wrap",
        "echo it ran",
    ];
    let (status, text) = cluster.said(&words);
    assert_eq!(status, Some(1), "{text}");
    let job: u32 = text
        .split_whitespace()
        .last()
        .and_then(|word| word.parse().ok())
        .expect("a job");
    let printed = std::fs::read_to_string(cluster.folder.join(format!("out/refused.{job}")));
    let printed = printed.expect("its output");
    assert!(
        printed.contains("site monitor") && !printed.contains("it ran"),
        "{printed}"
    );
    assert!(cluster.account(job).starts_with("FAILED|1:0|"));
    let log = cluster.log_of("n1");
    assert!(
        log.contains(&format!("no counters for job {job}: ")),
        "{log}"
    );
    cluster.be_idle();
    // With what is left it runs.
    let (status, text) = cluster.said(&["srun", "-w", "n1", "--counters=2", "echo", "it ran"]);
    assert_eq!((status, text.as_str()), (Some(0), "it ran\n"));
    drop(monitor);
}

#[test]
fn a_monitor_that_gives_way_is_told_and_has_its_counters_back() {
    let Some(cluster) = shared("a_monitor_that_gives_way_is_told") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    let mut monitor = arbiters[0].acquire(&Request {
        at_least: Some(1),
        guaranteed: Some(false),
        waits_ms: Some(-1),
        ..whole_cpus(3, true)
    });
    let job = cluster
        .user(&[
            "srun",
            "-p",
            "own",
            "-w",
            "n1",
            "--counters=3",
            "sleep",
            "1",
        ])
        .spawn();
    let mut job = job.expect("it starts");
    let mut happened = Vec::new();
    let until = Instant::now() + Duration::from_secs(30);
    while monitor.lease().holds == 3 || happened.len() < 2 {
        assert!(Instant::now() < until, "{happened:?}");
        if let Ok(Next::Event(event)) = monitor.next(Some(Duration::from_millis(100))) {
            happened.push((event.what.clone(), event.lease.holds));
        }
    }
    // It is told while it still has all, and keeps what the job leaves on that CPU.
    assert_eq!(happened[0], (What::Leaving, 3), "{happened:?}");
    assert_eq!(happened.last().map(|last| last.1), Some(1), "{happened:?}");
    assert!(job.wait().expect("it is ours").success());
    while monitor.lease().holds < 3 {
        assert!(Instant::now() < until, "{:?}", monitor.lease());
        let _ = monitor.next(Some(Duration::from_millis(100)));
    }
}

#[test]
fn what_asks_for_nothing_notices_nothing() {
    let Some(cluster) = shared("what_asks_for_nothing_notices_nothing") else {
        return;
    };
    let mut arbiters = cluster.arbiters(POLICY);
    let stopped = Pid::from_raw(arbiters[0].pid()).expect("a process");
    kill_process(stopped, Signal::STOP).expect("it is ours");
    let plain = ["srun", "-w", "n1", "echo", "it ran"];
    let asking = ["srun", "-w", "n1", "--counters=1", "echo", "it ran"];
    let patient = [
        "srun",
        "-w",
        "n1",
        "--counters=1",
        "--counters-wait=45",
        "true",
    ];
    assert_eq!(cluster.said(&plain), (Some(0), "it ran\n".to_owned()));
    let began = Instant::now();
    let (status, text) = cluster.said(&asking);
    let took = began.elapsed();
    // Nobody waits in a queue who has not heard of it.
    let waited = cluster.said(&patient);
    let took_both = began.elapsed();
    kill_process(stopped, Signal::CONT).expect("it is ours");
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("has not answered within 1 s"), "{text}");
    // The bound is one second; the rest is Slurm on a busy machine.
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert!(
        waited.0 == Some(1) && waited.1.contains("has not answered within 1 s"),
        "{waited:?}"
    );
    assert!(took_both < Duration::from_secs(20), "{took_both:?}");
    // What was asked for while it stood is nobody's when it goes on.
    until_leases(&arbiters[0], 0);
    arbiters[0].kill();
    // The epilog of the last one has ended: srun says so of a job that waits for a node.
    cluster.be_idle();
    assert_eq!(cluster.said(&plain), (Some(0), "it ran\n".to_owned()));
    let (status, text) = cluster.said(&asking);
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("no arbiter listens there"), "{text}");
    cluster.be_idle();
    arbiters[0].begin();
    assert_eq!(cluster.said(&asking), (Some(0), "it ran\n".to_owned()));
}

/// Runs `umpire slurm` beside the cluster.
fn umpire_slurm(
    cluster: &cluster::Cluster,
    daemon: &Daemon,
    words: &[&str],
) -> (Option<i32>, String) {
    let program = guest_tests::umpire::path().display().to_string();
    let mut all = vec![program.as_str(), "slurm"];
    all.extend(words);
    let mut command = cluster.root(&all);
    let socket = if words.contains(&"check") {
        cluster.socket("n1")
    } else {
        daemon.socket()
    };
    said(
        &command
            .arg("--arbiter")
            .arg(socket)
            .output()
            .expect("it starts"),
    )
}

#[test]
fn what_a_node_lacks_is_said() {
    let Some(cluster) = shared("what_a_node_lacks_is_said") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    let (status, text) = umpire_slurm(&cluster, &arbiters[0], &["check", "--node", "n1"]);
    assert_eq!(status, Some(0), "{text}");
    let (status, text) = umpire_slurm(
        &cluster,
        &arbiters[0],
        &["check", "--node", "n1", "--keep", "1"],
    );
    assert_eq!(status, Some(2), "{text}");
    let wrong: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("differs"))
        .collect();
    assert!(
        wrong.len() == 1 && wrong[0].contains("pmc:3,pmcfixed:2 for jobs"),
        "{text}"
    );
    let (status, text) = umpire_slurm(&cluster, &arbiters[0], &["check", "--node", "n9"]);
    assert_eq!(status, Some(2), "{text}");
    assert!(
        text.starts_with("umpire: scontrol") && text.lines().count() == 1,
        "{text}"
    );
    // The monitor's share is taken off, unless it gives way.
    for (preemptible, line) in [(false, "Gres=pmc:3,"), (true, "Gres=pmc:4,")] {
        let _monitor = arbiters[0].acquire(&whole_cpus(1, preemptible));
        let (status, text) = umpire_slurm(&cluster, &arbiters[0], &["gres", "--node", "n1"]);
        assert_eq!(status, Some(0), "{text}");
        assert!(text.contains(line), "{text}");
    }
    soon(|| match of_jobs(&arbiters[0]).len() {
        0 => Ok(()),
        more => Err(format!("{more} leases")),
    });
}
