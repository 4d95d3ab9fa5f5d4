//! What cannot be run or counted is said in one line, with the right status, and nothing is left.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use guest_tests::umpire;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::boot::package;
use super::{Count, compiled, fetched};

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
    for (name, number) in [("SEGV", 11), ("ABRT", 6), ("TERM", 15)] {
        let status = 128 + number;
        let script = format!("kill -{name} $$");
        let killed = Count::new(here).run(&["sh", "-c", &script]);
        killed.ends(status, &format!("signal {status}"));
    }
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

/// The first ten of what this machine has and the program was not given.
#[test]
fn what_was_not_given_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let given = Count::new(folder.path()).run(&["ls", "-a", "/etc"]);
    let given = String::from_utf8_lossy(&given.output.stdout).into_owned();
    let all = fs::read_dir("/etc").expect("a folder").flatten();
    let all = all.filter_map(|entry| entry.file_name().into_string().ok());
    let missing: Vec<String> = all
        // Programs of Debian look for this one on every machine, and nobody is told.
        .filter(|name| name != "selinux" && !given.lines().any(|given| given == name))
        .map(|name| format!("/etc/{name}"))
        .take(12)
        .collect();
    assert_eq!(missing.len(), 12, "what is more is not given: {given}");
    let script = "for i; do test -e $i && exit 1; done; exit 0";
    let mut program = vec!["sh", "-c", script, "sh", "/etc/is-nowhere"];
    program.extend(missing.iter().map(String::as_str));
    let counted = Count::new(folder.path()).run(&program);
    counted.ends(0, "program 0").says(&[&format!(
        "looked for what it was not given: {}; --with gives it",
        missing[..10].join(", ")
    )]);
}

/// Its output or a file of its counts has no room.
#[test]
fn a_full_disk_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    // A machine is booted first, if there is none, which says how far it is.
    Count::new(folder.path())
        .run(&["true"])
        .ends(0, "program 0");
    let check = |words: &[&str], stdout: Stdio, expected: &str| {
        let output = Command::new(umpire::path())
            .arg("count")
            .args(words)
            .args(["--", "echo", "x"])
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(stdout)
            .output()
            .expect("umpire can be started");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{words:?}: {told}");
        let lines: Vec<&str> = told
            .lines()
            .filter(|line| line.starts_with("umpire: "))
            .collect();
        let one =
            matches!(lines[..], [line] if line.contains(expected) && line.contains("No space"));
        assert!(one, "{words:?}: {told}");
    };
    for option in [
        "--save",
        "--output",
        "--summary",
        "--callgrind",
        "--status-file",
    ] {
        let words = [option, "/dev/full"];
        check(&words, Stdio::null(), "/dev/full");
    }
    let full = fs::OpenOptions::new().write(true).open("/dev/full");
    check(
        &[],
        full.expect("Linux has it").into(),
        "the program's output cannot be written",
    );
}

/// The cache is on a small disk: of the kernel's package, or of the booted machine.
#[test]
fn a_full_cache_is_told() {
    const TEST: &str = "a_full_cache_is_told";
    let kernel = package();
    let folder = tempfile::tempdir().expect("a folder");
    let cache = folder.path().display().to_string();
    let check = |mebibytes: u32, words: &[&str], expected: &str| {
        let script =
            format!("mount -t tmpfs -o size={mebibytes}m none {cache} && exec \"$0\" \"$@\"");
        let output = Command::new("unshare")
            .args(["--map-root-user", "--mount", "sh", "-c", &script])
            .arg(umpire::path())
            .args(["count", "--cache", &cache])
            .args(words)
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .output();
        let output = output.expect("unshare is everywhere");
        let told = String::from_utf8_lossy(&output.stderr);
        if told.starts_with("unshare: ") || told.starts_with("mount: ") {
            println!("skipped: {TEST}: {}", told.trim());
            return;
        }
        assert_eq!(output.status.code(), Some(125), "{words:?}: {told}");
        assert!(
            told.lines()
                .last()
                .is_some_and(|line| line.contains(expected)),
            "{told}"
        );
    };
    check(
        100,
        &["--fetch-kernel"],
        "MiB, and it takes 160 meanwhile: make room",
    );
    let kernel = kernel.display().to_string();
    let words = ["--kernel", &kernel, "--memory", "128", "--", "true"];
    check(
        8,
        &words,
        "the machine did not boot: cannot write the snapshot",
    );
}

/// Ctrl-C at a terminal goes to all processes there. Whatever is under way, one line and one
/// status say so, and nothing is left of it.
#[test]
fn who_is_interrupted_leaves_nothing() {
    fetched();
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    for name in ["tools", "tmp", "here"] {
        fs::create_dir(path(name)).expect("room");
    }
    // Who waits for a network.
    put(&path("tools"), "apt-get", b"#!/bin/sh\nexec sleep 1000\n");
    let tools = std::env::var("PATH").expect("a PATH");
    let tools = format!("{}:{tools}", path("tools").display());
    let empty = path("cache").display().to_string();
    let kernel = package().display().to_string();
    let endless = ["--", "sh", "-c", "echo begun >&2; while :; do :; done"];
    let booting = ["--cache", &empty, "--kernel", &kernel];
    let cases: [(&[&[&str]], &str); 4] = [
        (&[&endless], "begun"),
        (&[&["-r", "2"], &endless], "begun"),
        (&[&booting, &endless], "booting the machine"),
        (
            &[&["--cache", &empty, "--fetch-kernel"]],
            "fetching the package lists",
        ),
    ];
    for (words, moment) in cases {
        let words = words.concat();
        let mut child = Command::new(umpire::path())
            .args(["count", "--status-file", "../status"])
            .args(&words)
            .current_dir(path("here"))
            .env("PATH", &tools)
            .env("TMPDIR", path("tmp"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("umpire can be started");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut told = String::new();
        while !told.contains(moment) {
            let read = stderr.read_line(&mut told).expect("text");
            assert_ne!(read, 0, "{words:?}: {told}");
        }
        let group = Pid::from_raw(child.id().try_into().expect("a process"));
        killpg(group, Signal::SIGINT).expect("a process");
        // Of all that has it: nobody is left who would say more.
        stderr.read_to_string(&mut told).expect("text");
        let status = child.wait().expect("an end");
        assert_eq!(status.code(), Some(130), "{words:?}: {told}");
        assert_eq!(
            told.lines().last(),
            Some("umpire: interrupted"),
            "{words:?}"
        );
        let status = fs::read_to_string(path("status")).expect("a status");
        assert_eq!(status, "interrupted 130\n", "{words:?}");
        for name in ["tmp", "here", "cache/kernel"] {
            let left: Vec<_> = fs::read_dir(path(name))
                .into_iter()
                .flatten()
                .flatten()
                .collect();
            assert!(left.is_empty(), "{words:?}: {left:?}");
        }
        // What locks the machine's place is kept with it, and is empty.
        for file in fs::read_dir(path("cache/images"))
            .into_iter()
            .flatten()
            .flatten()
        {
            assert_eq!(
                file.metadata().expect("a file").len(),
                0,
                "{words:?}: {file:?}"
            );
        }
    }
}
