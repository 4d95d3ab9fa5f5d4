//! Tests of which threads and processes there are.

use std::fs;

use perfmon_abi::compact::CallChain;
use perfmon_abi::wire::programs::{Described, TaskInfo};

use super::super::program_tests::{Place, user};
use super::super::record::{Record, Sample};

/// The threads of the profile: process's name and number, thread's name and number, samples.
fn threads(tasks: &[(u32, u32, &str, &str, u64)], turns: &[(u64, u64)]) -> Vec<String> {
    let described = (1..).zip(tasks);
    let described = described.map(|(number, (pid, tid, comm, process, started_ns))| {
        Record::Described(Described::Task(TaskInfo {
            number,
            pid: *pid,
            tid: *tid,
            comm: (*comm).to_owned(),
            process: (*process).to_owned(),
            started_ns: *started_ns,
            ..TaskInfo::default()
        }))
    });
    let samples = turns.iter().map(|(time_ns, task)| {
        let record = user(0x1000, *task, 0, CallChain::default());
        match record {
            Record::Sample(sample) => Record::Sample(Sample {
                time_ns: *time_ns,
                ..sample
            }),
            other => other,
        }
    });
    let place = Place::new(&described.chain(samples).collect::<Vec<_>>());
    let path = place.path("out.json");
    place.report(|options| options.firefox = Some(path.clone()));
    let json: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let word = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let threads = json["threads"].as_array().unwrap().iter().map(|thread| {
        let [process, pid, name, tid] =
            ["processName", "pid", "name", "tid"].map(|key| word(&thread[key]));
        let samples = thread["samples"]["stack"].as_array().unwrap().len();
        format!("{process} {pid} {name} {tid}: {samples}")
    });
    let mut threads: Vec<String> = threads.collect();
    threads.sort();
    threads
}

#[test]
fn a_thread_with_another_name_is_the_same() {
    let tasks = [
        (7, 7, "worker", "worker", 1),
        (7, 8, "idle", "worker", 2),
        (7, 8, "busy", "worker", 2),
    ];
    let turns = [(10, 1), (20, 2), (30, 3), (40, 2), (50, 3)];
    let expected = ["worker 7 busy 8: 4", "worker 7 worker 7: 1"];
    assert_eq!(threads(&tasks, &turns), expected);
    // The file has another vCPU's samples later: the last name is that of the newest one.
    let turns = [(10, 1), (50, 3), (20, 2)];
    let expected = ["worker 7 busy 8: 2", "worker 7 worker 7: 1"];
    assert_eq!(threads(&tasks, &turns), expected);
    let turns = [(10, 1), (20, 2), (30, 3), (40, 2)];
    assert_eq!(threads(&tasks, &turns)[0], "worker 7 idle 8: 3");
}

#[test]
fn a_number_that_is_given_again_is_anothers() {
    let tasks = [
        (7, 7, "first", "first", 1),
        (7, 8, "helper", "first", 2),
        (7, 7, "second", "second", 10),
        (7, 8, "helper", "second", 11),
    ];
    let turns = [(10, 1), (20, 2), (30, 3), (40, 4), (50, 4)];
    let expected = [
        "first 7.1 first 7: 1",
        "first 7.1 helper 8: 1",
        "second 7.2 helper 8.1: 2",
        "second 7.2 second 7.1: 1",
    ];
    let found = threads(&tasks, &turns);
    let plain = |line: &str| line.replace(".1", "").replace(".2", "");
    let found: Vec<String> = found.iter().map(|line| plain(line)).collect();
    assert_eq!(found, expected.map(plain));
}

/// A program that begins another one stays the process that it was, as in the guest.
#[test]
fn a_process_with_another_name_is_the_same() {
    let tasks = [
        (7, 7, "sh", "sh", 1),
        (7, 7, "python3", "python3", 1),
        (7, 8, "pool", "python3", 5),
    ];
    let turns = [(10, 1), (20, 2), (30, 3)];
    let expected = ["python3 7 pool 8: 1", "python3 7 python3 7: 2"];
    assert_eq!(threads(&tasks, &turns), expected);
}

/// The idle threads of all CPUs have number 0.
#[test]
fn idle_threads_are_apart() {
    let tasks = [
        (0, 0, "swapper/0", "swapper/0", 0),
        (0, 0, "swapper/1", "swapper/1", 0),
    ];
    let turns = [(10, 1), (20, 2), (30, 1)];
    let found = threads(&tasks, &turns);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0].contains("swapper/0") && found[0].ends_with(": 2"),
        "{found:?}"
    );
    assert!(
        found[1].contains("swapper/1") && found[1].ends_with(": 1"),
        "{found:?}"
    );
}
