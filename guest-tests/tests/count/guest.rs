//! What programs find in the guest: their files, their output, their end.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::{Count, Counted};

fn shell(here: &Path, options: &[&str], script: &str) -> Counted {
    Count::new(here).options(options).run(&["sh", "-c", script])
}

fn output(counted: &Counted) -> String {
    String::from_utf8_lossy(&counted.output.stdout).into_owned()
}

#[test]
fn output_goes_both_ways_and_may_be_opened_anew() {
    let folder = tempfile::tempdir().expect("a folder");
    let script = "seq 1 30000 | tee /dev/stderr | md5sum; seq 1 30000 | md5sum";
    let counted = shell(folder.path(), &[], script);
    counted.ends(0, "program 0").says(&["\n30000\n"]);
    let output = output(&counted);
    let sums: Vec<_> = output.lines().collect();
    assert!(matches!(sums[..], [one, other] if one == other), "{output}");
}

#[test]
fn a_terminal_is_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let script = "test -t 1 && test -t 2 && stty -F /dev/tty size && printf 'a\\nb\\n'";
    let counted = shell(folder.path(), &["--tty"], script);
    counted.ends(0, "program 0");
    // As it was written: the terminal at the other end makes lines of it.
    assert_eq!(output(&counted), "24 80\na\nb\n");
}

#[test]
fn who_is_left_over_does_not_keep_the_guest_up() {
    let folder = tempfile::tempdir().expect("a folder");
    let script = "(sleep 100000; echo late) & setsid sleep 100000 & echo now; exit 5";
    let counted = shell(folder.path(), &[], script);
    counted.ends(5, "program 5");
    assert_eq!(output(&counted), "now\n");
}

#[test]
fn what_a_program_changes_comes_back_if_that_is_asked_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path().canonicalize().expect("its path");
    let into = tempfile::tempdir().expect("a folder");
    for (name, content) in [("kept", "as before"), ("gone", "x"), ("more", "a")] {
        fs::write(here.join(name), content).expect("room");
    }
    let script = "echo b >>more; rm gone; mkdir -p new/er; echo c >new/er/file; chmod 4711 new/er/file; \
                  ln -s ../more new/link; ln -s /etc/passwd new/out; mkfifo pipe";
    let out = into.path().display().to_string();
    let counted = shell(&here, &["--out", &out], script);
    counted.ends(0, "program 0");
    let back = into
        .path()
        .join(here.strip_prefix("/").expect("an absolute path"));
    let read = |name: &str| fs::read_to_string(back.join(name)).ok();
    assert_eq!(read("more").as_deref(), Some("ab\n"), "{}", counted.told());
    assert_eq!(read("new/er/file").as_deref(), Some("c\n"));
    assert_eq!(read("new/link").as_deref(), Some("ab\n"));
    for name in ["kept", "gone", "pipe", "new/out"] {
        assert!(fs::symlink_metadata(back.join(name)).is_err(), "{name}");
    }
    let mode = fs::metadata(back.join("new/er/file")).expect("it");
    assert_eq!(mode.permissions().mode() & 0o7777, 0o711);
    // The folder itself is as before.
    let before = ["gone", "kept", "more"];
    let mut names: Vec<_> = fs::read_dir(&here)
        .expect("a folder")
        .map(|entry| entry.expect("a name").file_name())
        .collect();
    names.sort();
    assert_eq!(names, before);
    assert_eq!(
        fs::read_to_string(here.join("more")).ok().as_deref(),
        Some("a")
    );
}

#[test]
fn a_program_that_takes_all_memory_is_told_so() {
    let folder = tempfile::tempdir().expect("a folder");
    // Each round doubles it.
    let script = "a=0123456789abcdef; while :; do a=$a$a; done";
    let counted = shell(folder.path(), &["--memory", "256"], script);
    counted.says(&["the guest had no memory left", "--memory"]);
    assert_ne!(counted.output.status.code(), Some(0));
}
