//! A VM that a test's tools look at.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use guest_tests::kernel::{Kernel, Protocol, spin_forever};
use guest_tests::umpire;
use tempfile::TempDir;

/// How long anybody waits for anything.
const PATIENCE: Duration = Duration::from_secs(20);

/// Events per microsecond; instructions are a quarter of the cycles, and
/// branches a fifth of the instructions.
const RATES: &str = "counters = COUNT\n\
    [event.cycles]\nrate = 2000\n\
    [event.instructions]\nrate = 500\n\
    [event.branches]\nrate = 100\n\
    [event.branch-misses]\nphases = [{ us = 300, rate = 1 }, { us = 100, rate = 5 }]\n";

/// A guest that spins, until this is dropped.
pub(crate) struct Vm {
    child: Child,
    folder: TempDir,
    _kernel: Kernel,
}

impl Vm {
    /// Boots it with so many physical counters, and more flags of `umpire run`.
    pub(crate) fn boot(counters: u32, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let rates = folder.path().join("rates.toml");
        let text = RATES.replace("COUNT", &counters.to_string());
        std::fs::write(&rates, text).expect("a file");
        let kernel = Kernel::new(Protocol::Linux64, |a, _| spin_forever(a)).expect("a kernel");
        let child = Command::new(umpire::path())
            .args([
                "run",
                "--memory",
                "32",
                "--timeout",
                "60",
                "--pmu",
                "amd-core",
            ])
            .args([
                "--cpu-vendor",
                "amd",
                "--host-policy",
                "host-first",
                "--counters",
            ])
            .arg(format!("sim={}", rates.display()))
            .arg("--kernel")
            .arg(kernel.path())
            .arg("--control")
            .arg(folder.path().join("vm.sock"))
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("umpire can be started");
        let vm = Self {
            child,
            folder,
            _kernel: kernel,
        };
        let began = Instant::now();
        while !vm.tool(&["ls", &vm.socket()]).status.success() {
            assert!(began.elapsed() < PATIENCE, "the VM serves its socket");
            std::thread::sleep(Duration::from_millis(20));
        }
        vm
    }

    pub(crate) fn socket(&self) -> String {
        self.path("vm.sock").display().to_string()
    }

    /// A file that goes with the VM.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `umpire` with these words, looking at this VM.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(umpire::path());
        command.args(words).env("UMPIRE_PERFMON", self.socket());
        command.env_remove("XDG_RUNTIME_DIR");
        command
    }

    /// Runs such a command to its end.
    pub(crate) fn tool(&self, words: &[&str]) -> Output {
        let output = self.command(words).output();
        output.expect("umpire can be started")
    }

    /// What such a command prints, which has to end well.
    pub(crate) fn printed(&self, words: &[&str]) -> String {
        let output = self.tool(words);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {told}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// Ends the VM as Ctrl-C does.
    pub(crate) fn stop(&mut self) {
        signal(&self.child, "-INT");
        let _ = self.child.wait();
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal to a child.
pub(crate) fn signal(child: &Child, which: &str) {
    let sent = Command::new("kill")
        .args([which, &child.id().to_string()])
        .status();
    assert!(sent.is_ok_and(|status| status.success()));
}
