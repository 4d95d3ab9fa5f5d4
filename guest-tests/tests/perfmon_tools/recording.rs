//! What `umpire record` does with its files: rights, a pipe, a delay, sizes, several of them.

use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use guest_tests::umpire::skipped_without_kvm;
use guest_tests::vm::{Vm, signal};
use serde_json::Value;

use super::boot;

fn told(output: &Output) -> String {
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{:?}: {told}", output.status);
    told
}

/// Records with these words into the VM's folder; what was said.
fn recorded(vm: &Vm, words: &[&str]) -> String {
    told(&vm.tool(&[&["record", "-c", "1000000"], words].concat()))
}

/// What `umpire report -j` says of a file that has to be whole.
fn report(vm: &Vm, file: &Path) -> Value {
    let file = file.display().to_string();
    let report: Value =
        serde_json::from_str(&vm.printed(&["report", "-j", "-i", &file])).expect("JSON");
    assert_eq!(report["complete"], true, "{report}");
    report
}

fn samples(report: &Value) -> u64 {
    report["totals"]["samples"].as_u64().expect("a number")
}

/// The files of the VM's folder whose names begin so.
fn files(vm: &Vm, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(vm.path(".")).expect("a folder");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
    names.retain(|name| name.starts_with(prefix));
    names.sort();
    names.iter().map(|name| vm.path(name)).collect()
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).expect("a file").mode() & 0o7777
}

#[test]
fn profiles_are_private_and_the_old_one_is_kept() {
    if skipped_without_kvm("profiles_are_private") {
        return;
    }
    let vm = boot(8, &[]);
    let profile = vm.path("p.data");
    std::fs::write(&profile, "before").expect("a file");
    std::fs::set_permissions(&profile, std::fs::Permissions::from_mode(0o666)).expect("rights");
    recorded(&vm, &["-o", "p.data", "--for", "100ms"]);
    assert_eq!(mode(&profile), 0o600);
    let old = vm.path("p.data.old");
    assert_eq!(std::fs::read_to_string(&old).expect("text"), "before");
    // What a report writes says the same of the guest.
    for (option, name) in [
        ("--flamegraph", "f.svg"),
        ("--firefox", "f.json"),
        ("--pprof", "f.pb.gz"),
        ("--perf-data", "f.perf"),
    ] {
        std::fs::write(vm.path(name), "before").expect("a file");
        let file = profile.display().to_string();
        let _ = vm.printed(&["report", "-i", &file, option, name]);
        assert_eq!(mode(&vm.path(name)), 0o600, "{option}");
    }
    assert_eq!(mode(&vm.path("f.perf.kallsyms")), 0o600);
    // A device is neither replaced nor kept.
    recorded(&vm, &["-o", "/dev/null", "--for", "100ms"]);
    assert!(!Path::new("/dev/null.old").exists());
    // What fails before anything is sampled leaves the profile alone.
    let failed = vm.tool(&["record", "-e", "nonsense", "-o", "p.data", "--for", "1s"]);
    assert_eq!(failed.status.code(), Some(2));
    assert!(samples(&report(&vm, &profile)) > 0);
}

