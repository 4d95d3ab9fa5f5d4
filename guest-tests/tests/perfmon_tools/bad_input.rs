//! What the tools refuse: one line, status 2.

use std::process::{Command, Output};
use std::time::Duration;

use guest_tests::umpire::{self, skipped_without_kvm};
use guest_tests::vm::Vm;

use super::boot;

fn check(output: &Output, expected: &str) {
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains(expected), "'{expected}' is not in: {told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    assert!(output.stdout.is_empty());
}

fn without_vm(words: &[&str], expected: &str) {
    let mut command = Command::new(umpire::path());
    command.args(words).env_remove("UMPIRE_PERFMON");
    let nobodys = tempfile::tempdir().expect("a folder");
    command.env("XDG_RUNTIME_DIR", nobodys.path());
    check(&command.output().expect("umpire can be started"), expected);
}

#[test]
fn no_vm_is_named_or_there() {
    without_vm(&["stat", "--for", "1s"], "no VM is running");
    without_vm(&["record"], "no VM is running");
    without_vm(&["pcr"], "no VM is running");
    without_vm(&["stat", "--vm", "web1"], "there is no VM web1; none is");
    let none = "/nonexistent/vm.sock";
    without_vm(&["stat", "--control", none], "is the VM running");
    without_vm(&["ls", none], "is the VM running");
    without_vm(
        &["pcr", "revoke", "PMC1", "--control", none],
        "is the VM running",
    );
    without_vm(&["stat", "--control", "/dev/null"], "no VM can be reached");
}

#[test]
fn flags_that_make_no_sense() {
    without_vm(&["stat", "-e", "a,,b"], "comma");
    without_vm(&["stat", "-e", "{a"], "is not closed; add a }");
    without_vm(&["stat", "-r", "3"], "--for <TIME>|COMMAND|--timeout <MS>");
    for words in [&["stat", "--", "3s"][..], &["record", "500ms"]] {
        without_vm(words, "is no command; to look for a time, give --for ");
    }
    without_vm(&["stat", "--for", "1s", "true"], "cannot be used with");
    without_vm(
        &["stat", "--vm", "a", "--control", "b"],
        "cannot be used with",
    );
    without_vm(&["stat", "-I", "5"], "10..=3600000");
    without_vm(
        &["stat", "-M", "speed"],
        "'speed' is no metric; there are ipc (",
    );
    without_vm(&["stat", "--append"], "--output <FILE>|--log-fd <N>");
    without_vm(
        &["stat", "-e", "{a}:1"],
        "':1' behind a group are no modifiers",
    );
    without_vm(&["stat", "--for", "soon"], "'soon' is no time");
    without_vm(&["stat", "-a", "--vcpu", "1"], "cannot be used with");
    without_vm(&["pcr", "revoke"], "<COUNTER>");
    without_vm(&["pcr", "revoke", "PMC1", "--grace", "60001"], "0..=60000");
    without_vm(&["pcr", "bar", "user"], "firmware, hypervisor, kernel");
    without_vm(
        &["pcr", "scheme", "anarchy"],
        "single, independent, interacting",
    );
    without_vm(&["pcr", "policy"], "LAYER:KEY=N");
    without_vm(&["pcr", "policy", "kernel"], "kernel:min=2");
    without_vm(&["pcr", "policy", "kernel:min=33"], "0 to 32 counters");
    without_vm(&["pcr", "--vcpu", "3-1"], "neither a number nor a range");
    without_vm(&["record", "-c", "0"], "0 is not in");
    without_vm(&["record", "-c", "1", "-F", "1"], "cannot be used with");
    without_vm(&["record", "--vcpu", "3-1"], "neither a number nor a range");
    without_vm(
        &["record", "-F", "MAX"],
        "1 to 100000 samples a second, or max",
    );
    without_vm(&["record", "-D", "-1"], "which umpire record does not have");
    without_vm(&["record", "-D", "5-10"], "not ranges of time");
    without_vm(&["record", "--max-size", "3m"], "K, M or G behind it");
    without_vm(
        &["record", "--switch-output=5"],
        "give signal, a size with B",
    );
    without_vm(&["record", "--switch-max-files", "2"], "--switch-output");
    without_vm(&["record", "-p", "0"], "0 is not in");
    without_vm(&["record", "-p", "bash"], "'bash'");
    without_vm(&["record", "-q", "-v"], "cannot be used with");
}

