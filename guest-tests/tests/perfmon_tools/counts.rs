//! `umpire stat`.

use std::process::Stdio;
use std::time::Duration;

use guest_tests::umpire::skipped_without_kvm;
use guest_tests::vm::{Vm, signal};
use serde_json::Value;

use super::{boot, boot_idle};

/// The rows of `-j`.
pub(super) fn rows(text: &str) -> Vec<Value> {
    let row = |line| serde_json::from_str(line).expect("JSON");
    text.lines().map(row).collect()
}

pub(super) fn count(rows: &[Value], event: &str) -> f64 {
    let row = rows.iter().find(|row| row["event"] == event);
    let value = row.and_then(|row| row["counter-value"].as_str());
    let value = value.unwrap_or_else(|| panic!("{event} in {rows:?}"));
    value
        .parse()
        .unwrap_or_else(|_| panic!("{event} is {value}"))
}

/// Two counts have a ratio, but for a part in so many.
pub(super) fn check_ratio(rows: &[Value], more: &str, less: &str, ratio: f64, tolerated: f64) {
    let found = count(rows, more) / count(rows, less);
    let off = (found / ratio - 1.0).abs();
    assert!(off < tolerated, "{more}/{less} is {found}: {rows:?}");
}

#[test]
fn counts_are_those_that_were_declared() {
    if skipped_without_kvm("counts_are_those") {
        return;
    }
    let vm = boot(8, &[]);
    let words = [
        "stat",
        "-j",
        "-e",
        "cycles,{instructions,branches}",
        "--for",
        "300ms",
    ];
    let found = rows(&vm.printed(&words));
    assert_eq!(found.len(), 3);
    check_ratio(&found, "cycles", "instructions", 4.0, 1e-6);
    check_ratio(&found, "instructions", "branches", 5.0, 1e-6);
    for row in &found {
        assert_eq!(row["provenance"], "simulated");
        assert_eq!(row["pcnt-running"], 100.0);
        // The guest spins, so it has run most of the time; in no more than that.
        let ns = row["event-runtime"].as_f64().expect("a number");
        assert!((1e7..3e9).contains(&ns), "{row}");
    }
    let per_ns = count(&found, "cycles") / found[0]["event-runtime"].as_f64().expect("a number");
    assert!((1.9..2.1).contains(&per_ns), "{per_ns} cycles per ns");
}

#[test]
fn events_take_turns_and_are_scaled() {
    if skipped_without_kvm("events_take_turns") {
        return;
    }
    let vm = boot(2, &[]);
    let list = "{cycles,instructions},{branches,cycles:u},branch-misses";
    for scale in ["phases", "linear"] {
        let words = [
            "stat", "-j", "--scale", scale, "--turn", "5", "-e", list, "--for", "1s",
        ];
        let found = rows(&vm.printed(&words));
        check_ratio(&found, "cycles", "instructions", 4.0, 1e-3);
        // Between sets it is an estimate, as good as their times.
        check_ratio(&found, "instructions", "branches", 5.0, 0.2);
        check_ratio(&found, "branches", "branch-misses", 50.0, 0.2);
        for row in &found {
            let percent = row["pcnt-running"].as_f64().expect("a number");
            assert!((10.0..60.0).contains(&percent), "{row}");
        }
    }
}

#[test]
fn what_nothing_counts_is_not_supported() {
    if skipped_without_kvm("what_nothing_counts") {
        return;
    }
    let vm = boot(8, &[]);
    let text = vm.printed(&[
        "stat",
        "--provenance",
        "-x",
        ";",
        "-e",
        "loads,cycles,ref-cycles",
        "--for",
        "100ms",
    ]);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(';').collect()).collect();
    assert_eq!(lines.len(), 3);
    assert!(lines.iter().all(|fields| fields.len() == 8), "{text}");
    assert_eq!(lines[0][..3], ["<not supported>", "", "loads"]);
    assert!(lines[1][0].parse::<u64>().is_ok_and(|count| count > 0));
    assert_eq!(lines[1][7], "simulated");
    assert_eq!(lines[2][0], "<not supported>");
}

