//! `umpire record -a -g` beside a Linux guest whose kernel has no BTF: `umpire-agent` in it tells
//! what runs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use guest_tests::linux::{LinuxImage, Script, UnderUmpire, own_program};
use guest_tests::umpire;
use serde_json::Value;

/// One program runs all the time, one computes in a known function, one in the kernel; the last
/// one is there only for moments, in one process after the other.
const START: &str = "walk compute >/tmp/compute & echo compute $!; walk kernel >/tmp/kernel & \
                     echo kernel $!; umpire-agent >/tmp/agent 2>&1 & \
                     while :; do timeout 1 walk kernel >/dev/null; done 2>/dev/null & \
                     sleep 2; cat /tmp/compute; echo types $(hexdump -n 2 /sys/kernel/btf/vmlinux)";
const RECORD: &str = "record -a -g -F 97 --for 12s -o /l1/out/umpire.data";
/// The first one meets an agent that has gone without a word.
const LATER: [&str; 2] = [
    "record -a -F 97 --for 1s -o /l1/out/unheard.data",
    "record -a -F 97 --for 1s -o /l1/out/later.data",
];
const FLAGS: [&str; 9] = [
    "--agent",
    "--cpu-vendor",
    "intel",
    "--pmu",
    "intel-v2",
    "--cpus",
    "2",
    "--counters",
    "clock",
];

/// The word behind `name`.
fn word<'a>(text: &'a str, name: &str) -> &'a str {
    let mut words = text.split_whitespace().skip_while(|word| *word != name);
    words
        .nth(1)
        .unwrap_or_else(|| panic!("no {name} in {text}"))
}

fn umpire(folder: &Path, file: &str, arguments: &[&str]) -> String {
    let output = Command::new(umpire::path())
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
    let frames = sample["callchain"].as_array().into_iter().flatten();
    frames
        .filter_map(|frame| frame["symbol"].as_str())
        .collect()
}

fn check(image: LinuxImage) {
    let image = image.without_btf().expect("a kernel");
    let image = image.with_program("umpire-agent", umpire::agent());
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path().join("root/usr/bin");
    fs::create_dir_all(&root).expect("a folder");
    fs::write(root.join("walk"), own_program("walk").expect("a program")).expect("a file");
    let guest = UnderUmpire::new(image, &FLAGS).with_kernel_options("nmi_watchdog=0");
    // On a machine with much else to do it takes some 150 s.
    let guest = guest.with_timeout(Duration::from_secs(300));
    let log = Script::default()
        .step("start", START)
        .step("record", UnderUmpire::on_host(RECORD))
        .step("without it", "killall umpire-agent")
        .step("record unheard", UnderUmpire::on_host(LATER[0]))
        .step("record later", UnderUmpire::on_host(LATER[1]))
        .step("end", "killall walk; cat /tmp/agent")
        .run_on(&guest.with_host(folder.path()));
    let said = log.of("start");
    println!("{}", log.errors());
    assert!(!said.contains("eb9f"), "it has BTF: {said}");
    // Whether the kernel's symbols are there, too, is judged by the first: on a very busy host
    // the second one was seen without any.
    let [first, _] = ["unheard.data", "later.data"].map(|file| without_names(folder.path(), file));
    let (named, kernel) = first;
    assert!(named * 100 >= kernel * 95, "{named} of {kernel}");
    let why = "programs of the guest have no names: the kernel 6.";
    let errors = log.errors();
    let reasons: Vec<&str> = errors.lines().filter(|line| line.contains(why)).collect();
    let parts = ["does not describe its tasks", "umpire-agent in the guest"];
    let is_whole = |line: &&str| parts.iter().all(|part| line.contains(part));
    assert!((1..=LATER.len()).contains(&reasons.len()), "{errors}");
    assert!(reasons.iter().all(is_whole), "{errors}");
    let pid = |name| word(said, name).parse::<u64>().expect("a pid");
    let pids = ["compute", "kernel"].map(pid);
    let address = |name| {
        let digits = word(said, name).trim_start_matches("0x");
        u64::from_str_radix(digits, 16).expect("an address")
    };
    // Only the first program runs these.
    let computing = address("leaf")..address("middle");

    let mut tally: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    // By the second of the recording.
    let mut unknown: BTreeMap<u64, u32> = BTreeMap::new();
    let text = umpire(
        folder.path(),
        "umpire.data",
        &[
            "script",
            "-j",
            "-F",
            "comm,pid,time,ip,ring,sym,dso,callchain",
        ],
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
        judge("a task is known", !sample["pid"].is_null());
        if sample["pid"].is_null() {
            let second = sample["time_ns"].as_u64().expect("a time") / 1_000_000_000;
            *unknown.entry(second).or_default() += 1;
        }
        if sample["ring"] == "user" && computing.contains(&ip) {
            let named = sample["dso"] == "/usr/bin/walk"
                && matches!(sample["symbol"].as_str(), Some("leaf" | "inner"));
            judge("a program computes", sample["pid"] == pids[0] && named);
            judge("its callers", chain.join(" ").contains("middle outer main"));
        }
        if sample["ring"] != "kernel" {
            continue;
        }
        // Without its types the kernel's chain has few callers.
        let own = sample["symbol"].as_str().unwrap_or_default();
        let is_random = own.contains("chacha") || chain.contains(&"get_random_bytes_user");
        if is_random {
            judge(
                "in the kernel",
                sample["comm"] == "walk" && sample["pid"] != pids[0],
            );
            judge("of all the long one", sample["pid"] == pids[1]);
        }
        // Whatever it does there: its samples are all that have its pid.
        if sample["pid"] == pids[1] {
            judge("symbols of the kernel", !own.is_empty());
            judge("what it is there for", is_random);
        }
    }
    println!("{tally:?}, without a task: {unknown:?}");
    for what in [
        "a task is known",
        "a program computes",
        "its callers",
        "in the kernel",
        "symbols of the kernel",
    ] {
        let (right, all) = tally.get(what).copied().unwrap_or_default();
        assert!(
            all >= 20 && right * 100 >= all * 95,
            "{what}: {right} of {all}"
        );
    }
    let (right, all) = tally["what it is there for"];
    assert!(right * 4 >= all, "{right} of {all}");
    let (long, all) = tally["of all the long one"];
    assert!(0 < long && long < all, "there were others: {tally:?}");

    let report = umpire(
        folder.path(),
        "umpire.data",
        &["report", "--no-children", "--sort", "pid,dso,symbol"],
    );
    let rows = report.lines().filter(|line| !line.starts_with('#'));
    assert_eq!(
        rows.filter(|row| row.ends_with(" leaf")).count(),
        1,
        "{report}"
    );
}

