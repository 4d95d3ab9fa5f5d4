//! `umpire record`, and what `umpire report` and `ls` make of it.

use std::time::{Duration, Instant};

use guest_tests::umpire::{self, skipped_without_kvm};
use guest_tests::vm::{Vm, signal};
use serde_json::Value;

use super::{boot, boot_idle};

/// Records into a file with these flags, and what `umpire report -j` and the
/// recording say of it.
fn recorded(vm: &Vm, flags: &[&str]) -> (Value, String) {
    let file = vm.path("umpire.data").display().to_string();
    let words = [&["record", "-o", &file], flags].concat();
    let output = vm.tool(&words);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{told}");
    // The loop is the first instruction of the kernel.
    let map = vm.path("System.map");
    let symbols = "0000000000100040 T hot_loop\n0000000000100080 T behind_it\n";
    std::fs::write(&map, symbols).expect("a file");
    let map = map.display().to_string();
    let text = vm.printed(&["report", "-j", "-i", &file, "--symbols", &map]);
    (serde_json::from_str(&text).expect("JSON"), told)
}

fn samples(report: &Value) -> u64 {
    let samples = report["totals"]["samples"].as_u64();
    samples.unwrap_or_else(|| panic!("samples in {report}"))
}

#[test]
fn a_report_has_the_hot_symbol() {
    if skipped_without_kvm("a_report_has") {
        return;
    }
    let vm = boot(8, &[]);
    let flags = ["-e", "cycles", "-c", "2000000", "--for", "1s"];
    let (report, told) = recorded(&vm, &flags);
    let text = report.to_string();
    assert!(text.contains("hot_loop"), "{text}");
    assert!(!text.contains("behind_it"), "{text}");
    assert!(text.contains("simulated"), "{text}");
    assert!(told.contains(" samples"), "{told}");
    // 1000 a second of the guest's time.
    let count = samples(&report);
    assert!((50..1200).contains(&count), "{count} samples");
}

#[test]
fn a_frequency_is_found() {
    if skipped_without_kvm("a_frequency_is_found") {
        return;
    }
    let vm = boot(8, &[]);
    let flags = [
        "-e",
        "instructions,branches",
        "-F",
        "200",
        "-a",
        "--for",
        "2s",
    ];
    let (report, told) = recorded(&vm, &flags);
    let count = samples(&report);
    assert!((100..1300).contains(&count), "{count} samples: {told}");
    assert!(report.to_string().contains("branches"), "{report}");
}

/// A frequency is one of the vCPUs' time, so where they only halt, or were never
/// started, there is next to nothing to sample: looking at counters must not make
/// samples of its own.
#[test]
fn idle_cores_are_not_sampled() {
    if skipped_without_kvm("idle_cores_are_not_sampled") {
        return;
    }
    for flags in [&["--cpus", "2"][..], &["--cpus", "2", "--cores", "1"]] {
        let vm = boot_idle(8, flags);
        let words = ["-e", "cycles", "-F", "1000", "-a", "--for", "2s"];
        let (report, told) = recorded(&vm, &words);
        // Kicks take some of its time.
        let count = samples(&report);
        assert!(count < 400, "{flags:?}: {count} samples: {told}");
        let file = vm.path("umpire.data").display().to_string();
        let samples = vm.printed(&["script", "-i", &file, "-F", "ip"]);
        let reset = samples.lines().filter(|line| line.trim() == "fff0");
        assert_eq!(
            reset.count(),
            0,
            "{flags:?}: a processor that was never started"
        );
    }
}

