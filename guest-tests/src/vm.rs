//! A VM that the tools of a test look at: its counters are simulated, and its guest
//! spins or halts.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use iced_x86::code_asm::CodeAssembler;

use crate::kernel::{Kernel, Protocol, halt_forever, spin_forever};
use crate::micro::Written;
use crate::umpire::on_emu;

/// How long anybody waits for anything.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running `umpire run`, which ends when this is dropped.
#[derive(Debug)]
pub struct Vm {
    program: PathBuf,
    child: Child,
    folder: TempDir,
    _kernel: Kernel,
}

/// A guest that spins, in long mode.
///
/// # Panics
/// It cannot be written.
#[must_use]
pub fn spinning() -> Kernel {
    Kernel::new(Protocol::Linux64, |a, _| spin_forever(a)).expect("a kernel")
}

impl Vm {
    /// Boots it on `program` with `rates` for the simulated counters, and with more
    /// flags of `umpire run`, which may name files of the VM's folder.
    ///
    /// # Panics
    /// It does not start, or serves no socket.
    #[must_use]
    pub fn boot(program: &Path, rates: &str, flags: &[&str]) -> Self {
        Self::boot_kernel(program, rates, flags, spin_forever)
    }

    /// Boots one whose guest does nothing but halt. Processors beyond the first are
    /// never started.
    ///
    /// # Panics
    /// It does not start, or serves no socket.
    #[must_use]
    pub fn boot_idle(program: &Path, rates: &str, flags: &[&str]) -> Self {
        Self::boot_kernel(program, rates, flags, halt_forever)
    }

    /// Boots one whose guest is `body`, in long mode.
    ///
    /// # Panics
    /// It does not start, or serves no socket.
    #[must_use]
    pub fn boot_kernel(
        program: &Path,
        rates: &str,
        flags: &[&str],
        body: fn(&mut CodeAssembler) -> Written,
    ) -> Self {
        let engine: &[&str] = if on_emu() { &["--engine", "emu"] } else { &[] };
        let counters = ["--counters", "sim=rates.toml"];
        let flags = [engine, &counters, flags].concat();
        Self::boot_with(program, rates, &flags, body)
    }

    /// Boots one on the processor in software, whose counts are those of the instructions of
    /// `body`.
    ///
    /// # Panics
    /// It does not start, or serves no socket.
    #[must_use]
    pub fn boot_counting(
        program: &Path,
        flags: &[&str],
        body: fn(&mut CodeAssembler) -> Written,
    ) -> Self {
        let flags = [&["--engine", "emu"], flags].concat();
        Self::boot_with(program, "", &flags, body)
    }

    fn boot_with(
        program: &Path,
        rates: &str,
        flags: &[&str],
        body: fn(&mut CodeAssembler) -> Written,
    ) -> Self {
        let policy: &[&str] = if flags.contains(&"--host-policy") {
            &[]
        } else {
            &["--host-policy", "host-first"]
        };
        let model: &[&str] = if flags.contains(&"--pmu") {
            &[]
        } else {
            &["--pmu", "amd-core", "--cpu-vendor", "amd"]
        };
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("rates.toml"), rates).expect("a file");
        let kernel = Kernel::new(Protocol::Linux64, |a, _| body(a)).expect("a kernel");
        let console = std::fs::File::create(folder.path().join("console")).expect("a file");
        let child = Command::new(program)
            .current_dir(folder.path())
            .args(["run", "--memory", "32", "--timeout", "60"])
            .args(model)
            .args(["--control", "vm.sock"])
            .arg("--kernel")
            .arg(kernel.path())
            .args(policy)
            .args(flags)
            .stdin(Stdio::null())
            .stdout(console)
            .spawn()
            .expect("umpire can be started");
        let vm = Self {
            program: program.to_owned(),
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

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where it serves its tools.
    #[must_use]
    pub fn socket(&self) -> String {
        self.path("vm.sock").display().to_string()
    }

    /// A file that goes with the VM.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// What the guest has printed so far.
    ///
    /// # Panics
    /// The file is gone.
    #[must_use]
    pub fn console(&self) -> String {
        std::fs::read_to_string(self.path("console")).expect("the console")
    }

    /// `umpire` with these words, looking at this VM.
    #[must_use]
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(words).current_dir(self.folder.path());
        command.env("UMPIRE_PERFMON", self.socket());
        command.env_remove("XDG_RUNTIME_DIR");
        command
    }

    /// Runs such a command to its end.
    ///
    /// # Panics
    /// It cannot be started.
    #[must_use]
    pub fn tool(&self, words: &[&str]) -> Output {
        let output = self.command(words).output();
        output.expect("umpire can be started")
    }

    /// What such a command prints; of `stat` the counts, which go to standard error as those of
    /// perf stat do, without the notes beside them.
    ///
    /// # Panics
    /// It fails.
    #[must_use]
    pub fn printed(&self, words: &[&str]) -> String {
        let output = self.tool(words);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {told}");
        if words.first() == Some(&"stat") && output.stdout.is_empty() {
            let is_note = |line: &&str| {
                let text = line.strip_prefix("# ").unwrap_or(line);
                text.starts_with("umpire: ")
            };
            let counts = told.split_inclusive('\n').filter(|line| !is_note(line));
            return counts.collect();
        }
        String::from_utf8(output.stdout).expect("text")
    }

    /// Sends a signal to it.
    ///
    /// # Panics
    /// It cannot be sent.
    pub fn signal(&self, which: &str) {
        signal(&self.child, which);
    }

    /// Ends the VM as Ctrl-C does.
    pub fn stop(&mut self) {
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
///
/// # Panics
/// It cannot be sent.
pub fn signal(child: &Child, which: &str) {
    let sent = Command::new("kill")
        .args([which, &child.id().to_string()])
        .status();
    assert!(sent.is_ok_and(|status| status.success()));
}
