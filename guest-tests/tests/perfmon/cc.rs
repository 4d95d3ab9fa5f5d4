//! Programs in C, and the library that they are linked with.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use guest_tests::umpire::built_beside;

use crate::bed::PATIENCE;

/// Whether programs in C can be built here.
pub(crate) fn is_there() -> bool {
    let runs = |program: &str| {
        let mut command = Command::new(program);
        command.arg("--version").stdout(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    runs("cc") && runs(env!("CARGO"))
}

/// A file of this repository.
fn source(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .join(relative)
}

/// Where binaries go.
fn output() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// The folder of the library.
pub(crate) fn library() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| built_beside("umpire-perfmon-c"))
}

/// The binary of a program: of one of the specification's shapes, of those in the
/// folder `c` beside this file, or of the library's own checks. The compiler must have nothing to say.
pub(crate) fn compiled(name: &str) -> Result<PathBuf> {
    static DONE: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(binary) = done.get(name) {
        return Ok(binary.clone());
    }
    let file = format!("{name}.c");
    let folders = [
        "pmu-virt/perfmon/client/tests/spec",
        "pmu-virt/perfmon/capi/tests",
        "guest-tests/tests/perfmon/c",
    ];
    let mut paths = folders.map(|folder| source(folder).join(&file)).into_iter();
    let path = paths
        .find(|path| path.exists())
        .with_context(|| format!("there is no {file}"))?;
    let binary = output().join(format!("perfmon-{name}"));
    let library = library();
    let told = Command::new("cc")
        .args(["-std=gnu99", "-O2", "-g", "-Wall", "-Wextra", "-Werror"])
        .arg("-I")
        .arg(source("pmu-virt/perfmon/client/include"))
        .arg("-I")
        .arg(source("pmu-virt/perfmon/client/tests/spec"))
        .arg(path)
        .arg("-o")
        .arg(&binary)
        .arg("-L")
        .arg(library)
        .args(["-lumpire_perfmon", "-lpthread"])
        .arg(format!("-Wl,-rpath,{}", library.display()))
        .output()
        .context("cc")?;
    let errors = String::from_utf8_lossy(&told.stderr);
    ensure!(told.status.success(), "{file}: {errors}");
    done.insert(name.to_owned(), binary.clone());
    Ok(binary)
}

/// A program that runs. It is killed if it is dropped before its end.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    log: tempfile::NamedTempFile,
    what: String,
}

impl Running {
    pub(crate) fn start(
        name: &str,
        arguments: &[&str],
        environment: &[(&str, String)],
    ) -> Result<Self> {
        let log = tempfile::NamedTempFile::new()?;
        let child = Command::new(compiled(name)?)
            .args(arguments)
            .envs(environment.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::piped())
            .stdout(log.reopen()?)
            .stderr(log.as_file().try_clone()?)
            .spawn()?;
        let what = format!("{name} {}", arguments.join(" "));
        Ok(Self { child, log, what })
    }

    /// What it has said so far.
    pub(crate) fn said(&self) -> Result<String> {
        Ok(std::fs::read_to_string(self.log.path())?)
    }

    /// It may go on behind the point at which it reads its input.
    pub(crate) fn go_on(&mut self) {
        self.child.stdin.take();
    }

    /// SIGKILL, and its end.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Whether it has ended; that is to be with success.
    pub(crate) fn has_ended(&mut self) -> Result<bool> {
        let Some(status) = self.child.try_wait()? else {
            return Ok(false);
        };
        ensure!(
            status.success(),
            "{}: {status}\n{}",
            self.what,
            self.said()?
        );
        Ok(true)
    }

    /// Waits for its end, which is to be with success.
    pub(crate) fn join(mut self) -> Result<String> {
        let until = Instant::now() + 3 * PATIENCE;
        while !self.has_ended()? {
            if Instant::now() > until {
                bail!("{} hangs\n{}", self.what, self.said()?);
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        self.said()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
