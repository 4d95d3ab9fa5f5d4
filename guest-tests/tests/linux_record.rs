//! `umpire record -a` with `-g`, or with `--call-graph dwarf`, beside a real Linux guest: its
//! samples belong to processes, files and functions of the guest, which knows nothing of it.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use guest_tests::linux::{LinuxImage, Script, UnderUmpire, own_program};
use serde_json::Value;

/// Two programs compute, one in a known function, one in the kernel; a third is in a module.
const START: &str = "insmod /lib/modules/msr.ko; walk compute >/tmp/compute & echo compute $!; \
                     walk kernel >/tmp/kernel & echo kernel $!; walk module >/tmp/module & \
                     echo module $!; sleep 1; cat /tmp/compute; \
                     echo text $(grep ' _text$' /proc/kallsyms)";
/// Where each x86-64 kernel is linked to begin. One of some 480 boots is there all the same.
const LINKED: u64 = 0xffff_ffff_8100_0000;
/// A rate at which L1 seldom stands still (docs/testing.md, "Limits of L1").
const RECORD: &str = "record -a -g -F 199 --for 8s -o /l1/out/umpire.data";
const TOP: &str = "top --once -d 2 -F 99";
const FLAGS: [&str; 8] = [
    "--cpu-vendor",
    "intel",
    "--pmu",
    "intel-v2",
    "--cpus",
    "2",
    "--counters",
    "clock",
];

/// The words that begin with `name` and what follows each of them.
fn word<'a>(text: &'a str, name: &str) -> &'a str {
    let mut words = text.split_whitespace().skip_while(|word| *word != name);
    words
        .nth(1)
        .unwrap_or_else(|| panic!("no {name} in {text}"))
}

fn umpire(folder: &Path, file: &str, arguments: &[&str]) -> String {
    let output = Command::new(guest_tests::umpire::path())
        .args(arguments)
        .args(["-i", file, "--symfs", "root"])
        .current_dir(folder)
        .output();
    let output = output.expect("umpire");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).expect("text")
}

/// The functions of a sample's chain, the innermost first.
fn chain(sample: &Value) -> Vec<&str> {
    let frames = sample["callchain"].as_array();
    frames
        .into_iter()
        .flatten()
        .filter_map(|frame| frame["symbol"].as_str())
        .collect()
}

