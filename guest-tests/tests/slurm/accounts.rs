//! What a job's counters came to, at its end, in its AdminComment.

use std::fs;
use std::time::{Duration, Instant};

use umpire_lease::Request;

use super::cluster::{Cluster, POLICY, job_of, shared, soon, until_leases};
use super::whole_cpus;
use crate::arbiterd::fixture::Daemon;

/// One that waits to have back what jobs take.
fn monitor() -> Request {
    Request {
        at_least: Some(1),
        guaranteed: Some(false),
        waits_ms: Some(-1),
        ..whole_cpus(3, true)
    }
}

/// The records of an arbiter's audit that have all of these in them.
fn records(daemon: &Daemon, words: &[&str]) -> Vec<String> {
    let text = fs::read_to_string(daemon.folder.path().join("audit")).expect("its audit");
    let lines = text
        .lines()
        .filter(|line| words.iter().all(|word| line.contains(word)));
    lines.map(str::to_owned).collect()
}

/// The AdminComment of a job as soon as this is in it, when its nodes are idle.
fn until_comment(cluster: &Cluster, job: &str, expected: &str) -> String {
    let mut comment = String::new();
    soon(|| {
        comment = cluster.admin_comment(job);
        let is_there = comment.contains(expected);
        is_there
            .then_some(())
            .ok_or_else(|| format!("{job}: {comment:?}, no {expected}"))
    });
    cluster.be_idle();
    comment
}

/// The seconds behind a word of a comment.
fn seconds(comment: &str, word: &str) -> f64 {
    let behind = comment
        .split_once(word)
        .map(|(_, behind)| behind.trim_start());
    let number = behind.and_then(|behind| behind.split(' ').next());
    let number = number.and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("no seconds behind {word}: {comment}"))
}

#[test]
fn a_jobs_end_says_how_long_others_were_blind_for_it() {
    let Some(cluster) = shared("a_jobs_end_says_how_long_others_were_blind_for_it") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    let blind = arbiters[0].acquire(&monitor());
    let began = Instant::now();
    // Two nodes: the monitor of one loses two counters, and the other has none.
    let words = [
        "srun",
        "-N",
        "2",
        "-p",
        "own",
        "--counters=3",
        "sleep",
        "600",
    ];
    let mut job = cluster.user(&words).spawn().expect("it starts");
    let lease = until_leases(&arbiters[0], 1).remove(0);
    let number = job_of(&lease.label).to_string();
    soon(|| {
        let leases = arbiters[1].connect().leases().expect("it answers");
        let is_there = leases.iter().any(|lease| lease.holds == 3);
        is_there.then_some(()).ok_or_else(|| format!("{leases:?}"))
    });
    let held = Instant::now();
    std::thread::sleep(Duration::from_secs(1));
    let held = held.elapsed();
    cluster.asked(&["scancel", &number]);
    let _ = job.wait().expect("it is ours");
    until_comment(&cluster, &number, "umpire n2: 3 counters, nobody blind");
    let comment = until_comment(&cluster, &number, "umpire n1: ");
    assert_eq!(comment.matches("umpire ").count(), 2, "{comment}");
    assert!(
        comment.contains("umpire n1: 3 counters, blind: site "),
        "{comment}"
    );
    // The audit says for whose lease, and the time is two counters' while the job had its own.
    let of_lease = format!("\"by_lease\":{}", lease.id);
    let lost = records(
        &arbiters[0],
        &[&of_lease, "\"event\":\"holds\"", "site monitor"],
    );
    assert_eq!(lost.len(), 1, "{lost:?}");
    let said = seconds(&comment, "blind: site ");
    let most = 2.0 * began.elapsed().as_secs_f64();
    assert!(
        said >= 2.0 * held.as_secs_f64() - 0.1 && said <= most,
        "{comment}, {most}"
    );
    drop(blind);
}

#[test]
fn the_comment_is_of_jobs_with_counters_alone_and_keeps_what_is_there() {
    let Some(cluster) = shared("the_comment_is_of_jobs_with_counters_alone") else {
        return;
    };
    let arbiters = cluster.arbiters(POLICY);
    let batch = |words: &[&str]| {
        let mut all = vec!["sbatch", "--parsable", "-o", "/dev/null", "-w", "n1"];
        all.extend(words);
        let (status, text) = cluster.said(&all);
        assert_eq!(status, Some(0), "{text}");
        text.trim().to_owned()
    };
    // Each task of an array has its own, also the last one, whose number is that of all.
    let array = batch(&["--counters=1", "--array=1-2", "--wrap", "true"]);
    for task in ["1", "2"] {
        let task = format!("{array}_{task}");
        let comment = until_comment(&cluster, &task, "umpire ");
        assert_eq!(comment, "umpire n1: 1 counter, nobody blind");
    }
    // What the site has written stays.
    let job = batch(&["--counters=2", "--wrap", "sleep 600"]);
    until_leases(&arbiters[0], 1);
    cluster.asked(&[
        "scontrol",
        "update",
        &format!("jobid={job}"),
        "admincomment=of the site",
    ]);
    cluster.asked(&["scancel", &job]);
    let comment = until_comment(&cluster, &job, "umpire ");
    assert_eq!(comment, "of the site; umpire n1: 2 counters, nobody blind");
    until_leases(&arbiters[0], 0);
    // Neither without counters, nor without any audit, is anything said, or a node drained.
    let plain = batch(&["--wait", "--wrap", "true"]);
    fs::remove_file(cluster.folder.join("arbiter-n1.toml")).expect("a link");
    let unaudited = batch(&["--wait", "--counters=1", "--wrap", "true"]);
    cluster.be_idle();
    for job in [plain, unaudited] {
        assert!(
            cluster
                .account(job.parse().expect("a number"))
                .starts_with("COMPLETED|0:0|")
        );
        assert_eq!(cluster.admin_comment(&job), "");
    }
}
