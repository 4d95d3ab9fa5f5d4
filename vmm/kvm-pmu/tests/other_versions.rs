//! A VMM with other versions of the rust-vmm crates than this crate's compiles and runs.

use std::path::Path;
use std::process::{Command, Output};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/other-versions");

fn cargo(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO"))
        .args(arguments)
        .env(
            "CARGO_TARGET_DIR",
            Path::new(env!("CARGO_TARGET_TMPDIR")).join("other-versions"),
        )
        .current_dir(FOLDER)
        .output()
        .expect("cargo can be started")
}

fn told(run: &Output) -> String {
    let out = String::from_utf8_lossy(&run.stdout);
    format!(
        "{}: {out}{}",
        run.status,
        String::from_utf8_lossy(&run.stderr)
    )
}

/// It is a workspace of its own, with a lock file of its own. Packages that nothing else here
/// needs are brought once.
#[test]
fn a_vmm_with_other_versions_compiles_and_runs() {
    let name = "a_vmm_with_other_versions_compiles_and_runs";
    let there = |arguments: &[&str]| cargo(&[&["fetch", "--locked"], arguments].concat());
    if !there(&["--offline"]).status.success() {
        let fetched = there(&[]);
        if !fetched.status.success() {
            assert!(std::env::var_os("CI").is_none(), "{}", told(&fetched));
            println!(
                "skipped: {name}: its packages cannot be had: {}",
                told(&fetched)
            );
            return;
        }
    }
    let has_kvm = Path::new("/dev/kvm").exists();
    for version in ["ioctls-0-22", "ioctls-0-24"] {
        let how = if has_kvm { "run" } else { "build" };
        let options = ["--quiet", "--locked", "--offline", "--features", version];
        let run = cargo(&[&[how][..], &options].concat());
        let told = told(&run);
        assert!(run.status.success(), "{version}: {told}");
        if has_kvm {
            assert!(told.contains("counted and read"), "{version}: {told}");
        }
    }
    if !has_kvm {
        println!("skipped: {name}: it compiles, and this machine has no /dev/kvm");
    }
}