fn check(image: LinuxImage) {
    let perf = image.perf();
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().join("root/usr/bin");
    fs::create_dir_all(&root).expect("a folder");
    fs::write(root.join("walk"), own_program("walk").expect("a program")).expect("a file");
    let guest = UnderUmpire::new(image, &FLAGS).with_kernel_options("nmi_watchdog=0");
    let log = Script::default()
        .step("start", START)
        .step("record", UnderUmpire::on_host(RECORD))
        .step("top", UnderUmpire::on_host(TOP))
        .step("end", "killall walk")
        .run_on(&guest.with_host(folder.path()));
    let said = log.of("start");
    top_shows_them(log.errors());
    let pid = |name| word(said, name).parse::<u64>().expect("a pid");
    let pids = ["compute", "kernel", "module"].map(pid);
    let address = |name| {
        let digits = word(said, name).trim_start_matches("0x");
        u64::from_str_radix(digits, 16).expect("an address")
    };
    // Only the first program runs these.
    let computing = address("leaf")..address("middle");
    let text = u64::from_str_radix(word(said, "text"), 16).expect("an address");
    assert!(
        text > 1 << 63 && text != LINKED,
        "the kernel did not move: {said}"
    );

    // In whose function, in whose name: right ones, and all.
    let mut tally: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    let text = umpire(
        folder.path(),
        "umpire.data",
        &["script", "-j", "-F", "pid,ip,ring,sym,dso,callchain"],
    );
    for line in text.lines() {
        let sample: Value = serde_json::from_str(line).expect("JSON");
        if sample["kind"] != "sample" {
            continue;
        }
        let ip = sample["ip"].as_str().and_then(|ip| ip.strip_prefix("0x"));
        let ip = ip
            .and_then(|ip| u64::from_str_radix(ip, 16).ok())
            .expect("an address");
        let chain = chain(&sample);
        let mut judge = |what, is_right: bool| {
            let (right, all) = tally.entry(what).or_default();
            *right += u32::from(is_right);
            *all += 1;
        };
        let of = |number: usize| sample["pid"] == pids[number];
        judge("a task is known", !sample["pid"].is_null());
        if sample["ring"] == "user" && computing.contains(&ip) {
            let named = sample["dso"] == "/usr/bin/walk"
                && matches!(sample["symbol"].as_str(), Some("leaf" | "inner"));
            judge("a program computes", of(0) && named);
            judge("its callers", chain.join(" ").contains("middle outer main"));
        }
        let has = |name: &&str| chain.contains(name);
        if (has(&"get_random_bytes_user") || has(&"msr_read")) && sample["ring"] == "kernel" {
            let module = has(&"msr_read");
            judge(
                if module {
                    "in a module"
                } else {
                    "in the kernel"
                },
                of(if module { 2 } else { 1 }) && has(&"outer") && has(&"main"),
            );
        }
        // Whatever the two that enter the kernel do there: theirs are all that have their pid.
        if sample["ring"] == "kernel" && (of(1) || of(2)) {
            judge("symbols of the kernel", sample["symbol"].is_string());
            judge("called by the program", has(&"outer") && has(&"main"));
        }
        if sample["ring"] == "kernel" && of(1) {
            judge("what it is there for", has(&"get_random_bytes_user"));
            let own = sample["symbol"].as_str().unwrap_or_default();
            judge("by its own symbol", own.contains("chacha"));
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
        let (right, all) = tally.get(what).copied().unwrap_or_default();
        assert!(
            all >= 20 && right * 100 >= all * 95,
            "{what}: {right} of {all}"
        );
    }
    // It asks for random numbers all the time, but for system calls' ways in and out and what
    // interrupts them: 92 to 99.9 % in runs here. Most of that makes them.
    for (what, percent) in [("what it is there for", 75), ("by its own symbol", 25)] {
        let (right, all) = tally[what];
        assert!(right * 100 >= all * percent, "{what}: {right} of {all}");
    }

    let report = umpire(
        folder.path(),
        "umpire.data",
        &["report", "--no-children", "--sort", "pid,dso,symbol"],
    );
    let first = |name: &str| {
        let rows = report.lines().filter(|line| !line.starts_with('#'));
        rows.filter(|row| row.ends_with(name)).count()
    };
    assert!(
        first(" leaf") == 1 && first("chacha_block_generic") >= 1,
        "{report}"
    );
    perf_shows_the_same(perf, folder.path());
}

/// The live view has the threads, and what they run. The names of the kernel come later here.
fn top_shows_them(frame: &str) {
    let rows = frame.lines().map(|line| words(line, None));
    let rows: Vec<Vec<&str>> = rows.filter(|row| row.len() > 4).collect();
    let has = |is_it: &dyn Fn(&[&str]) -> bool| rows.iter().any(|row| is_it(&row[2..]));
    assert!(
        has(&|row| row == ["COMMAND", "OBJECT", "SYMBOL"]),
        "{frame}"
    );
    let of_program = |row: &[&str]| row[0] == "walk" && row[1].ends_with("walk");
    let of_kernel = |row: &[&str]| row[0] == "walk" && row[1] == "[kernel.kallsyms]";
    assert!(has(&of_program) && has(&of_kernel), "{frame}");
}

/// `perf report` of the file for it has the same rows as `umpire report`, as far as they matter.
fn perf_shows_the_same(mut perf: Command, folder: &Path) {
    let sorted = ["report", "--no-children", "--sort", "comm,symbol"];
    let ours = umpire(folder, "umpire.data", &sorted);
    let written = ["report", "--perf-data", "perf.data"];
    umpire(folder, "umpire.data", &written);
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
    .current_dir(folder);
    let output = perf.output().expect("perf");
    let theirs = String::from_utf8_lossy(&output.stdout);
    let rows: HashSet<Vec<&str>> = theirs.lines().map(|row| words(row, None)).collect();
    let known = |row: &&str| rows.contains(&words(row, Some(1)));
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
fn frameless(folder: &Path, file: &str) -> [(u32, u32); 2] {
    let mut found = [(0, 0); 2];
    let text = umpire(
        folder,
        file,
        &["script", "-j", "-F", "ring,sym,dso,callchain"],
    );
    for line in text.lines() {
        let sample: Value = serde_json::from_str(line).expect("JSON");
        let chain = chain(&sample);
        let is_in = |name| sample["symbol"] == name && sample["dso"] == "/usr/bin/frameless";
        let (place, callers) = if is_in("leaf") {
            (0, "leaf inner middle outer main ")
        } else if sample["ring"] == "kernel" && chain.contains(&"get_random_bytes_user") {
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
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().join("root");
    fs::create_dir_all(root.join("usr/bin")).expect("a folder");
    let program = own_program("frameless").expect("a program");
    fs::write(root.join("usr/bin/frameless"), program).expect("a file");
    let guest = UnderUmpire::new(image, &FLAGS).with_kernel_options("nmi_watchdog=0");
    let log = Script::default()
        .step("start", "frameless compute & frameless kernel & sleep 1")
        .step(
            "record",
            UnderUmpire::on_host(
                "record -a -F 199 --call-graph dwarf --symfs /l1/root --for 6s -o /l1/out/dwarf.data",
            ),
        )
        .step(
            "record by pointers",
            UnderUmpire::on_host("record -a -F 199 -g --for 3s -o /l1/out/fp.data"),
        )
        .step("end", "killall frameless")
        .run_on(&guest.with_host(folder.path()).with_root(&root));
    println!("{}", log.of("record"));
    let [by_tables, by_pointers] =
        ["dwarf.data", "fp.data"].map(|file| frameless(folder.path(), file));
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
