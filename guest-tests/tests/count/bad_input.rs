//! What cannot be run or counted is said in one line, with the right status, and nothing is left.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use guest_tests::umpire;

use super::{Count, compiled};

fn put(folder: &Path, name: &str, content: &[u8]) -> String {
    let path = folder.join(name);
    fs::write(&path, content).expect("room");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("rights");
    format!("./{name}")
}

/// Options that cannot be used: the one line, and status 125.
#[test]
fn options_that_cannot_be_used() {
    fn check(words: &[&str], expected: &str) {
        let folder = tempfile::tempdir().expect("a folder");
        let output = Command::new(umpire::path())
            .arg("count")
            .args(words)
            .current_dir(folder.path())
            .env("XDG_CACHE_HOME", folder.path())
            .output()
            .expect("umpire can be started");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{words:?}: {told}");
        assert_eq!(told.lines().count(), 1, "{words:?}: {told}");
        assert!(told.contains(expected), "{words:?}: {told}");
    }
    check(&[], "run what? give a program");
    check(
        &["-e", "cycles", "true"],
        "there is no event 'cycles' to count",
    );
    check(&["--threshold", "1%", "true"], "--compare");
    check(
        &["--compare", "gone.json", "true"],
        "gone.json: No such file",
    );
    check(
        &["--compare", "/etc/passwd", "true"],
        "it is no file of umpire count --save",
    );
    check(&["--env", "UMPIRE_NO_SUCH", "true"], "it is not set here");
    check(&["-C", "gone", "true"], "is no folder");
    check(
        &["no-such-program"],
        "there is no program 'no-such-program'",
    );
    check(&["--frobnicate", "true"], "has no option '--frobnicate'");
    check(&["--memory", "1", "true"], "128");
    // No kernel in that cache.
    check(
        &["true"],
        "there is no kernel yet: run umpire count --fetch-kernel; without a network",
    );
    check(
        &["--kernel", "gone.deb", "true"],
        "--kernel gone.deb: No such file",
    );
    check(
        &["diff", "gone.json", "gone.json"],
        "gone.json: No such file",
    );
}

#[test]
fn programs_that_cannot_be_executed() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut other = fs::read("/bin/true").expect("a program");
    // AArch64's number, at the place of the machine.
    other[18] = 183;
    fs::create_dir(here.join("folder")).expect("room");
    let cases = [
        (
            put(here, "script", b"#!/no/such/sh\n"),
            "the interpreter that its first line names",
        ),
        (put(here, "text", b"echo x\n"), "text without a line #!"),
        (put(here, "other", &other), "for another processor"),
        ("./gone".to_owned(), "gone"),
        (
            "./folder".to_owned(),
            "it is a folder, or no file to execute",
        ),
    ];
    for (program, expected) in cases {
        let counted = Count::new(here).run(&[&program]);
        counted.ends(125, "umpire 125").says(&[expected]);
        assert!(counted.record.is_none(), "{program}");
    }
}

#[test]
fn programs_that_end_badly() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let killed = Count::new(here).run(&["sh", "-c", "kill -9 $$"]);
    killed.ends(137, "signal 137");
    let failed = Count::new(here).run(&["sh", "-c", "exit 125"]);
    failed.ends(125, "program 125");
    let endless = Count::new(here)
        .timeout("1s")
        .run(&["sh", "-c", "while :; do :; done"]);
    endless.ends(124, "timeout 124").says(&["--timeout"]);
    let asleep = Count::new(here)
        .timeout("5s")
        .run(&["tail", "-f", "/dev/null"]);
    assert_ne!(asleep.output.status.code(), Some(0), "{}", asleep.told());
    let full = Count::new(here).options(["--memory", "256"]);
    let full = full.run(&["dd", "if=/dev/zero", "of=full", "bs=1M", "count=600"]);
    full.ends(1, "program 1").says(&["No space left on device"]);
    assert!(
        fs::read_dir(here).expect("a folder").next().is_none(),
        "something was left"
    );
}

