//! The example of a VMM that embeds the crate runs a guest to its end, with every
//! count there.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Beside the test's own folder; `cargo test` builds examples before it.
fn example() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    profile.join("examples/minimal_vmm")
}

#[test]
fn a_guest_of_another_vmm_counts_overflows_and_reads() {
    if !Path::new("/dev/kvm").exists() {
        println!(
            "skipped: a_guest_of_another_vmm_counts_overflows_and_reads: this machine has no /dev/kvm"
        );
        return;
    }
    // It ends itself when the guest does not.
    let run = Command::new(example()).output();
    let run = run.expect("the example is built: `cargo test -p kvm-pmu`, without --test");
    let out = String::from_utf8_lossy(&run.stdout);
    let err = String::from_utf8_lossy(&run.stderr);
    println!("{out}{err}");
    assert!(run.status.success(), "{}: {out}{err}", run.status);
    assert!(out.contains("cycles by RDPMC"), "{out}");
}
