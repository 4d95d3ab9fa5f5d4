//! Several tools at once on the same vCPU: each has counts of its own.

use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use guest_tests::umpire::skipped_without_kvm;
use guest_tests::vm::Vm;
use serde_json::Value;

use super::boot;
use super::counts::{check_ratio, count, rows};

/// How long anybody waits for a tool to begin.
const PATIENCE: Duration = Duration::from_secs(20);

fn start(vm: &Vm, words: &[&str]) -> Child {
    let mut command = vm.command(words);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("umpire can be started")
}

fn end(child: Child) -> Output {
    child.wait_with_output().expect("an end")
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What it printed, and it did not fail.
fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{}", told(output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The contexts of a vCPU that count, as `umpire ls` has them.
fn counting(vm: &Vm, vcpu: usize) -> usize {
    let listed: Value =
        serde_json::from_str(&vm.printed(&["ls", "-j", &vm.socket()])).expect("JSON");
    let machine = &listed["machine"];
    let there = machine["vcpus"][vcpu]["contexts"]
        .as_array()
        .expect("a list");
    let contexts = machine["contexts"].as_array().expect("a list");
    let counts = |id: &&Value| {
        contexts
            .iter()
            .any(|one| one["id"] == **id && one["started"] == true)
    };
    there.iter().filter(counts).count()
}

/// Waits until so many contexts count on vCPU 0.
fn await_counting(vm: &Vm, contexts: usize) {
    let began = Instant::now();
    while counting(vm, 0) != contexts {
        assert!(began.elapsed() < PATIENCE, "{contexts} contexts count");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A `umpire stat` whose counts can be read.
fn stat_of<'a>(events: &'a str, time: &'a str) -> [&'a str; 8] {
    ["stat", "--log-fd", "1", "-j", "-e", events, "--for", time]
}

/// Counts are those that were declared, over the whole time.
fn check_counts(output: &Output) {
    let found = rows(&printed(output));
    check_ratio(&found, "cycles", "instructions", 4.0, 1e-6);
    for row in &found {
        assert_eq!(row["pcnt-running"], 100.0, "{row}");
    }
    let per_ns = count(&found, "cycles") / found[0]["event-runtime"].as_f64().expect("a number");
    assert!((1.9..2.1).contains(&per_ns), "{per_ns} cycles per ns");
}

#[test]
fn stat_runs_beside_record() {
    if skipped_without_kvm("stat_runs_beside_record") {
        return;
    }
    let vm = boot(8, &[]);
    let words = [
        "record", "-e", "cycles", "-c", "2000000", "-o", "a.data", "--for", "3s",
    ];
    let record = start(&vm, &words);
    await_counting(&vm, 1);
    let stat = start(&vm, &stat_of("cycles,instructions", "1s"));
    await_counting(&vm, 2);
    check_counts(&end(stat));
    let recorded = end(record);
    printed(&recorded);
    assert!(told(&recorded).contains(" samples;"), "{}", told(&recorded));
    // A sample at each overflow, and none lost for the other context's sake.
    let report = vm.printed(&["report", "-i", "a.data"]);
    assert!(report.contains("of event 'cycles'"), "{report}");
    assert!(
        report.contains("lost for want of room: 0; throttled: 0 times"),
        "{report}"
    );
}

#[test]
fn two_stats_at_once_count_the_same() {
    if skipped_without_kvm("two_stats_at_once") {
        return;
    }
    for flags in [&[][..], &["--cpus", "2", "--cores", "1"]] {
        let vm = boot(16, flags);
        let words = |time| stat_of("cycles,instructions", time);
        let long = start(&vm, &words("3s"));
        await_counting(&vm, 1);
        let short = start(&vm, &words("1s"));
        await_counting(&vm, 2);
        check_counts(&end(short));
        check_counts(&end(long));
        // One of the cores beside them.
        let long = start(&vm, &words("3s"));
        await_counting(&vm, 1);
        let of_core = vm.printed(&[
            "stat",
            "-a",
            "-j",
            "-e",
            "cycles,instructions",
            "--for",
            "500ms",
        ]);
        check_ratio(&rows(&of_core), "cycles", "instructions", 4.0, 1e-6);
        check_counts(&end(long));
    }
}

#[test]
fn a_second_stat_is_refused_where_one_is_allowed() {
    if skipped_without_kvm("a_second_stat_is_refused") {
        return;
    }
    let vm = boot(8, &["--contexts-per-vcpu", "1"]);
    let first = start(&vm, &stat_of("cycles,instructions", "3s"));
    await_counting(&vm, 1);
    let second = vm.tool(&["stat", "-e", "cycles", "--for", "100ms"]);
    assert_eq!(second.status.code(), Some(2), "{}", told(&second));
    for part in ["has a context already: number ", "--contexts-per-vcpu"] {
        assert!(told(&second).contains(part), "{}", told(&second));
    }
    check_counts(&end(first));
}

/// A preemptible one makes room for the next, and goes on after it.
#[test]
fn tools_make_room_for_each_other() {
    if skipped_without_kvm("tools_make_room") {
        return;
    }
    let vm = boot(3, &[]);
    let words = [
        "stat",
        "--log-fd",
        "1",
        "--preemptible",
        "-j",
        "-e",
        "{cycles,instructions}",
        "--for",
        "3s",
    ];
    let soft = start(&vm, &words);
    await_counting(&vm, 1);
    let hard = vm.printed(&["stat", "-j", "-e", "{cycles,instructions}", "--for", "1s"]);
    let hard = rows(&hard);
    check_ratio(&hard, "cycles", "instructions", 4.0, 1e-6);
    assert_eq!(hard[0]["pcnt-running"], 100.0, "{hard:?}");
    let soft = rows(&printed(&end(soft)));
    check_ratio(&soft, "cycles", "instructions", 4.0, 1e-3);
    let percent = soft[0]["pcnt-running"].as_f64().expect("a number");
    assert!((20.0..90.0).contains(&percent), "{soft:?}");
    // Nobody makes room who did not agree to it.
    let first = start(&vm, &stat_of("{cycles,instructions}", "2s"));
    await_counting(&vm, 1);
    let second = vm.tool(&["stat", "-e", "{cycles,instructions}", "--for", "100ms"]);
    assert!(
        told(&second).contains("no counters for"),
        "{}",
        told(&second)
    );
    check_counts(&end(first));
}