#[test]
fn ls_shows_what_is_halted_reserved_and_free() {
    if skipped_without_kvm("ls_shows_what_is_halted") {
        return;
    }
    for (flags, core) in [(&[][..], "1"), (&["--cores", "1"], "0")] {
        let flags = [&["--cpus", "2", "--hypervisor-counters", "1"], flags].concat();
        let vm = boot_idle(8, &flags);
        // Its socket is there before the guest has come to its HLT.
        let until = Instant::now() + Duration::from_secs(10);
        let listed = loop {
            let listed = vm.printed(&["ls", "--control", &vm.socket()]);
            if listed.contains(" halted ") || Instant::now() > until {
                break listed;
            }
        };
        let rows: Vec<Vec<&str>> = listed
            .lines()
            .map(|row| row.split_whitespace().collect())
            .collect();
        let row = |wanted: &[&str]| rows.iter().any(|row| row.starts_with(wanted));
        assert!(
            row(&["0", "halted", "0", "-", "PMC5:", "hypervisor"]),
            "{listed}"
        );
        assert!(row(&["1", "offline", core, "-"]), "{listed}");
        assert!(listed.contains(" 8 free"), "{listed}");
        let formats = "Sampling formats: default=4d72bec0-0664-4143-82b4-d3fd27243c97, ";
        assert!(listed.contains(formats), "{listed}");
        let json: Value = serde_json::from_str(&vm.printed(&["ls", "-j"])).expect("JSON");
        assert_eq!(json["machine"]["vcpus"][0]["state"], "running", "as before");
        assert_eq!(json["machine"]["vcpus"][0]["halted"], true);
    }
}

#[test]
fn ls_counts_the_fixed_counters_that_there_are() {
    if skipped_without_kvm("ls_counts_the_fixed_counters_that_there_are") {
        return;
    }
    // Nothing counts instructions, so a guest of version 5 has no fixed counter 0.
    let rates = "counters = 8\n[event.cycles]\nrate = 2000\n[event.ref-cycles]\nrate = 1000\n";
    let flags = ["--pmu", "intel-v5", "--cpu-vendor", "intel"];
    let vm = Vm::boot(&umpire::path(), rates, &flags);
    let listed = vm.printed(&["ls"]);
    assert!(
        listed.contains("PMU intel-v5: 8 programmable and 2 fixed counters of 48 bits"),
        "{listed}"
    );
    let json: Value = serde_json::from_str(&vm.printed(&["ls", "-j"])).expect("JSON");
    assert_eq!(json["model"]["fixed"], 2);
    assert_eq!(json["model"]["fixed_map"], 0b110);
    // Tools know which two these are.
    let words = [
        "stat",
        "-j",
        "-e",
        "ref-cycles,instructions",
        "--for",
        "200ms",
    ];
    let counted = vm.printed(&words);
    let rows: Vec<Value> = counted
        .lines()
        .map(|row| serde_json::from_str(row).expect("JSON"))
        .collect();
    let value = |row: &Value| row["counter-value"].as_str().map(str::to_owned);
    let values: Vec<_> = rows.iter().filter_map(value).collect();
    assert!(
        values[0].parse::<f64>().is_ok_and(|it| it > 0.0),
        "{counted}"
    );
    assert_eq!(values[1], "<not supported>", "{counted}");
}

#[test]
fn ctrl_c_leaves_a_whole_file() {
    if skipped_without_kvm("ctrl_c_leaves") {
        return;
    }
    let vm = boot(8, &[]);
    let file = vm.path("umpire.data").display().to_string();
    let words = ["record", "-c", "5000000", "--random", "8", "-o", &file];
    let mut child = vm.command(&words).spawn().expect("umpire can be started");
    std::thread::sleep(Duration::from_millis(1500));
    let listed = vm.printed(&["ls"]);
    let context = listed.lines().find(|line| line.contains(" compact "));
    let context = context.unwrap_or_else(|| panic!("a context in {listed}"));
    assert!(context.contains("vCPU 0"), "{context}");
    assert!(context.contains(&child.id().to_string()), "{context}");
    signal(&child, "-INT");
    assert_eq!(child.wait().expect("an end").code(), Some(0));
    let output = vm.tool(&["script", "-i", &file]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && told.is_empty(), "{told}");
    assert!(!output.stdout.is_empty());
    let json: Value = serde_json::from_str(&vm.printed(&["ls", "-j"])).expect("JSON");
    assert_eq!(json["machine"]["contexts"], Value::Array(Vec::new()));
}
