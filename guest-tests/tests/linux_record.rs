//! `umpire record -a` with `-g`, or with `--call-graph dwarf`, beside a real Linux guest: its
//! samples belong to processes, files and functions of the guest, which knows nothing of it.

use std::collections::HashSet;
use std::process::Command;

use guest_tests::linux::profile::{Recordings, Tally, address, word};
use guest_tests::linux::{LinuxImage, Log, Script, UnderUmpire};

/// Two programs compute, one in a known function, one in the kernel; a third is in a module.
const START: &str = "insmod /lib/modules/msr.ko; walk compute >/tmp/compute & echo compute $!; \
                     walk kernel >/tmp/kernel & echo kernel $!; taskset 1 walk module >/tmp/module & \
                     echo module $!; until grep outer /tmp/compute; do sleep 0.1; done";
/// So many samples a second of the guest's time, and for how long.
const RECORD: [&str; 2] = ["record -a -g -F 8000 -o umpire.data", "sleep 0.4"];
const TOP: &str = "top --once -d 2 -F 1000";
const FLAGS: [&str; 4] = ["--pmu", "intel-v2", "--cpus", "2"];

fn boot(image: LinuxImage) -> (Log, Recordings) {
    let recordings = Recordings::of("walk");
    let guest = UnderUmpire::new(image, &FLAGS).emulated();
    let log = Script::default()
        .step("start", START)
        .step("record", UnderUmpire::on_host_during(RECORD[0], RECORD[1]))
        .step("top", UnderUmpire::on_host(TOP))
        .step("end", "killall walk")
        .run_on(&guest.with_host(recordings.path()));
    (log, recordings)
}

fn check(image: LinuxImage) {
    let perf = image.perf();
    let (log, recordings) = boot(image);
    let said = log.of("start");
    top_shows_them(log.errors());
    let pid = |name| word(said, name).parse::<u64>().expect("a pid");
    let pids = ["compute", "kernel", "module"].map(pid);
    // Only the first program runs these.
    let [leaf, middle] = ["leaf", "middle"].map(|name| address(word(said, name)));
    // In whose function, in whose name: right ones, and all.
    let mut tally = Tally::default();
    for sample in recordings.samples("umpire.data", "pid,ip,ring,sym,dso,callchain") {
        let (ip, chain) = (sample.ip(), sample.chain());
        let own = sample.symbol();
        let of = |number: usize| sample.0["pid"] == pids[number];
        tally.judge("a task is known", !sample.0["pid"].is_null());
        if sample.in_program() && (leaf..middle).contains(&ip) {
            let named = sample.0["dso"] == "/usr/bin/walk" && matches!(own, "leaf" | "inner");
            tally.judge("a program computes", of(0) && named);
            tally.judge("its callers", chain.join(" ").contains("middle outer main"));
        }
        if !sample.in_kernel() {
            continue;
        }
        let has = |name: &str| chain.contains(&name);
        let called = has("outer") && has("main");
        if has("get_random_bytes_user") {
            tally.judge("in the kernel", of(1) && called);
        }
        if has("msr_read") {
            tally.judge("in a module", of(2) && called);
        }
        // Whatever the two that enter the kernel do there: theirs are all that have their pid.
        if of(1) || of(2) {
            tally.judge("symbols of the kernel", !own.is_empty());
            tally.judge("called by the program", called);
        }
        if of(1) {
            tally.judge("what it is there for", has("get_random_bytes_user"));
            tally.judge("by its own symbol", own.contains("chacha"));
        }
    }
    println!("{tally:?}");
    for what in [
        "a task is known",
        "a program computes",
        "its callers",
        "in the kernel",
        "in a module",
        "symbols of the kernel",
        "called by the program",
    ] {
        tally.at_least(95, what);
    }
    // It asks for random numbers all the time, but for system calls' ways in and out and what
    // interrupts them: 92 to 99.9 % in runs here. Most of that makes them.
    tally.at_least(75, "what it is there for");
    tally.at_least(25, "by its own symbol");

    let sorted = ["report", "--no-children", "--sort", "pid,dso,symbol"];
    let report = recordings.umpire("umpire.data", &sorted);
    let first = |name: &str| {
        let rows = report.lines().filter(|line| !line.starts_with('#'));
        rows.filter(|row| row.ends_with(name)).count()
    };
    assert!(
        first(" leaf") == 1 && first("chacha_block_generic") >= 1,
        "{report}"
    );
    perf_shows_the_same(perf, &recordings);
}