#[test]
fn what_the_vm_does_not_have() {
    if skipped_without_kvm("what_the_vm_does_not_have") {
        return;
    }
    let vm = boot(2, &[]);
    let refused = |words: &[&str], expected: &str| check(&vm.tool(words), expected);
    refused(
        &["stat", "-e", "cycels", "--for", "1s"],
        "did you mean cycles",
    );
    refused(&["stat", "-e", "ring", "--for", "1s"], "umpire record");
    refused(
        &["stat", "--vcpu", "1", "--for", "1s"],
        "there is no vCPU 1",
    );
    refused(&["stat", "/no/such/program"], "'/no/such/program'");
    refused(
        &["stat", "--core", "0-9", "--for", "1s"],
        "there is no core 1",
    );
    refused(
        &["record", "-e", "vm-exits", "--for", "1s"],
        "umpire stat counts it",
    );
    refused(
        &["record", "-e", "loads", "--for", "1s"],
        "cannot be sampled",
    );
    refused(
        &["record", "-o", "/nonexistent/x", "--for", "1s"],
        "cannot be written",
    );
    refused(
        &[
            "record",
            "-e",
            "cycles,instructions,branches",
            "--for",
            "1s",
        ],
        "cannot be sampled",
    );
}

/// Groups and limits hold from the first connection on, root included.
#[test]
fn options_of_the_socket_limit_tools() {
    if skipped_without_kvm("options_of_the_socket") {
        return;
    }
    let limits = ["--control-sys-gid", "12345", "--control-buffers", "64"];
    let vm = boot(2, &limits);
    check(
        &vm.tool(&["record", "-a", "--for", "1s"]),
        "only members of group 12345 (cf_sys_gid)",
    );
    // Half of the memory for buffers is left to others.
    let mut child = vm.command(&["record"]).spawn().expect("umpire");
    std::thread::sleep(Duration::from_secs(1));
    let listed = vm.printed(&["ls"]);
    let _ = child.kill();
    let _ = child.wait();
    assert!(listed.contains(" 32 KiB "), "{listed}");
    let refused = |flags: &[&str], expected: &str| {
        let kernel = ["run", "--kernel", "/dev/null", "--control", "x.sock"];
        without_vm(&[&kernel[..], flags].concat(), expected);
    };
    refused(&["--control-arg-size", "100"], "4096");
    refused(&["--control-thread-gid", "4294967295"], "a group");
    refused(&["--control-buffers", "1"], "KiB");
}

/// `--preemptible` is recommended where it changes something, and nowhere else.
#[test]
fn a_hint_helps() {
    if skipped_without_kvm("a_hint_helps") {
        return;
    }
    const HINT: &str = "--preemptible";
    let told = |vm: &Vm, words: &[&str]| {
        let output = vm.tool(words);
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let three = "cycles,instructions,branches";
    // More events than counters.
    let vm = boot(2, &[]);
    let record = told(&vm, &["record", "-e", three, "--for", "1s"]);
    assert!(
        record.contains("cannot be sampled") && !record.contains(HINT),
        "{record}"
    );
    let group = format!("{{{three}}}");
    let stat = told(&vm, &["stat", "-e", &group, "--for", "100ms"]);
    assert!(
        stat.contains("no counters for") && !stat.contains(HINT),
        "{stat}"
    );
    // The vCPU has a context, as many as it may.
    let vm = boot(2, &["--contexts-per-vcpu", "1"]);
    let mut first = vm
        .command(&["record", "-o", "first.data"])
        .spawn()
        .expect("umpire");
    std::thread::sleep(Duration::from_secs(1));
    let record = told(&vm, &["record", "--for", "1s"]);
    let _ = first.kill();
    let _ = first.wait();
    assert!(
        record.contains("cannot be sampled") && !record.contains(HINT),
        "{record}"
    );
    // The counters are the guest's, which does not use them.
    let vm = boot(6, &["--host-policy", "guest-first"]);
    let record = told(&vm, &["record", "-e", three, "--for", "1s"]);
    assert!(
        record.contains("cannot be sampled") && record.contains(HINT),
        "{record}"
    );
    let stat = told(&vm, &["stat", "-e", three, "--for", "100ms"]);
    assert!(
        stat.contains("no counters for") && stat.contains(HINT),
        "{stat}"
    );
    let record = told(&vm, &["record", "-e", three, HINT, "--for", "100ms"]);
    assert!(record.contains(" samples;"), "{record}");
}
