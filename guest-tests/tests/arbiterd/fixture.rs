//! An arbiter in a folder of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use umpire_lease::{Arbiter, Counters, Held, Request};

/// Nothing here takes as long.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// What starts a program as a user without any right.
pub(crate) const AS_NOBODY: [&str; 6] = [
    "setpriv",
    "--reuid",
    "65534",
    "--regid",
    "65534",
    "--clear-groups",
];

/// A running arbiter, which ends with this value.
pub(crate) struct Daemon {
    pub(crate) folder: TempDir,
    flags: Vec<String>,
    child: Option<Child>,
}

impl Daemon {
    /// Four programmable and two fixed-function counters on each CPU, and a journal.
    pub(crate) fn start() -> Self {
        Self::with(&["--budget", "programmable=4,fixed=2"], "")
    }

    /// With these flags, and a configuration file if there is a text.
    pub(crate) fn with(flags: &[&str], config: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut daemon = Self::in_folder(folder, flags, config);
        daemon.begin();
        daemon
    }

    /// The same, in a folder that is there, and not started yet.
    pub(crate) fn in_folder(folder: TempDir, flags: &[&str], config: &str) -> Self {
        let mut all: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let state = folder.path().join("state");
        all.extend(["--state".to_owned(), state.display().to_string()]);
        if !config.is_empty() {
            let path = folder.path().join("arbiter.toml");
            fs::write(&path, config).expect("the configuration");
            all.extend(["--config".to_owned(), path.display().to_string()]);
        }
        Daemon {
            folder,
            flags: all,
            child: None,
        }
    }

    /// Without a journal.
    pub(crate) fn without_state(mut self) -> Self {
        let at = self.flags.iter().position(|flag| flag == "--state");
        let at = at.expect("it has one");
        self.flags.drain(at..at + 2);
        self
    }

    pub(crate) fn add_flag(&mut self, flag: &str) {
        self.flags.insert(3, flag.to_owned());
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Other users come to its socket too.
    pub(crate) fn open_to_all(&self) {
        for path in [self.folder.path(), &self.socket()] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("it is ours");
        }
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(guest_tests::umpire::path());
        command
            .arg("arbiterd")
            .arg("--socket")
            .arg(self.socket())
            .args(&self.flags);
        command
    }

    /// Starts it, and waits until it answers.
    pub(crate) fn begin(&mut self) {
        let command = self.command();
        self.begin_with(command);
    }

    /// Starts it below a shell that limits it first.
    pub(crate) fn limited(&mut self, script: &str) {
        let command = self.command();
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(script).arg(command.get_program());
        shell.args(command.get_args());
        self.begin_with(shell);
    }

    /// Starts it by a command that runs [`Daemon::command`].
    pub(crate) fn begin_with(&mut self, command: Command) {
        self.begin_from(command, Stdio::null());
    }

    /// The same, with something to read from.
    pub(crate) fn begin_from(&mut self, mut command: Command, stdin: Stdio) {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.folder.path().join("log"))
            .expect("a log");
        let child = command.stderr(log).stdin(stdin).spawn();
        let child = self.child.insert(child.expect("umpire starts"));
        let until = Instant::now() + LONG;
        while Arbiter::connect(&self.folder.path().join("socket")).is_err() {
            if let Some(status) = child.try_wait().expect("it is ours") {
                self.child = None;
                panic!("it has ended, {status}: {}", self.log());
            }
            assert!(Instant::now() < until, "it does not answer: {}", self.log());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    pub(crate) fn pid(&self) -> i32 {
        let child = self.child.as_ref().expect("it runs");
        i32::try_from(child.id()).expect("a pid")
    }

    /// Ends it as a service manager does.
    pub(crate) fn end(&mut self) {
        let mut child = self.child.take().expect("it runs");
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it is ours");
        assert!(child.wait().expect("it is ours").success());
    }

    /// Kills it as the kernel does when memory is short.
    pub(crate) fn kill(&mut self) {
        let mut child = self.child.take().expect("it runs");
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
    }

    pub(crate) fn connect(&self) -> Arbiter {
        Arbiter::connect(&self.socket()).expect("it answers")
    }

    /// A lease that is granted at once.
    pub(crate) fn acquire(&self, request: &Request) -> Held {
        let held = self.connect().acquire(request).expect("it can be had");
        assert!(held.lease().holds > 0, "{:?}", held.lease());
        held
    }

    /// Runs another command of `umpire` that asks it.
    pub(crate) fn umpire(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new("timeout");
        command
            .arg("60")
            .arg(guest_tests::umpire::path())
            .args(arguments);
        command
            .env("UMPIRE_ARBITER", self.socket())
            .output()
            .expect("it starts")
    }

    /// What a command prints that succeeds.
    pub(crate) fn out(&self, arguments: &[&str]) -> String {
        let output = self.umpire(arguments);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {errors}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// The one line that a command which is refused prints, and its status.
    pub(crate) fn refused(&self, arguments: &[&str]) -> String {
        let output = self.umpire(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        let errors = String::from_utf8(output.stderr).expect("text");
        assert_eq!(errors.lines().count(), 1, "{errors}");
        errors.trim_end().to_owned()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.kill();
        }
        if std::thread::panicking() {
            eprintln!("the arbiter's log:\n{}", self.log());
        }
    }
}

/// So many programmable counters of CPU 0.
pub(crate) fn programmable(count: u32) -> Request {
    Request {
        counters: vec![Counters::programmable(count)],
        cpus: Some("0".to_owned()),
        ..Request::default()
    }
}
