//! Tiny kernels of our own through the real `umpire run`, on KVM, or with
//! `UMPIRE_TEST_ENGINE=emu` on the processor in software.

mod boot;
mod ends;
mod engines;
mod firmware;
mod machine;
mod pmu;
mod profile;
mod reservations;
mod state;

use std::process::{Command, Output, Stdio};

use guest_tests::kernel::Kernel;
use guest_tests::umpire;

/// `umpire run` with `kernel` and `flags`, for 30 seconds at most. Cycles are counted on either
/// engine.
fn run_command(kernel: &Kernel, flags: &[&str]) -> Command {
    let mut command = Command::new(umpire::path());
    command.args(["run", "--memory", "32"]);
    let engine: &[&str] = if umpire::on_emu() {
        &["--engine", "emu", "--cycles", "simulated"]
    } else {
        &["--engine", "kvm"]
    };
    command.args(engine);
    if !flags.contains(&"--timeout") {
        command.args(["--timeout", "30"]);
    }
    command.args(flags).arg("--kernel").arg(kernel.path());
    command.stdin(Stdio::null());
    command
}

/// Runs `kernel` to its end.
fn run(kernel: &Kernel, flags: &[&str]) -> Output {
    let output = run_command(kernel, flags).output();
    output.expect("umpire can be started")
}

/// Runs `kernel`, which has to print `expected` and to end with `status`.
fn check(kernel: &Kernel, flags: &[&str], expected: &str, status: i32) {
    let output = run(kernel, flags);
    let told = String::from_utf8_lossy(&output.stderr);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(printed, expected, "{flags:?}: {told}");
    assert_eq!(output.status.code(), Some(status), "{flags:?}: {told}");
}
