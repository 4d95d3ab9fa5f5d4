//! What a live guest leads to: rows of tools, files, and their shapes.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use guest_tests::kernel::{Kernel, Protocol, spin_forever};
use guest_tests::umpire::skipped_without_kvm;

use super::shape::{shape, shapes_of_lines, without_numbers};
use super::{check, program};

const RATES: &str = "counters = 12\n\
    [event.cycles]\nrate = 2000\n\
    [event.instructions]\nrate = 500\n\
    [event.branches]\nrate = 100\n";

/// Ends the guest when it goes.
struct Guest(Child);

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn boot(folder: &Path) -> Guest {
    let rates = folder.join("rates.toml");
    std::fs::write(&rates, RATES).expect("a file");
    let kernel = Kernel::new(Protocol::Linux64, |a, _| spin_forever(a)).expect("a kernel");
    let image = folder.join("kernel");
    std::fs::copy(kernel.path(), &image).expect("a copy");
    let child = Command::new(program())
        .current_dir(folder)
        .args([
            "run",
            "--memory",
            "32",
            "--timeout",
            "60",
            "--pmu",
            "amd-core",
        ])
        .args(["--cpu-vendor", "amd", "--counters", "sim=rates.toml"])
        .args(["--kernel", "kernel", "--control", "vm.sock"])
        .args(["--audit", "audit.json", "--save-on-exit", "state.json"])
        .args(["--host-policy", "host-first", "--hypervisor-counters", "1"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("umpire can be started");
    let guest = Guest(child);
    let began = Instant::now();
    while !tool(folder, &["ls", "vm.sock"]).1 {
        assert!(began.elapsed() < Duration::from_secs(20), "no socket");
        std::thread::sleep(Duration::from_millis(20));
    }
    guest
}

/// What a tool prints, and whether it ends well.
fn tool(folder: &Path, words: &[&str]) -> (String, bool) {
    let output = Command::new(program())
        .args(words)
        .current_dir(folder)
        .env("UMPIRE_PERFMON", "vm.sock")
        .env_remove("XDG_RUNTIME_DIR")
        .output()
        .expect("umpire can be started");
    if !output.status.success() {
        // Shown if the test fails.
        eprintln!("{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8(output.stdout).expect("text");
    (text, output.status.success())
}

fn printed(folder: &Path, words: &[&str]) -> String {
    let (text, good) = tool(folder, words);
    assert!(good, "{words:?} failed");
    text
}

/// Words of rows that a tool's reader looks for.
const WORDS: [&str; 8] = [
    "event",
    "unit",
    "metric-unit",
    "provenance",
    "decision",
    "layer",
    "backend",
    "kind",
];

#[test]
fn what_a_live_guest_leads_to_has_its_shape() {
    if skipped_without_kvm("what_a_live_guest_leads_to_has_its_shape") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let mut guest = boot(folder);
    let events = "cycles,{instructions,branches},vm-exits,branch-misses";
    let stat = |more: &[&str]| {
        let words = [&["stat", "-e", events], more, &["--", "200ms"]].concat();
        printed(folder, &words)
    };
    check("stat.shape", &shapes_of_lines(&stat(&["-j"]), &WORDS));
    check(
        "stat-per-vcpu.shape",
        &shapes_of_lines(&stat(&["-j", "--per-vcpu"]), &WORDS),
    );
    check(
        "stat-repeat.shape",
        &shapes_of_lines(&stat(&["-j", "-r", "2"]), &WORDS),
    );
    check("stat.csv", &without_numbers(&stat(&["-x", ";"])));
    check(
        "stat-repeat.csv",
        &without_numbers(&stat(&["-x", ",", "-r", "2", "-a"])),
    );
    check(
        "ls.shape",
        &shapes_of_lines(&printed(folder, &["ls", "-j"]), &WORDS),
    );
    printed(
        folder,
        &[
            "record",
            "-c",
            "1000000",
            "-e",
            "cycles,branches",
            "-o",
            "a.data",
            "--",
            "300ms",
        ],
    );
    let script = printed(folder, &["script", "-i", "a.data", "-j"]);
    check("script.shape", &shapes_of_lines(&script, &WORDS));
    let pid = guest.0.id().to_string();
    let sent = Command::new("kill").args(["-INT", &pid]).status();
    assert!(sent.is_ok_and(|status| status.success()));
    let _ = guest.0.wait();
    let read = |name| std::fs::read_to_string(folder.join(name)).expect("a file of the guest");
    check("audit.shape", &shapes_of_lines(&read("audit.json"), &WORDS));
    let state = serde_json::from_str(&read("state.json")).expect("JSON");
    check("state.shape", &format!("{}\n", shape(&state, &[])));
}