#[test]
fn the_default_shows_times_exits_and_metrics() {
    if skipped_without_kvm("the_default_shows") {
        return;
    }
    let vm = boot(8, &["--cpus", "2"]);
    let text = vm.printed(&["stat", "--for", "300ms"]);
    for part in [
        "Performance counter stats for 'VM ",
        "vm-run-ns",
        "CPUs utilized",
        "vm-exits",
        "0.25  insn per cycle",
        "seconds time elapsed",
    ] {
        assert!(text.contains(part), "no {part} in: {text}");
    }
    let text = vm.printed(&[
        "stat",
        "--per-vcpu",
        "-e",
        "cycles,vm-exits",
        "--for",
        "200ms",
    ]);
    assert!(text.contains("vCPU0 ") && text.contains("vCPU1 "), "{text}");
    let text = vm.printed(&["stat", "-a", "-e", "cycles,vm-exits", "--for", "200ms"]);
    assert!(text.contains("cycles") && !text.contains('<'), "{text}");
}

/// Nothing is stolen from a processor that was never started, and its time is not
/// missing either: it waits, as a halted one does.
#[test]
fn a_processor_that_was_never_started_is_halted() {
    if skipped_without_kvm("a_processor_that_was_never_started") {
        return;
    }
    for flags in [&["--cpus", "2"][..], &["--cpus", "2", "--cores", "1"]] {
        let vm = boot_idle(8, flags);
        let events = "vm-run-ns,vm-steal-ns,vm-halt-ns";
        let found = rows(&vm.printed(&["stat", "-j", "--vcpu", "1", "-e", events, "--for", "1s"]));
        let [ran, stolen, halted] =
            ["vm-run-ns", "vm-steal-ns", "vm-halt-ns"].map(|event| count(&found, event));
        assert!(ran < 100.0 && stolen < 100.0, "{flags:?}: {found:?}");
        assert!((800.0..1800.0).contains(&halted), "{flags:?}: {found:?}");
    }
}

#[test]
fn intervals_and_repeats() {
    if skipped_without_kvm("intervals_and_repeats") {
        return;
    }
    let vm = boot(8, &[]);
    let words = [
        "stat",
        "-j",
        "-I",
        "100",
        "-e",
        "cycles,instructions",
        "--for",
        "550ms",
    ];
    let found = rows(&vm.printed(&words));
    assert!((4..=14).contains(&found.len()), "{found:?}");
    for pair in found.chunks(2) {
        check_ratio(pair, "cycles", "instructions", 4.0, 1e-3);
        assert_eq!(pair[0]["interval"], pair[1]["interval"]);
    }
    let words = ["stat", "-r", "3", "-e", "cycles", "--for", "100ms"];
    let text = vm.printed(&words);
    assert!(text.contains("(3 runs)") && text.contains("+-"), "{text}");
}

