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
                     echo $! >/tmp/loop; sleep 2; cat /tmp/compute; echo types $(hexdump -n 2 /sys/kernel/btf/vmlinux)";
const RECORD: &str = "record -a -g -F 97 --for 12s -o /l1/out/umpire.data";
const LATER: &str = "record -a -F 97 --for 1s -o /l1/out/later.data";
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

fn umpire(folder: &Path, arguments: &[&str]) -> String {
    let output = Command::new(umpire::path())
        .args(arguments)
        .args(["-i", "umpire.data", "--symfs", "root"])
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
        .step(
            "without it",
            "killall umpire-agent; kill $(cat /tmp/loop); killall walk",
        )
        .step("record later", UnderUmpire::on_host(LATER))
        .step("end", "cat /tmp/agent")
        .run_on(&guest.with_host(folder.path()));
    let said = log.of("start");
    println!("{}", log.errors());
    assert!(!said.contains("eb9f"), "it has BTF: {said}");
    let pid = |name| word(said, name).parse::<u64>().expect("a pid");
    let pids = ["compute", "kernel"].map(pid);
    let address = |name| {
        let digits = word(said, name).trim_start_matches("0x");
        u64::from_str_radix(digits, 16).expect("an address")
    };
    // Only the first program runs these.
    let computing = address("leaf")..address("middle");

    let mut tally: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    let text = umpire(
        folder.path(),
        &["script", "-j", "-F", "comm,pid,ip,ring,sym,dso,callchain"],
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
        if sample["ring"] == "user" && computing.contains(&ip) {
            let named = sample["dso"] == "/usr/bin/walk"
                && matches!(sample["symbol"].as_str(), Some("leaf" | "inner"));
            judge("a program computes", sample["pid"] == pids[0] && named);
            judge("its callers", chain.join(" ").contains("middle outer main"));
        }
        if chain.contains(&"get_random_bytes_user") && sample["ring"] == "kernel" {
            judge(
                "in the kernel",
                sample["comm"] == "walk" && sample["pid"] != pids[0],
            );
            judge("of all the long one", sample["pid"] == pids[1]);
        }
    }
    println!("{tally:?}");
    for what in [
        "a task is known",
        "a program computes",
        "its callers",
        "in the kernel",
    ] {
        let (right, all) = tally.get(what).copied().unwrap_or_default();
        assert!(
            all >= 20 && right * 100 >= all * 95,
            "{what}: {right} of {all}"
        );
    }
    let (long, all) = tally["of all the long one"];
    assert!(0 < long && long < all, "there were others: {tally:?}");

    let report = umpire(
        folder.path(),
        &["report", "--no-children", "--sort", "pid,dso,symbol"],
    );
    let rows = report.lines().filter(|line| !line.starts_with('#'));
    assert_eq!(
        rows.filter(|row| row.ends_with(" leaf")).count(),
        1,
        "{report}"
    );
}

#[test]
fn linux_6_1() {
    check(LinuxImage::fetch().expect("the guest's image"));
}

#[test]
fn linux_6_12() {
    check(LinuxImage::fetch_newer().expect("the guest's image"));
}
