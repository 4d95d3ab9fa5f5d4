//! A VM from its start to its end, as tools see it: found by name, by process id, or as the
//! only one; paused from its first instruction on; stopped.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use iced_x86::code_asm::{al, dx, ecx};

use guest_tests::kernel::{Kernel, Protocol};
use guest_tests::umpire::{self, skipped_without_kvm};

/// A VM that ends with the test.
pub(super) struct Named(pub(super) Child);

impl Named {
    pub(super) fn run(kernel: &Kernel, runtime: &Path, flags: &[&str]) -> Self {
        let child = Command::new(umpire::path())
            .env("XDG_RUNTIME_DIR", runtime)
            .args(["run", "--memory", "32", "--counters", "clock"])
            .arg("--kernel")
            .arg(kernel.path())
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("umpire can be started");
        Self(child)
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Status, standard output, standard error.
pub(super) fn umpire(runtime: &Path, words: &[&str]) -> (i32, String, String) {
    let output = Command::new(umpire::path())
        .args(words)
        .env("XDG_RUNTIME_DIR", runtime)
        .env_remove("UMPIRE_PERFMON")
        .output()
        .expect("umpire can be started");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let status = output.status.code().unwrap_or(-1);
    (status, text(&output.stdout), text(&output.stderr))
}

pub(super) fn await_listed(runtime: &Path, name: &str) {
    let began = Instant::now();
    while !umpire(runtime, &["ls"])
        .1
        .contains(&format!("/{name}.sock"))
    {
        assert!(began.elapsed() < Duration::from_secs(20), "{name} is there");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn by_name_by_number_or_the_only_one() {
    if skipped_without_kvm("by_name_by_number") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let runtime = folder.path();
    let kernel = guest_tests::vm::spinning();
    let web1 = Named::run(&kernel, runtime, &["--name", "web1"]);
    await_listed(runtime, "web1");
    let stat = ["stat", "-e", "vm-exits", "--for", "20ms"];
    let with = |more: &[&'static str]| [&stat[..], more].concat();
    // The only one needs no word.
    let (status, _, told) = umpire(runtime, &stat);
    assert_eq!(status, 0, "{told}");
    let unnamed = Named::run(&kernel, runtime, &[]);
    let pid = unnamed.0.id().to_string();
    await_listed(runtime, &pid);
    let (status, _, told) = umpire(runtime, &stat);
    assert_eq!((status, told.lines().count()), (2, 1), "{told}");
    assert!(
        told.contains("which VM? running are ") && told.contains("web1 ("),
        "{told}"
    );
    for vm in ["web1", &web1.0.id().to_string(), &pid] {
        let (status, _, told) = umpire(runtime, &[&stat[..], &["--vm", vm]].concat());
        assert_eq!(status, 0, "{vm}: {told}");
    }
    let (status, _, told) = umpire(runtime, &with(&["--vm", "web2"]));
    assert_eq!(status, 2, "{told}");
    assert!(told.contains("there is no VM web2; running are "), "{told}");
    let (status, listed, _) = umpire(runtime, &["ls", "--vm", "web1"]);
    assert!(status == 0 && listed.contains("web1.sock") && !listed.contains(&pid));
    // The name is taken; a VM that was killed leaves it to the next.
    let mut second = Named::run(&kernel, runtime, &["--name", "web1"]);
    assert_eq!(second.0.wait().expect("a status").code(), Some(2));
    drop(unnamed);
    let (status, _, told) = umpire(runtime, &stat);
    assert_eq!(status, 0, "{told}");
    drop(web1);
    let _again = Named::run(&kernel, runtime, &["--name", "web1"]);
    await_listed(runtime, "web1");
}

/// Each tool means the VM that `--vm` names, and a name that nobody has is one line.
#[test]
fn each_tool_finds_a_vm_by_its_name() {
    if skipped_without_kvm("each_tool_finds_a_vm_by_its_name") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let runtime = folder.path();
    let kernel = guest_tests::vm::spinning();
    let web1 = Named::run(&kernel, runtime, &["--name", "web1", "--paused"]);
    let _db = Named::run(&kernel, runtime, &["--name", "db"]);
    await_listed(runtime, "web1");
    await_listed(runtime, "db");
    let file = folder.path().join("a.data").display().to_string();
    let record = ["record", "-F", "200", "--for", "300ms", "-o", &file];
    let tools: [&[&str]; 6] = [
        &record,
        &["track", "-c", "vm-exits", "-T", "0.1", "-N", "1"],
        &["pcr"],
        &["top", "--once", "-d", "0.2"],
        &["events", "cycles"],
        &["stat", "-e", "vm-exits", "--for", "20ms"],
    ];
    for tool in tools {
        let (status, out, told) = umpire(runtime, &[tool, &["--vm", "web2"]].concat());
        assert_eq!((status, told.lines().count()), (2, 1), "{tool:?}: {told}");
        assert!(told.contains("there is no VM web2; running are "), "{told}");
        assert_eq!(out, "", "{tool:?}");
    }
    // The one that stands until everything counts.
    let resumed = [&record[..], &["--vm", "web1", "--resume"]].concat();
    let (status, _, told) = umpire(runtime, &resumed);
    assert!(status == 0 && told.contains(" samples; "), "{told}");
    let (_, report, _) = umpire(runtime, &["report", "-i", &file]);
    assert!(report.contains(&web1.0.id().to_string()), "{report}");
    assert!(report.contains('%'), "{report}");
    for tool in tools {
        let (status, out, told) = umpire(runtime, &[tool, &["--vm", "web1"]].concat());
        assert_eq!(status, 0, "{tool:?}: {told}");
        match tool[0] {
            // A folder may have "db" in its name.
            "top" => assert!(out.contains("web1") && !out.contains("\ndb "), "{out}"),
            "events" => assert!(out.contains("cycles"), "{out}"),
            "track" => assert!(out.contains(" exit "), "{out}"),
            _ => {}
        }
    }
    let (status, _, told) = umpire(runtime, &["pause", "web1"]);
    assert!(status == 0 && told.contains("VM web1 ("), "{told}");
    let (status, _, told) = umpire(runtime, &["resume", "web1"]);
    assert!(status == 0 && told.contains("VM web1 ("), "{told}");
    let listed = umpire(runtime, &["ls", "--vm", "web1"]).1;
    assert!(listed.contains("running"), "{listed}");
    for tool in ["pause", "resume", "stop"] {
        let (status, _, told) = umpire(runtime, &[tool, "web2"]);
        assert_eq!((status, told.lines().count()), (2, 1), "{tool}: {told}");
    }
}

#[test]
fn nobody_is_served_where_none_is_wanted() {
    if skipped_without_kvm("nobody_is_served") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let kernel = guest_tests::vm::spinning();
    let flags = ["--control", "none", "--timeout", "1"];
    let mut vm = Named::run(&kernel, folder.path(), &flags);
    assert_eq!(vm.0.wait().expect("a status").code(), Some(124));
    assert!(!folder.path().join("umpire").exists());
}

#[test]
fn a_paused_guest_does_nothing() {
    if skipped_without_kvm("a_paused_guest_does_nothing") {
        return;
    }
    for cores in [&[][..], &["--cpus", "2", "--cores", "1"]] {
        let folder = tempfile::tempdir().expect("a folder");
        let runtime = folder.path();
        let kernel = guest_tests::vm::spinning();
        let flags = [&["--name", "web1", "--paused"], cores].concat();
        let mut vm = Named::run(&kernel, runtime, &flags);
        await_listed(runtime, "web1");
        // Milliseconds of 150; a thread that does jobs for a tool counts as running.
        let ran = |more: &[&str]| {
            let words = [
                &[
                    "stat",
                    "--log-fd",
                    "1",
                    "-x",
                    ";",
                    "-e",
                    "vm-run-ns",
                    "--for",
                    "150ms",
                ],
                more,
            ]
            .concat();
            let (status, out, told) = umpire(runtime, &words);
            assert_eq!(status, 0, "{told}");
            let ms = out
                .split(';')
                .next()
                .map(|count| count.trim().replace(',', ""));
            ms.and_then(|ms| ms.parse::<f64>().ok()).expect("a count")
        };
        let stands = || {
            let ms = ran(&[]);
            assert!(ms < 10.0, "{flags:?}: {ms} ms");
        };
        let runs = |more: &[&str]| {
            // A busy host may give it little for a while.
            let began = Instant::now();
            let mut ms = ran(more);
            while ms < 15.0 && began.elapsed() < Duration::from_secs(20) {
                ms = ran(&[]);
            }
            assert!(ms >= 15.0, "{flags:?}: {ms} ms");
        };
        let state = |state: &str| {
            let listed = umpire(runtime, &["ls"]).1;
            assert!(listed.contains(state), "{listed}");
        };
        stands();
        state("paused");
        // A command that cannot be started leaves it where it is.
        let data = runtime.join("data").display().to_string();
        for words in [&["stat", "-e", "vm-exits"][..], &["record", "-o", &data]] {
            let words = [words, &["--resume", "/no/such/program"]].concat();
            assert_eq!(umpire(runtime, &words).0, 2);
            state("paused");
        }
        runs(&["--resume"]);
        for _ in 0..5 {
            let (status, _, told) = umpire(runtime, &["pause", "web1"]);
            assert!(status == 0 && told.contains("VM web1 ("), "{told}");
            stands();
            state("paused");
            assert_eq!(umpire(runtime, &["resume"]).0, 0);
            runs(&[]);
        }
        // One that stands can be stopped, too.
        assert_eq!(umpire(runtime, &["pause", "--vm", "web1"]).0, 0);
        let (status, _, told) = umpire(runtime, &["stop", "web1"]);
        assert!(status == 0 && told.contains("has ended"), "{told}");
        assert_eq!(vm.0.wait().expect("a status").code(), Some(130));
        let (status, _, told) = umpire(runtime, &["stop", "web1"]);
        assert!(
            status == 2 && told.contains("there is no VM web1"),
            "{told}"
        );
    }
}

/// A guest with so many exits, from its first instruction to its end.
const WRITES: u32 = 1000;

#[test]
fn what_umpire_run_counts_misses_nothing() {
    if skipped_without_kvm("what_umpire_run_counts") {
        return;
    }
    let kernel = Kernel::new(Protocol::Linux64, |a, _| {
        let mut again = a.create_label();
        a.mov(ecx, WRITES)?;
        a.mov(dx, 0x80_u32)?;
        a.set_label(&mut again)?;
        a.out(dx, al)?;
        a.dec(ecx)?;
        a.jnz(again)?;
        a.mov(dx, 0xf4_u32)?;
        a.mov(al, 0_u32)?;
        a.out(dx, al)
    })
    .expect("a kernel");
    let folder = tempfile::tempdir().expect("a folder");
    let run = |more: &[&str]| {
        let output = Command::new(umpire::path())
            .env("XDG_RUNTIME_DIR", folder.path())
            .current_dir(folder.path())
            .args([
                "run",
                "--memory",
                "32",
                "--counters",
                "clock",
                "--timeout",
                "20",
            ])
            .arg("--kernel")
            .arg(kernel.path())
            .args(more)
            .output()
            .expect("umpire can be started");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), told)
    };
    let (status, told) = run(&["--stat", "vm-exits-port,cycles", "--record", "first.data"]);
    // By port 0xf4, with the value 0.
    assert_eq!(status, Some(1), "{told}");
    let line = told
        .lines()
        .find(|line| line.contains("vm-exits-port"))
        .expect(&told);
    let count = line.split_whitespace().next();
    let count = count.map(|count| count.replace(',', ""));
    assert_eq!(count.as_deref(), Some("1001"), "{told}");
    assert!(told.contains("first.data has "), "{told}");
    let (status, told) = run(&["--stat", "no-such-event"]);
    assert!(
        status == Some(2) && told.contains("'no-such-event'"),
        "{told}"
    );
    let (status, told) = run(&["--record", "/nonexistent/x"]);
    assert!(
        status == Some(2) && told.contains("cannot be written"),
        "{told}"
    );
    // Not what the other tool says because of it.
    let (status, told) = run(&["--stat", "vm-exits", "--record", "/nonexistent/x"]);
    assert!(
        status == Some(2) && told.contains("cannot be written"),
        "{told}"
    );
    // A pipe that nobody reads.
    let pipe = folder.path().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status();
    if made.is_ok_and(|made| made.success()) {
        let (status, told) = run(&["--record", "pipe"]);
        assert!(
            status == Some(2) && told.contains("cannot be written"),
            "{told}"
        );
    }
    // The run's own tools need no group.
    let (status, told) = run(&["--stat", "vm-exits-port", "--control-sys-gid", "12345"]);
    assert!(
        status == Some(1) && told.replace(',', "").contains("1001"),
        "{told}"
    );
}

/// Nobody asked for a socket: without one the guest runs. Who needs one is told.
#[test]
fn no_folder_for_sockets() {
    if skipped_without_kvm("no_folder_for_sockets") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    std::fs::write(&file, "").expect("a file");
    let kernel = guest_tests::vm::spinning();
    let status = |flags: &[&str]| {
        let flags = [flags, &["--timeout", "1"]].concat();
        let mut vm = Named::run(&kernel, &file, &flags);
        vm.0.wait().expect("a status").code()
    };
    assert_eq!(status(&[]), Some(124));
    for needs in [&["--stat"][..], &["--paused"], &["--name", "web1"]] {
        assert_eq!(status(needs), Some(2), "{needs:?}");
    }
}

/// A VM that hangs is there, and holds nobody up who means another one.
#[test]
fn one_that_hangs() {
    if skipped_without_kvm("one_that_hangs") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let runtime = folder.path();
    let kernel = guest_tests::vm::spinning();
    let hung = Named::run(&kernel, runtime, &["--name", "db"]);
    let _web1 = Named::run(&kernel, runtime, &["--name", "web1"]);
    await_listed(runtime, "db");
    await_listed(runtime, "web1");
    let pid = hung.0.id().to_string();
    let signal = |signal: &str| Command::new("kill").args([signal, &*pid]).status();
    assert!(signal("-STOP").is_ok_and(|sent| sent.success()));
    let began = Instant::now();
    assert_eq!(umpire(runtime, &["budget", "--vm", "web1"]).0, 0);
    assert!(began.elapsed() < Duration::from_secs(10));
    let (status, _, told) = umpire(runtime, &["budget"]);
    assert!(
        status == 2 && told.contains("db (does not answer)"),
        "{told}"
    );
    assert!(signal("-CONT").is_ok_and(|sent| sent.success()));
    assert_eq!(umpire(runtime, &["stop", "db"]).0, 0);
    assert_eq!(umpire(runtime, &["budget"]).0, 0);
}