/// The instruction is named, and what to build for.
#[test]
fn a_program_with_avx_is_told_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = "int main(void) { __asm__ volatile(\"vaddps %ymm0, %ymm1, %ymm2\"); return 0; }";
    compiled(folder.path(), "avx", source, &["-static"]);
    let counted = Count::new(folder.path()).run(&["./avx"]);
    counted.ends(132, "signal 132").says(&[
        "VEX_Vaddps_ymm_ymm_ymmm256",
        "needs [AVX]",
        "x86-64-v2",
    ]);
}

#[test]
fn a_library_that_is_not_there_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    compiled(
        here,
        "libgone.so",
        "int f(void) { return 0; }",
        &["-shared", "-fPIC"],
    );
    let source = "int f(void); int main(void) { return f(); }";
    let place = format!("-L{}", here.display());
    let flags = [&place, "-l:libgone.so", "-Wl,-rpath,/no/such"];
    compiled(here, "needy", source, &flags);
    fs::remove_file(here.join("libgone.so")).expect("it is there");
    let counted = Count::new(here).run(&["./needy"]);
    counted
        .ends(127, "program 127")
        .says(&["libraries that were not found: libgone.so"]);
}

/// A limit holds also while standard input is read, and while nobody reads the output.
#[test]
fn a_time_out_holds_whatever_is_waited_for() {
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    let folder = tempfile::tempdir().expect("a folder");
    let check = |stdin: Stdio, program: &[&str]| {
        let began = Instant::now();
        let mut child = Command::new(umpire::path())
            .args(["count", "--timeout", "2s", "--status-file", "status", "--"])
            .args(program)
            .current_dir(folder.path())
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("umpire can be started");
        // Held, and not used.
        let held = (child.stdin.take(), child.stdout.take());
        let status = child.wait().expect("an end");
        assert_eq!(status.code(), Some(124), "{program:?}");
        assert!(began.elapsed() < Duration::from_secs(60), "{program:?}");
        let status = fs::read_to_string(folder.path().join("status")).expect("a status");
        assert_eq!(status, "timeout 124\n");
        drop(held);
    };
    // A machine is booted first, if there is none: that takes its own time.
    Count::new(folder.path())
        .run(&["true"])
        .ends(0, "program 0");
    check(Stdio::piped(), &["true"]);
    check(Stdio::null(), &["yes"]);
    // What was read is digested at the end.
    let sparse = fs::File::create(folder.path().join("sparse")).expect("a file");
    sparse.set_len(1 << 40).expect("no room is needed");
    check(Stdio::null(), &["head", "-c", "1", "sparse"]);
}

/// Different bytes are different inputs, and a reader that goes away is one.
#[test]
fn inputs_are_told_apart() {
    let folder = tempfile::tempdir().expect("a folder");
    let digest = |argument: &[u8]| {
        let program = [OsStr::new("echo"), OsStr::from_bytes(argument)];
        let counted = Count::new(folder.path()).run(&program);
        counted.record()["digest"]
            .as_str()
            .expect("a digest")
            .to_owned()
    };
    assert_ne!(digest(b"\xff"), digest(b"\xfe"));
    assert_eq!(digest(b"x"), digest(b"x"));
}

/// A program goes by what is there, by sizes and rights, without reading any of it.
#[test]
fn what_is_only_looked_for_is_an_input() {
    let folder = tempfile::tempdir().expect("a folder");
    let inputs = || {
        let script = "test -e flag && stat -c %s flag; :";
        let counted = Count::new(folder.path()).run(&["sh", "-c", script].map(OsStr::new));
        let record = counted.record();
        (
            record["digest"].clone(),
            record["inputs"]["name ./flag"].clone(),
        )
    };
    let flag = folder.path().join("flag");
    let (without, name) = inputs();
    assert_eq!(name, "nothing");
    fs::write(&flag, "").expect("a file");
    fs::set_permissions(&flag, fs::Permissions::from_mode(0o644)).expect("rights");
    let (empty, name) = inputs();
    assert_eq!(name, "file of 0 bytes, mode 644");
    fs::set_permissions(&flag, fs::Permissions::from_mode(0o600)).expect("rights");
    let (locked, name) = inputs();
    assert_eq!(name, "file of 0 bytes, mode 600");
    assert!(without != empty && empty != locked && locked != without);
    assert_eq!(inputs(), (locked, name));
}