/// The live view has the threads, and what they run; its only frame waits for the names.
fn top_shows_them(frame: &str) {
    let rows = frame.lines().map(|line| words(line, None));
    let rows: Vec<Vec<&str>> = rows.filter(|row| row.len() > 4).collect();
    let has = |is_it: &dyn Fn(&[&str]) -> bool| rows.iter().any(|row| is_it(&row[2..]));
    assert!(
        has(&|row| row == ["COMMAND", "OBJECT", "SYMBOL"]),
        "{frame}"
    );
    let of_program = |row: &[&str]| row[0] == "walk" && row[1].ends_with("walk");
    let is_random = |row: &[&str]| row[0] == "walk" && row[2].starts_with("chacha");
    assert!(has(&of_program) && has(&is_random), "{frame}");
    let is_unknown = |row: &[&str]| row[1..].starts_with(&["[kernel.kallsyms]", "[unknown]"]);
    assert!(!has(&is_unknown), "{frame}");
}

/// `perf report` of the file for it has the same rows as `umpire report`, as far as they matter.
fn perf_shows_the_same(mut perf: Command, recordings: &Recordings) {
    let sorted = ["report", "--no-children", "--sort", "comm,symbol"];
    let ours = recordings.umpire("umpire.data", &sorted);
    let written = ["report", "--perf-data", "perf.data"];
    let _ = recordings.umpire("umpire.data", &written);
    perf.args([
        "report",
        "--stdio",
        "-g",
        "none",
        "--no-children",
        "-F",
        "overhead,comm,sym",
    ])
    .args([
        "--kallsyms",
        "perf.data.kallsyms",
        "--symfs",
        "root",
        "-i",
        "perf.data",
    ])
    .current_dir(recordings.path());
    let output = perf.output().expect("perf");
    let theirs = String::from_utf8_lossy(&output.stdout);
    let rows: HashSet<Vec<&str>> = theirs.lines().map(|row| words(row, None)).collect();
    // It does not name modules beside their functions.
    let known = |row: &&str| rows.contains(&words(row.trim_end_matches(" [msr]"), Some(1)));
    let first = ours.lines().filter(|line| line.contains('%')).take(10);
    let (same, others): (Vec<&str>, Vec<&str>) = first.partition(known);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((same.len(), others), (10, Vec::new()), "{theirs}\n{said}");
}

/// The words of a row, one of its columns left out.
fn words(row: &str, without: Option<usize>) -> Vec<&str> {
    let words = row.split_whitespace().enumerate();
    let kept = words.filter(|(at, _)| Some(*at) != without);
    kept.map(|(_, word)| word).collect()
}

/// Of the samples of programs without frame pointers, in a function of theirs and in the kernel:
/// how many have the right callers, and how many there are.
fn frameless(recordings: &Recordings, file: &str) -> [(u32, u32); 2] {
    let mut found = [(0, 0); 2];
    for sample in recordings.samples(file, "ring,sym,dso,callchain") {
        let chain = sample.chain();
        let is_in = |name| sample.symbol() == name && sample.0["dso"] == "/usr/bin/frameless";
        let (place, callers) = if is_in("leaf") {
            (0, "leaf inner middle outer main ")
        } else if sample.in_kernel() && chain.contains(&"get_random_bytes_user") {
            (1, " middle outer main ")
        } else {
            continue;
        };
        let text = chain.join(" ");
        let is_right = text.contains(callers) && text.ends_with(" _start");
        found[place].0 += u32::from(is_right);
        found[place].1 += 1;
    }
    found
}

#[test]
fn programs_without_frame_pointers() {
    let image = LinuxImage::fetch().expect("the guest's image");
    let recordings = Recordings::of("frameless");
    let guest = UnderUmpire::new(image, &FLAGS).emulated();
    let log = Script::default()
        .step("start", "frameless compute & frameless kernel & sleep 1")
        .step(
            "record",
            UnderUmpire::on_host_during(
                "record -a -F 4000 --call-graph dwarf --symfs root -o dwarf.data",
                "sleep 0.4",
            ),
        )
        .step(
            "record by pointers",
            UnderUmpire::on_host_during("record -a -F 4000 -g -o fp.data", "sleep 0.2"),
        )
        .step("end", "killall frameless")
        .run_on(&guest.with_host(recordings.path()));
    println!("{}", log.of("record"));
    let [by_tables, by_pointers] =
        ["dwarf.data", "fp.data"].map(|file| frameless(&recordings, file));
    println!("by tables {by_tables:?}, by frame pointers {by_pointers:?}");
    for (right, all) in by_tables {
        assert!(all >= 20 && right * 100 >= all * 95, "{right} of {all}");
    }
    for (right, all) in by_pointers {
        assert!(all >= 10 && right * 2 <= all, "{right} of {all}");
    }
}

#[test]
fn linux_6_1() {
    check(LinuxImage::fetch().expect("the guest's image"));
}

#[test]
fn linux_6_12() {
    check(LinuxImage::fetch_newer().expect("the guest's image"));
}

#[test]
fn the_newest_linux() {
    check(LinuxImage::fetch_newest().expect("the guest's image"));
}
