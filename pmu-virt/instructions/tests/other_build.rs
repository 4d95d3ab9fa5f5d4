//! In somebody else's build another crate may take instructions from the decoder that all share.

use std::path::Path;
use std::process::Command;

use instruction_facts::Encoding;

#[test]
fn this_build_has_all_but_xop() {
    let there = [Encoding::Vex, Encoding::Evex, Encoding::Xop].map(Encoding::is_decoded);
    assert_eq!(there, [true, true, false]);
}

/// It is a workspace of its own, with a lock file of its own: features are those of a build.
#[test]
fn what_another_build_lacks_is_seen() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/other-build");
    let build = Command::new(env!("CARGO"))
        .args(["run", "--quiet", "--locked", "--offline"])
        .args(["--features", "no_vex,no_evex"])
        .arg("--target-dir")
        .arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("other-build"))
        .current_dir(folder)
        .output()
        .expect("cargo can be started");
    let told = String::from_utf8_lossy(&build.stderr);
    assert!(build.status.success(), "{told}");
    let out = String::from_utf8_lossy(&build.stdout);
    assert_eq!(out, "Vex false\nEvex false\nXop false\n", "{told}");
}
