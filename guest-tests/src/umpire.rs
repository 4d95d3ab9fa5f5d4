//! The `umpire` program beside the running test, and what this machine lacks for a test of it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of programs that are built with the profile of the running test.
fn beside() -> PathBuf {
    let test = std::env::current_exe().expect("a running test has a file");
    // Tests lie in `deps`, binaries one level above.
    let folder = test
        .ancestors()
        .skip(1)
        .find(|folder| !folder.ends_with("deps") && !folder.ends_with("examples"));
    folder.expect("a folder above the test").to_owned()
}

/// What cargo calls the profile whose programs are in this folder.
fn name_of(folder: &Path) -> &str {
    match folder.file_name().and_then(|name| name.to_str()) {
        None | Some("debug") => "dev",
        Some(name) => name,
    }
}

/// Path of `umpire`, built with the same profile as the running test.
///
/// # Panics
/// If it was not built, with the command that builds it.
#[must_use]
pub fn path() -> PathBuf {
    let path = beside().join("umpire");
    assert!(
        path.exists(),
        "{} is missing; build it with: cargo build -p umpire",
        path.display()
    );
    path
}

/// Copies a program that the test is going to start. Another process writes it: what this one has
/// open for writing is inherited by whatever a test beside starts just then, and the kernel starts
/// no program that somebody has open so (`ETXTBSY`).
///
/// # Panics
/// If it is not copied.
pub fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg(from).arg(to).status();
    let copied = copied.is_ok_and(|status| status.success());
    assert!(copied, "{} is not copied", from.display());
}

/// Builds a package with the same profile, beside `umpire`: a library for C, which cargo does
/// not build for tests, as nothing in Rust links it. The folder. Where `UMPIRE_TESTS_BUILT` says
/// that one build has made all that the tests use (`test.sh`), it is there: by itself a package is
/// built with other features of what it depends on, and so all that once more.
///
/// # Panics
/// There is no cargo, or it does not build.
#[must_use]
pub fn built_beside(package: &str) -> PathBuf {
    let profile = beside();
    if std::env::var_os("UMPIRE_TESTS_BUILT").is_some() {
        return profile;
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", package]);
    cargo.arg("--target-dir");
    cargo.arg(profile.parent().expect("the target folder"));
    cargo.args(["--profile", name_of(&profile)]);
    let built = cargo.status().expect("cargo");
    assert!(built.success(), "the library does not build");
    profile
}

/// Builds `umpire-agent` for guests, static, with the same profile, beside `umpire`. The file.
///
/// # Panics
/// There is no cargo, or it does not build.
#[must_use]
pub fn agent() -> PathBuf {
    let profile = beside();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["rustc", "--quiet", "--package", "umpire-agent", "--bin"]);
    cargo.args(["umpire-agent", "--target-dir"]);
    cargo.arg(profile.parent().expect("the target folder"));
    cargo.args(["--profile", name_of(&profile)]);
    cargo.args(["--", "-C", "target-feature=+crt-static"]);
    assert!(
        cargo.status().expect("cargo").success(),
        "it does not build"
    );
    profile.join("umpire-agent")
}

/// Whether guests of suites that run on either engine are to run on the processor in software:
/// `test.sh` runs these twice.
#[must_use]
pub fn on_emu() -> bool {
    std::env::var_os("UMPIRE_TEST_ENGINE").is_some_and(|engine| engine == "emu")
}

/// Whether `test` is skipped because `/dev/kvm` is missing; prints the reason.
/// In L1 it must be there, so there nothing is skipped.
#[must_use]
pub fn skipped_without_kvm(test: &str) -> bool {
    if on_emu() {
        return false;
    }
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
