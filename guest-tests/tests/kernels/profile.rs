//! Profiles of guests on the engine emu: their times are virtual, from the first sample on.

use std::path::Path;
use std::process::{Command, Stdio};

use guest_tests::kernel::{Kernel, Protocol, exit};
use guest_tests::umpire;
use iced_x86::code_asm::ecx;
use serde_json::Value;

/// Times that the kernel goes round, of two instructions each.
const ROUNDS: u32 = 30_000_000;
/// A tick is an instruction and a nanosecond.
const LOOP_NS: u64 = 2 * ROUNDS as u64;

/// Runs `umpire` with `words`; what it has printed, and what it has noted.
fn told(folder: &Path, words: &[&str]) -> (String, String) {
    let mut command = Command::new(umpire::path());
    command.args(words).stdin(Stdio::null());
    // There is the control socket.
    command.env("XDG_RUNTIME_DIR", folder);
    let output = command.output().expect("umpire can be started");
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn times_of_a_profile_are_those_of_the_guest() {
    let kernel = Kernel::new(Protocol::Multiboot, |a, _| {
        let mut again = a.create_label();
        a.mov(ecx, ROUNDS)?;
        a.set_label(&mut again)?;
        a.dec(ecx)?;
        a.jne(again)?;
        exit(a, 0)
    });
    let kernel = kernel.expect("a kernel");
    let image = kernel.path();
    let image = image.to_str().expect("a name");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("profile");
    let file = file.to_str().expect("a name");
    let run = ["run", "--engine", "emu", "--seed", "1", "--timeout", "60"];
    let what = ["--record", file, "--kernel", image];
    let (_, noted) = told(folder.path(), &[&run[..], &what].concat());
    // Nobody counts cycles there, and it is said what is sampled instead.
    assert!(noted.contains("instructions are sampled"), "{noted}");

    let (report, error) = told(folder.path(), &["report", "-i", file, "-j"]);
    let report: Value = serde_json::from_str(&report).expect(&error);
    assert_eq!(report["header"]["virtual_time"], true, "{report}");
    let duration = report["duration_ns"].as_u64().expect("a duration");
    let (text, _) = told(folder.path(), &["report", "-i", file]);
    assert!(text.contains(" s of virtual time by umpire"), "{text}");

    let (script, noted) = told(folder.path(), &["script", "-i", file, "-j"]);
    assert!(noted.contains("times are virtual"), "{noted}");
    let lines = script.lines().map(serde_json::from_str::<Value>);
    let samples = lines.map(|line| line.expect("JSON"));
    let samples = samples.filter(|line| line["kind"] == "sample");
    let time = |line: Value| line["time_ns"].as_u64().expect("a time");
    let times: Vec<u64> = samples.map(time).collect();
    assert!(times.len() > 1, "{script}");
    assert!(times.is_sorted_by(|one, next| one < next), "{times:?}");
    let last = times.last().copied().unwrap_or(0);
    assert!(last <= duration, "{last} of {duration}");
    // Whatever the host needs for it.
    let sane = LOOP_NS / 2..LOOP_NS * 2;
    assert!(sane.contains(&last), "the last at {last} ns of {LOOP_NS}");
    assert!(sane.contains(&duration), "{duration} ns for {LOOP_NS}");
}
