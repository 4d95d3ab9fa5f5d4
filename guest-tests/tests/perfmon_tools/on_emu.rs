//! Tools beside a guest on the processor in software: what they show is what its loop does.

use std::process::Stdio;
use std::time::Duration;

use guest_tests::micro::Written;
use guest_tests::umpire;
use guest_tests::vm::Vm;
use iced_x86::code_asm::{CodeAssembler, qword_ptr, rax, rcx};
use serde_json::Value;

use super::counts::{count, rows};

/// RAM that nothing else of the guest is in.
const MEMORY: u64 = 0x180_0000;
/// Instructions of a turn of the loop; one of each is a load, a store and a branch.
const TURN: f64 = 4.0;
const EVENTS: &str = "{instructions,branches,loads,stores}";
/// Instructions between two samples.
const PERIOD: &str = "1000003";

fn turns(a: &mut CodeAssembler) -> Written {
    let mut turn = a.create_label();
    a.mov(rax, MEMORY)?;
    a.set_label(&mut turn)?;
    a.mov(rcx, qword_ptr(rax))?;
    a.inc(rcx)?;
    a.mov(qword_ptr(rax), rcx)?;
    a.jmp(turn)
}

fn boot(flags: &[&str]) -> Vm {
    Vm::boot_counting(&umpire::path(), flags, turns)
}

/// Begun and ended anywhere in a turn, and to the instruction between the two. Gives how many: on
/// a busy host a guest may not run for some tenths of a second.
fn check(found: &[Value]) -> f64 {
    let instructions = count(found, "instructions");
    for event in ["branches", "loads", "stores"] {
        let off = instructions - TURN * count(found, event);
        assert!(off.abs() < TURN, "{event} is off by {off}: {found:?}");
    }
    for row in found {
        // AMD's events of loads and stores are not quite these.
        let exact = row["provenance"] == "exact";
        let known = exact || row["provenance"] == "derived" && row["event"] != "instructions";
        assert!(known, "{row}");
    }
    instructions
}

/// All that these rows of `stat` count, four an interval.
fn check_all(printed: &str) {
    let found = rows(printed);
    let counted: f64 = found.chunks(4).map(check).sum();
    assert!(counted > 10_000.0, "{found:?}");
}

#[test]
fn counts_are_those_of_the_loop() {
    let vm = boot(&[]);
    check_all(&vm.printed(&["stat", "-j", "-e", EVENTS, "--for", "1s"]));
    // Each interval by itself.
    let words = ["stat", "-j", "-I", "100", "-e", EVENTS, "--for", "1s"];
    check_all(&vm.printed(&words));
}

/// It takes and leaves counters while the other counts, and neither loses an instruction.
#[test]
fn a_second_tool_changes_nothing() {
    let vm = boot(&[]);
    let words = |time| ["stat", "--log-fd", "1", "-j", "-e", EVENTS, "--for", time];
    let mut command = vm.command(&words("2s"));
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let long = command.spawn().expect("umpire can be started");
    std::thread::sleep(Duration::from_millis(300));
    for _ in 0..3 {
        check(&rows(&vm.printed(&words("100ms"))));
    }
    let output = long.wait_with_output().expect("an end");
    assert!(output.status.success());
    check_all(&String::from_utf8_lossy(&output.stdout));
}

/// A sample at each overflow, and each in the loop.
#[test]
fn each_sample_is_in_the_loop() {
    let vm = boot(&[]);
    let words = ["record", "-e", "instructions", "-c", PERIOD];
    let words = [&words[..], &["-o", "a.data", "--for", "1s"]].concat();
    let output = vm.tool(&words);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{told}");
    // The first instruction of the kernel is before the loop.
    std::fs::write(
        vm.path("System.map"),
        "0000000000100040 T before\n000000000010004a T within\n0000000000100060 T behind\n",
    )
    .expect("a file");
    let map = vm.path("System.map").display().to_string();
    let text = vm.printed(&["report", "-j", "-i", "a.data", "--symbols", &map]);
    let report: Value = serde_json::from_str(&text).expect("JSON");
    let samples = report["totals"]["samples"].as_u64();
    assert!(samples.is_some_and(|samples| samples > 5), "{report}");
    assert!(text.contains("within"), "{text}");
    for other in ["before", "behind"] {
        assert!(!text.contains(other), "{text}");
    }
}
