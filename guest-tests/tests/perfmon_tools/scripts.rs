//! What people wrote for `perf` works with `umpire` in its place.

use std::process::Command;

use guest_tests::umpire::{self, skipped_without_kvm};
use inferno::collapse::Collapse;
use inferno::collapse::perf::Folder;

use super::boot;

/// A script that knows nothing of VMs: the environment names the VM and the program.
#[test]
fn a_script_for_perf_runs_with_umpire() {
    if skipped_without_kvm("a_script_for_perf_runs_with_umpire") {
        return;
    }
    let vm = boot(8, &[]);
    let folder = vm.path("bench");
    std::fs::create_dir(&folder).expect("a folder");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/perfmon_tools/bench.sh");
    let run = Command::new("timeout")
        .args(["60", "sh", script])
        .arg(&folder)
        .args(["sh", "-c", "echo the command; sleep 1"])
        .env("PERF", umpire::path())
        .env("UMPIRE_PERFMON", vm.socket())
        .output()
        .expect("timeout and sh can be run");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (said, told) = (text(&run.stdout), text(&run.stderr));
    assert_eq!(run.status.code(), Some(0), "{said}{told}");
    // Four cycles an instruction are declared.
    for wanted in ["ipc 0.25\n", "intervals "] {
        assert!(said.contains(wanted), "no {wanted:?}: {said}{told}");
    }
    // The guest is a loop of two instructions without names, a row each.
    let hottest = said.lines().find_map(|line| line.strip_prefix("hottest "));
    let hottest: f64 = hottest
        .and_then(|percent| percent.strip_suffix('%')?.parse().ok())
        .unwrap_or_else(|| panic!("no percentage: {said}{told}"));
    assert!((30.0..=100.0).contains(&hottest), "{said}");
    let file = |name: &str| std::fs::read_to_string(folder.join(name)).expect(name);
    assert_eq!(file("said"), "the command\n");
    // Another program's reader of perf script's text.
    let (stacks, mut folded) = (file("stacks.txt"), Vec::new());
    let collapsed = Folder::default().collapse(stacks.as_bytes(), &mut folded);
    collapsed.expect("stacks of perf script");
    let folded = text(&folded);
    let weights = folded.lines().map(|line| {
        let weight = line
            .rsplit_once(' ')
            .and_then(|(_, weight)| weight.parse::<u64>().ok());
        weight.unwrap_or_else(|| panic!("no weight: {line}"))
    });
    // It weighs samples by their periods, which stand in front of the event.
    let periods = stacks.lines().filter_map(|line| {
        let (before, _) = line.split_once(" cycles:")?;
        before.split_whitespace().last()?.parse().ok()
    });
    let (weights, periods): (u64, Vec<u64>) = (weights.sum(), periods.collect());
    assert!(periods.len() > 10, "{stacks}");
    assert_eq!(weights, periods.iter().sum::<u64>(), "{folded}{stacks}");
}