#[test]
fn ctrl_c_and_the_end_of_the_vm_print_the_table() {
    if skipped_without_kvm("ctrl_c_and_the_end") {
        return;
    }
    let mut vm = boot(8, &[]);
    let start = |vm: &Vm| {
        let mut command = vm.command(&["stat", "--log-fd", "1", "-j", "-e", "cycles,instructions"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().expect("umpire can be started");
        std::thread::sleep(Duration::from_millis(1500));
        child
    };
    let check = |child: std::process::Child| {
        let output = child.wait_with_output().expect("an end");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{told}");
        let found = rows(&String::from_utf8_lossy(&output.stdout));
        check_ratio(&found, "cycles", "instructions", 4.0, 1e-3);
        told
    };
    let child = start(&vm);
    signal(&child, "-INT");
    assert_eq!(check(child), "");
    let child = start(&vm);
    vm.stop();
    assert!(check(child).contains("have ended"));
}

/// `--event-filter`: what is denied is not supported, with the reason, and never 0.
#[test]
fn what_the_event_filter_denies_is_not_supported() {
    if skipped_without_kvm("what_the_event_filter_denies_is_not_supported") {
        return;
    }
    let filter = "[guest]\nprofile = \"all\"\n[[guest.rule]]\naction = \"deny\"\nselect = 0xc2\n";
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), filter).expect("a file");
    let path = file.path().to_str().expect("UTF-8");
    let vm = boot(4, &["--event-filter", path]);
    let output = vm.tool(&[
        "stat",
        "--log-fd",
        "1",
        "-x",
        ",",
        "-e",
        "cycles,branches",
        "--for",
        "200ms",
    ]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let rows: Vec<&str> = printed.lines().chain(told.lines()).collect();
    let row = |event: &str| {
        let row = rows.iter().find(|row| row.contains(&format!(",{event},")));
        row.unwrap_or_else(|| panic!("{printed}{told}"))
    };
    assert!(row("branches").starts_with("<not supported>"), "{printed}");
    assert!(!row("cycles").starts_with('<'), "{printed}");
    assert!(told.contains("--event-filter denies branches"), "{told}");
}

/// As `perf stat -- COMMAND`: as long as it runs, and with its status.
#[test]
fn as_long_as_a_command_runs() {
    if skipped_without_kvm("as_long_as_a_command_runs") {
        return;
    }
    let vm = boot(8, &[]);
    let stat = |command: &[&str]| {
        let words = [
            &["stat", "--log-fd", "1", "-j", "-e", "vm-run-ns", "--"],
            command,
        ]
        .concat();
        vm.tool(&words)
    };
    let slept = stat(&["sleep", "0.4"]);
    assert!(slept.status.success());
    let ran = count(&rows(&String::from_utf8_lossy(&slept.stdout)), "vm-run-ns");
    // Milliseconds of a vCPU that spins, on a busy host.
    assert!((100.0..5000.0).contains(&ran), "{ran}");
    assert_eq!(stat(&["sh", "-c", "exit 7"]).status.code(), Some(7));
    let killed = stat(&["sh", "-c", "kill -TERM $$"]);
    assert_eq!(killed.status.code(), Some(128 + 15));
    let repeated = vm.printed(&["stat", "-r", "3", "-e", "cycles", "sleep", "0.05"]);
    assert!(repeated.contains("(3 runs)"), "{repeated}");
    let recorded = vm.tool(&["record", "-o", "c.data", "sh", "-c", "exit 3"]);
    assert_eq!(recorded.status.code(), Some(3));
}

#[test]
fn numbers_by_name_into_a_file() {
    if skipped_without_kvm("numbers_by_name_into_a_file") {
        return;
    }
    let vm = boot(8, &[]);
    let _ = vm.printed(&[
        "stat",
        "-M",
        "ipc,cpus",
        "--metric-only",
        "-x",
        ",",
        "-o",
        "m",
        "--for",
        "200ms",
    ]);
    let words = [
        "stat",
        "-A",
        "-e",
        "cpu/event=0x76/,{cycles,instructions}:G",
        "-o",
        "m",
    ];
    let _ = vm.printed(&[&words[..], &["--append", "--for", "100ms"]].concat());
    let text = std::fs::read_to_string(vm.path("m")).expect("the file");
    let mut lines = text.lines();
    assert!(
        lines.next().expect("a line").starts_with("# started on "),
        "{text}"
    );
    // The frequency follows from the same counts.
    let heads = lines.next().expect("a line");
    assert_eq!(heads, "insn per cycle,GHz,CPUs utilized", "{text}");
    assert!(lines.next().expect("a line").starts_with("0.25,"), "{text}");
    assert!(
        lines.next().expect("a line").starts_with("# started on "),
        "{text}"
    );
    for event in [" cpu/event=0x76/", " cycles:G", " instructions:G"] {
        let of = |line: &&str| line.starts_with("vCPU0") && line.contains(event);
        assert_eq!(text.lines().filter(of).count(), 1, "{event}: {text}");
    }
    // Rates have their events' names, and nothing that was counted is left out.
    let words = [
        "stat",
        "-j",
        "--metric-only",
        "-e",
        "vm-exits,vm-pmis,vm-run-ns",
        "--for",
        "50ms",
    ];
    let alone = vm.printed(&words);
    for label in ["vm-exits /sec", "vm-pmis /sec", "CPUs utilized"] {
        assert!(alone.contains(label), "{alone}");
    }
    let none = vm.tool(&["stat", "--metric-only", "-e", "vm-exits", "--for", "50ms"]);
    assert_eq!(none.status.code(), Some(2));
    let detailed = vm.printed(&["stat", "-d", "--for", "50ms"]);
    assert!(
        detailed.contains("cache-misses") && detailed.contains(" cycles "),
        "{detailed}"
    );
}