#[test]
fn a_pipe_leads_to_the_report() {
    if skipped_without_kvm("a_pipe_leads_to_the_report") {
        return;
    }
    let vm = boot(8, &[]);
    let words = [
        "record",
        "-c",
        "1000000",
        "-o",
        "-",
        "--",
        "sh",
        "-c",
        "echo out; sleep 0.5",
    ];
    let mut recorder = vm
        .command(&words)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("umpire");
    let profile = recorder.stdout.take().expect("a pipe");
    let report = vm
        .command(&["report", "-j", "-i", "-"])
        .stdin(profile)
        .output();
    let report = report.expect("umpire");
    let told = told(&report);
    let report: Value = serde_json::from_slice(&report.stdout).expect("JSON");
    assert_eq!(report["complete"], true, "{told}");
    assert!(samples(&report) > 50, "{report}");
    let output = recorder.wait_with_output().expect("an end");
    let told = self::told(&output);
    // The command has its say, but not in the profile.
    assert!(told.contains("out\n"), "{told}");
    assert!(told.contains(" samples; standard output has "), "{told}");
    // Whoever has seen enough ends it.
    let mut recorder = vm
        .command(&["record", "-c", "1000000", "-o", "-", "--for", "60s"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("umpire");
    let mut some = [0; 4096];
    let mut pipe = recorder.stdout.take().expect("a pipe");
    pipe.read_exact(&mut some).expect("bytes");
    drop(pipe);
    let began = Instant::now();
    let output = recorder.wait_with_output().expect("an end");
    assert!(began.elapsed() < Duration::from_secs(20));
    assert!(self::told(&output).contains("nobody reads standard output"));
}

#[test]
fn a_delay_leaves_out_the_beginning() {
    if skipped_without_kvm("a_delay_leaves_out") {
        return;
    }
    let vm = boot(8, &[]);
    let began = Instant::now();
    let words = ["-D", "700", "-o", "d.data", "--for", "300ms"];
    recorded(&vm, &words);
    assert!(began.elapsed() >= Duration::from_secs(1));
    let late = report(&vm, &vm.path("d.data"));
    assert!(samples(&late) > 20, "{late}");
    let lines = vm.printed(&["script", "-j", "-i", "d.data"]);
    let times = lines.lines().filter_map(|line| {
        let line: Value = serde_json::from_str(line).expect("JSON");
        line["time_ns"].as_u64()
    });
    let last = times.max().unwrap_or(0);
    assert!(
        last < 650_000_000,
        "times count from the end of the delay: {last}"
    );
    // A command that is over before it.
    let told = recorded(&vm, &["-D", "60000", "-o", "n.data", "true"]);
    assert!(told.contains("before the delay"), "{told}");
    assert_eq!(samples(&report(&vm, &vm.path("n.data"))), 0);
}

#[test]
fn a_file_that_is_full_ends_it() {
    if skipped_without_kvm("a_file_that_is_full") {
        return;
    }
    let vm = boot(8, &[]);
    let began = Instant::now();
    let told = recorded(&vm, &["--max-size", "20K", "-o", "m.data", "--for", "50s"]);
    assert!(began.elapsed() < Duration::from_secs(30));
    assert!(told.contains("--max-size"), "{told}");
    report(&vm, &vm.path("m.data"));
    let size = std::fs::metadata(vm.path("m.data")).expect("a file").len();
    assert!((20 << 10..200 << 10).contains(&size), "{size}");
    let quiet = recorded(&vm, &["--max-size", "20K", "-q", "-o", "m.data"]);
    assert_eq!(quiet, "");
    let told = recorded(&vm, &["-v", "-o", "m.data", "--for", "100ms"]);
    assert!(told.contains("vCPU 0; sampled are cycles (PMD "), "{told}");
}

#[test]
fn each_of_several_files_is_whole() {
    if skipped_without_kvm("each_of_several_files") {
        return;
    }
    let vm = boot(8, &[]);
    // By size, of which the newest stay.
    let size = ["--switch-output=16K", "--switch-max-files", "3"];
    let told = recorded(&vm, &[&size[..], &["-o", "s.data", "--for", "2s"]].concat());
    let names = files(&vm, "s.data");
    assert_eq!(names.len(), 3, "{names:?}: {told}");
    assert!(told.lines().count() > 3, "{told}");
    for (number, name) in names.iter().enumerate() {
        let digits = name.to_string_lossy();
        let digits = digits.rsplit('.').next().expect("a time");
        assert!(
            digits.len() == 16 && digits.bytes().all(|byte| byte.is_ascii_digit()),
            "{digits}"
        );
        assert_eq!(mode(name), 0o600);
        let report = report(&vm, name);
        assert!(samples(&report) > 0 || number == 2, "{name:?}: {report}");
        assert_eq!(report["events"][0]["provenance"], "simulated", "{report}");
    }
    // By time: no sample is in two files, and none of them is lost.
    recorded(
        &vm,
        &["--switch-output=1s", "-o", "t.data", "--for", "2500ms"],
    );
    let names = files(&vm, "t.data");
    assert!((2..=4).contains(&names.len()), "{names:?}");
    let all: u64 = names.iter().map(|name| samples(&report(&vm, name))).sum();
    assert!(all > 500, "{all}");
    // By signal.
    let words = ["record", "-c", "1000000", "--switch-output", "-o", "u.data"];
    let mut recorder = vm
        .command(&words)
        .stderr(Stdio::piped())
        .spawn()
        .expect("umpire");
    let began = Instant::now();
    while files(&vm, "u.data").is_empty() {
        assert!(began.elapsed() < Duration::from_secs(20), "it begins");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(300));
    signal(&recorder, "-USR2");
    while files(&vm, "u.data").len() < 2 {
        assert!(began.elapsed() < Duration::from_secs(40), "it switches");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(300));
    signal(&recorder, "-INT");
    assert_eq!(recorder.wait().expect("an end").code(), Some(0));
    let names = files(&vm, "u.data");
    assert_eq!(names.len(), 2, "{names:?}");
    for name in names {
        assert!(samples(&report(&vm, &name)) > 0, "{name:?}");
    }
}

/// There is no Linux in this guest.
/// A recording into the VM's folder that has begun to write.
fn recording(vm: &Vm, file: &str, more: &[&str]) -> std::process::Child {
    let words = [&["record", "-c", "1000000", "-o", file], more].concat();
    let mut command = vm.command(&words);
    let recorder = command.stderr(Stdio::piped()).spawn().expect("umpire");
    let began = Instant::now();
    while !vm.path(file).exists() {
        assert!(began.elapsed() < Duration::from_secs(20), "it begins");
        std::thread::sleep(Duration::from_millis(20));
    }
    recorder
}

#[test]
fn nothing_is_lost_by_a_recording_that_fails() {
    if skipped_without_kvm("nothing_is_lost") {
        return;
    }
    let vm = boot(8, &[]);
    let (profile, old) = (vm.path("p.data"), vm.path("p.data.old"));
    std::fs::write(&profile, "good").expect("a file");
    std::fs::write(&old, "older").expect("a file");
    for _ in 0..2 {
        let output = vm.tool(&["record", "-o", "p.data", "/no/such/program"]);
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(files(&vm, "p.data"), [profile.clone(), old.clone()]);
        assert_eq!(std::fs::read_to_string(&profile).expect("text"), "good");
        assert_eq!(std::fs::read_to_string(&old).expect("text"), "older");
    }
    // A signal that begins no other file ends nothing.
    let recorder = recording(&vm, "u.data", &["--for", "1s"]);
    signal(&recorder, "-USR2");
    told(&recorder.wait_with_output().expect("an end"));
    assert!(samples(&report(&vm, &vm.path("u.data"))) > 0);
}

#[test]
fn a_file_of_somebody_else_is_no_recording() {
    if skipped_without_kvm("a_file_of_somebody_else") {
        return;
    }
    let vm = boot(8, &[]);
    for more in [&["--switch-output"][..], &[]] {
        let file = if more.is_empty() { "one" } else { "several" };
        let recorder = recording(&vm, file, more);
        std::fs::write(vm.path("other"), "foreign").expect("a file");
        std::fs::rename(vm.path("other"), vm.path(file)).expect("renamed");
        signal(&recorder, "-INT");
        let told = told(&recorder.wait_with_output().expect("an end"));
        assert!(told.contains("replaced by somebody else"), "{told}");
        let there = std::fs::read_to_string(vm.path(file)).expect("text");
        assert_eq!(there, "foreign");
        let [_, ours] = files(&vm, file).try_into().expect("two files");
        assert!(samples(&report(&vm, &ours)) > 0, "{told}");
        assert_eq!(mode(&ours), 0o600);
    }
}

#[test]
fn a_guest_without_processes_has_none_to_choose() {
    if skipped_without_kvm("a_guest_without_processes") {
        return;
    }
    let vm = boot(8, &[]);
    std::fs::write(vm.path("p.data"), "before").expect("a file");
    let output = vm.tool(&["record", "-p", "4711", "-o", "p.data", "--for", "300ms"]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("processes, which are not known: "), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    let kept = std::fs::read_to_string(vm.path("p.data"));
    assert_eq!(kept.expect("text"), "before", "nothing was written");
}