/// Of a kernel that does not describe itself, and without an agent, samples have what they had
/// before there were tasks: rings, CR3, symbols of the kernel. Of those in the kernel how many
/// have a symbol, and how many there are.
fn without_names(folder: &Path, file: &str) -> (u32, u32) {
    let fields = ["script", "-j", "-F", "comm,pid,tid,ring,cr3,sym,dso"];
    let text = umpire(folder, file, &fields);
    let (mut all, mut kernel, mut named, mut programs) = (0, 0, 0, 0);
    for line in text.lines() {
        let sample: Value = serde_json::from_str(line).expect("JSON");
        if sample["kind"] != "sample" {
            continue;
        }
        all += 1;
        for field in ["comm", "pid", "tid"] {
            assert!(sample[field].is_null(), "{line}");
        }
        assert!(sample["cr3"].is_string(), "{line}");
        if sample["ring"] == "kernel" {
            kernel += 1;
            named += u32::from(sample["symbol"].is_string());
        } else {
            programs += u32::from(sample["symbol"].is_null());
        }
    }
    println!(
        "{file}: {all}, {kernel} in the kernel, {named} with a symbol, {programs} of programs"
    );
    assert!(all >= 20 && kernel >= 10, "{text}");
    assert_eq!(kernel + programs, all, "programs have no symbols: {text}");
    let report = umpire(folder, file, &["report"]);
    assert!(report.contains("[user cr3=0x"), "{report}");
    // The VM may still know tasks of before; none of them has a sample.
    assert!(!report.contains(" walk "), "{report}");
    let rows = report.lines().filter(|line| line.contains("[k] "));
    assert!(rows.count() > 0, "{report}");
    (named, kernel)
}

#[test]
fn linux_6_1() {
    check(LinuxImage::fetch().expect("the guest's image"));
}

#[test]
fn linux_6_12() {
    check(LinuxImage::fetch_newer().expect("the guest's image"));
}
