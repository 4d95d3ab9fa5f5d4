//! `umpire count`, end to end, on this machine: no KVM, no L1. Programs of this machine do in the
//! small virtual machine what they do here, and count the same each time.

mod attributed;
mod bad_input;
mod boot;
mod guest;
mod marked;
mod oracle;
mod profiles;
mod programs;
mod workflow;

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use guest_tests::umpire;
use serde_json::Value;

/// Longer than any of these takes, on a machine that has much else to do.
const TIMEOUT: &str = "300s";

/// Programs find these alone, here as there.
const ENVIRONMENT: [(&str, &str); 4] = [
    (
        "PATH",
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ),
    ("HOME", "/user"),
    ("LANG", "C.UTF-8"),
    ("TERM", "dumb"),
];

/// Has the kernel fetched, once.
fn fetched() {
    static FETCHED: OnceLock<()> = OnceLock::new();
    FETCHED.get_or_init(|| {
        let output = Command::new(umpire::path())
            .args(["count", "--fetch-kernel"])
            .output()
            .expect("umpire can be started");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{told}");
    });
}

/// A command line of `umpire count`.
struct Count {
    command: Command,
    folder: tempfile::TempDir,
    here: PathBuf,
    stdin: Vec<u8>,
    timeout: &'static str,
}

/// What came of one.
struct Counted {
    output: Output,
    /// What was kept by `--save`; none where it was not.
    record: Option<Value>,
    /// The line of `--status-file`.
    status: String,
}

impl Count {
    /// In `here`.
    fn new(here: &Path) -> Self {
        fetched();
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = Command::new(umpire::path());
        command.current_dir(here);
        command.args(["count", "--save"]);
        command.arg(folder.path().join("record"));
        command
            .arg("--status-file")
            .arg(folder.path().join("status"));
        Self {
            command,
            folder,
            here: here.to_owned(),
            stdin: Vec::new(),
            timeout: TIMEOUT,
        }
    }

    fn options(mut self, words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.command.args(words);
        self
    }

    fn timeout(mut self, time: &'static str) -> Self {
        self.timeout = time;
        self
    }

    fn stdin(mut self, bytes: &[u8]) -> Self {
        self.stdin = bytes.to_vec();
        self
    }

    fn run<S: AsRef<OsStr>>(mut self, program: &[S]) -> Counted {
        self.command
            .args(["--timeout", self.timeout, "--"])
            .args(program);
        let output = output(&mut self.command, &self.stdin);
        let path = |name: &str| self.folder.path().join(name);
        let record = fs::read(path("record")).ok();
        Counted {
            output,
            record: record.map(|bytes| serde_json::from_slice(&bytes).expect("JSON")),
            status: fs::read_to_string(path("status")).unwrap_or_default(),
        }
    }

    /// The same program on this machine.
    fn natively(&self, program: &[&str]) -> Output {
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).current_dir(&self.here);
        command.env_clear().envs(ENVIRONMENT);
        output(&mut command, &self.stdin)
    }
}

fn output(command: &mut Command, stdin: &[u8]) -> Output {
    command.stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it can be started");
    let mut pipe = child.stdin.take().expect("a pipe");
    std::thread::scope(|threads| {
        // Who does not read it closes it.
        threads.spawn(move || {
            let _ = pipe.write_all(stdin);
        });
        child.wait_with_output().expect("an end")
    })
}

impl Counted {
    fn told(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    #[track_caller]
    fn ends(&self, status: i32, line: &str) -> &Self {
        let found = (self.output.status.code(), self.status.trim_end());
        assert_eq!(found, (Some(status), line), "{}", self.told());
        self
    }

    #[track_caller]
    fn says(&self, parts: &[&str]) -> &Self {
        for part in parts {
            assert!(self.told().contains(part), "no {part:?} in {}", self.told());
        }
        self
    }

    #[track_caller]
    fn record(&self) -> &Value {
        let record = self.record.as_ref();
        record.unwrap_or_else(|| panic!("nothing was saved: {}", self.told()))
    }

    /// A sum over all programs: of `user` or `kernel`.
    #[track_caller]
    fn total(&self, side: &str, event: &str) -> u64 {
        let programs = self.record()["counts"]["programs"].as_array();
        let threads = programs.expect("programs").iter().flat_map(|program| {
            let threads = program["threads"].as_array();
            threads.expect("threads").iter()
        });
        threads
            .map(|thread| thread[side][event].as_u64().expect("a count"))
            .sum()
    }

    /// The paths of what was executed, in their order.
    #[track_caller]
    fn names(&self) -> Vec<&str> {
        let programs = self.record()["counts"]["programs"].as_array();
        let names = programs.expect("programs").iter();
        names
            .map(|one| one["name"].as_str().expect("a name"))
            .collect()
    }
}

/// Builds a program of a C source, static and without libc's start if `flags` say so.
fn compiled(folder: &Path, name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let (source_file, program) = (folder.join(format!("{name}.c")), folder.join(name));
    fs::write(&source_file, source).expect("room");
    let status = Command::new("cc")
        .args(["-O1", "-o"])
        .arg(&program)
        .arg(&source_file)
        .args(flags)
        .status();
    assert!(
        status.expect("a C compiler").success(),
        "{name} does not build"
    );
    program
}
