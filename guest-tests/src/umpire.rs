//! The `umpire` program beside the running test, and what this machine lacks for a test of it.

use std::path::PathBuf;
use std::process::Command;

/// Path of `umpire`, built with the same profile as the running test.
///
/// # Panics
/// If it was not built, with the command that builds it.
#[must_use]
pub fn path() -> PathBuf {
    let test = std::env::current_exe().expect("a running test has a file");
    // Tests lie in `deps`, binaries one level above.
    let folder = test
        .ancestors()
        .skip(1)
        .find(|folder| !folder.ends_with("deps") && !folder.ends_with("examples"));
    let path = folder.expect("a folder above the test").join("umpire");
    assert!(
        path.exists(),
        "{} is missing; build it with: cargo build -p umpire",
        path.display()
    );
    path
}

/// Builds a package with the same profile, beside `umpire`: a library for C, which cargo does
/// not build for tests, as nothing in Rust links it. The folder.
///
/// # Panics
/// There is no cargo, or it does not build.
#[must_use]
pub fn built_beside(package: &str) -> PathBuf {
    let umpire = path();
    let profile = umpire.parent().expect("a profile's folder");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", package]);
    cargo.arg("--target-dir");
    cargo.arg(profile.parent().expect("the target folder"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    let built = cargo.status().expect("cargo");
    assert!(built.success(), "the library does not build");
    profile.to_owned()
}

/// Builds `umpire-agent` for guests, static, with the same profile, beside `umpire`. The file.
///
/// # Panics
/// There is no cargo, or it does not build.
#[must_use]
pub fn agent() -> PathBuf {
    let umpire = path();
    let profile = umpire.parent().expect("a profile's folder");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["rustc", "--quiet", "--package", "umpire-agent", "--bin"]);
    cargo.args(["umpire-agent", "--target-dir"]);
    cargo.arg(profile.parent().expect("the target folder"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    cargo.args(["--", "-C", "target-feature=+crt-static"]);
    assert!(
        cargo.status().expect("cargo").success(),
        "it does not build"
    );
    profile.join("umpire-agent")
}

/// Whether `test` is skipped because `/dev/kvm` is missing; prints the reason.
/// In L1 it must be there, so there nothing is skipped.
#[must_use]
pub fn skipped_without_kvm(test: &str) -> bool {
    let missing = !std::path::Path::new("/dev/kvm").exists() && !crate::l1::inside();
    if missing {
        println!("skipped: {test}: this machine has no /dev/kvm");
    }
    missing
}

/// Whether `test` is skipped because the firmware could not be built; prints
/// the reason.
#[must_use]
pub fn skipped_without_firmware(test: &str) -> bool {
    let missing = firmware::image().is_none();
    if missing {
        println!(
            "skipped: {test}: the Rust target x86_64-unknown-none is missing; run \
             `rustup target add x86_64-unknown-none`"
        );
    }
    missing
}
