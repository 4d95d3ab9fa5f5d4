//! The machine as tests and the command line use it: choose its shape, give it a [`Run`].

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::cache::Cache;
use super::error::L1Error;
use super::initramfs;
use super::packages::Set;
use super::qemu::Shape;
use super::run::Run;
use super::session::{Outcome, Session, Sinks};
use super::tool::{capture, say};

/// A run with its output in memory.
#[derive(Debug, Clone)]
pub struct Output {
    /// How it ended.
    pub outcome: Outcome,
    /// The command's standard output.
    pub stdout: Vec<u8>,
    /// The command's standard error.
    pub stderr: Vec<u8>,
}

/// The L1 machine: shape, limits, and the cache that it is built from.
#[derive(Debug, Clone)]
pub struct Machine {
    shape: Shape,
    verbose: bool,
    keep: bool,
    cache: Cache,
}

impl Default for Machine {
    fn default() -> Self {
        Self::new()
    }
}

impl Machine {
    /// Two processors, 1536 MiB, 300 s, the user's cache.
    pub fn new() -> Self {
        Self {
            shape: Shape {
                memory_mib: 1536,
                smp: 2,
                icount: false,
                timeout: Duration::from_secs(300),
            },
            verbose: false,
            keep: false,
            cache: Cache::of_user(),
        }
    }

    /// Sets the memory in MiB. The kernel needs about 256 besides the command and its files.
    #[must_use]
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.shape.memory_mib = memory_mib;
        self
    }

    /// Sets the number of processors.
    #[must_use]
    pub fn smp(mut self, smp: u32) -> Self {
        self.shape.smp = smp;
        self
    }

    /// Makes virtual time repeatable: one processor, 2 ns per instruction, idle time skipped.
    #[must_use]
    pub fn icount(mut self, icount: bool) -> Self {
        self.shape.icount = icount;
        self
    }

    /// Limits a run's time, counted from QEMU's start.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.shape.timeout = timeout;
        self
    }

    /// Shows L1's console on stderr, live.
    #[must_use]
    pub fn verbose(mut self, verbose: bool) -> Self {
        self.verbose = verbose;
        self
    }

    /// Keeps initramfs and console log of each run, and prints where.
    #[must_use]
    pub fn keep(mut self, keep: bool) -> Self {
        self.keep = keep;
        self
    }

    /// Uses another cache.
    #[must_use]
    pub fn cache(mut self, cache: Cache) -> Self {
        self.cache = cache;
        self
    }

    /// Runs a command and collects its output. An L1 that stands still, or ends before the command
    /// has, is started once more.
    ///
    /// # Errors
    /// Whatever kept the command from running to its own end, a time-out excepted.
    pub fn output(&self, run: &Run) -> Result<Output, L1Error> {
        match self.output_once(run) {
            Err(error @ (L1Error::StoodStill { .. } | L1Error::Machine { .. })) => {
                say(&error.to_string());
                say("it is started once more");
                self.output_once(run)
            }
            other => other,
        }
    }

    fn output_once(&self, run: &Run) -> Result<Output, L1Error> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let outcome = self.run(run, &mut stdout, &mut stderr)?;
        Ok(Output {
            outcome,
            stdout,
            stderr,
        })
    }

    /// Runs a command and forwards its output while it runs.
    ///
    /// # Errors
    /// Whatever kept the command from running to its own end, a time-out excepted.
    pub fn run(
        &self,
        run: &Run,
        stdout: &mut (dyn Write + Send),
        stderr: &mut (dyn Write + Send),
    ) -> Result<Outcome, L1Error> {
        // Before any download, and before a machine is started for nothing.
        run.resolve()?;
        let sets = self.cache.fetch(&Set::L1)?;
        let [qemu, kernel, busybox] = [&sets[0].folder, &sets[1].folder, &sets[2].folder];
        let image = unlinked()?;
        let image = initramfs::write(image, run, kernel, busybox)?;
        let mut files = run.out.as_ref().map(|_| unlinked()).transpose()?;
        let session = Session {
            shape: self.shape,
            verbose: self.verbose,
            qemu,
            kernel: &kernel.join("vmlinuz"),
            initramfs: &image,
        };
        let result = session.run(Sinks {
            stdout,
            stderr,
            files: files.as_mut(),
        });
        if self.keep {
            keep(image, &result)?;
        }
        let outcome = result?;
        if let (Some(out), Some(files)) = (&run.out, files) {
            unpack_files(files, out)?;
        }
        Ok(outcome)
    }
}

/// A temporary file without a name: whatever happens to this process, nothing is left behind.
fn unlinked() -> Result<File, L1Error> {
    tempfile::tempfile().map_err(L1Error::file("create a file in", std::env::temp_dir()))
}

fn keep(mut image: File, result: &Result<Outcome, L1Error>) -> Result<(), L1Error> {
    let folder = tempfile::Builder::new().prefix("l1-").tempdir();
    let folder = folder.map_err(L1Error::file("create a folder in", std::env::temp_dir()))?;
    let folder = folder.keep();
    let name = folder.join("initramfs.cpio");
    let write = || L1Error::file("write", &name);
    let mut copy = File::create(&name).map_err(write())?;
    image.rewind().map_err(write())?;
    io::copy(&mut image, &mut copy).map_err(write())?;
    let console = match result {
        Ok(outcome) => outcome.console.clone(),
        Err(error) => error.to_string(),
    };
    let log = folder.join("console.log");
    fs::write(&log, console).map_err(L1Error::file("write", &log))?;
    say(&format!("kept {}", folder.display()));
    Ok(())
}

/// Unpacks the tar archive that L1 sent.
fn unpack_files(mut archive: File, out: &PathBuf) -> Result<(), L1Error> {
    let failed = || L1Error::file("read", "the files from L1");
    archive.rewind().map_err(failed())?;
    fs::create_dir_all(out).map_err(L1Error::file("create", out))?;
    let mut first = [0; 1];
    if archive.read(&mut first).map_err(failed())? == 0 {
        say("L1 sent no files back: the run ended before it could");
        return Ok(());
    }
    archive.rewind().map_err(failed())?;
    let mut copy = tempfile::NamedTempFile::new()
        .map_err(L1Error::file("create a file in", std::env::temp_dir()))?;
    io::copy(&mut archive, &mut copy).map_err(failed())?;
    let mut command = Command::new("tar");
    command
        .arg("--extract")
        .arg("--no-same-owner")
        .arg("--file")
        .arg(copy.path());
    command.arg("--directory").arg(out);
    capture(
        &mut command,
        "unpacking L1's files",
        "it unpacks what `--out` brings back",
    )
    .map(drop)
}
