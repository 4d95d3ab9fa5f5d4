//! The `umpire` program beside the running test.

use std::path::PathBuf;

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

/// Says why `test` is skipped where `/dev/kvm` is missing, and whether it is.
/// In L1 it must be there, so there nothing is skipped.
#[must_use]
pub fn skipped_without_kvm(test: &str) -> bool {
    let missing = !std::path::Path::new("/dev/kvm").exists() && !crate::l1::inside();
    if missing {
        println!("skipped: {test}: this machine has no /dev/kvm");
    }
    missing
}
