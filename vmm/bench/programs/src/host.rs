//! On the host's processor, and under Callgrind.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use thiserror::Error;

use crate::{Program, as_command};

/// A program did not run.
#[derive(Debug, Error)]
pub enum HostError {
    /// There is no file to execute.
    #[error("the programs cannot be written down: {0}")]
    Write(io::Error),
    /// It cannot be executed.
    #[error("{command} cannot be started: {error}")]
    Start {
        command: &'static str,
        error: io::Error,
    },
    /// It ended otherwise than well.
    #[error("{0}")]
    Ended(String),
    /// It said something else than what it should.
    #[error("Callgrind does not say how many instructions there were: {0}")]
    Count(String),
}

/// How a program ran.
#[derive(Clone, Copy, Debug)]
pub struct HostRun {
    /// What it found out.
    pub result: u64,
    /// CPU time of its rounds.
    pub time: Duration,
}

/// How it ran under Callgrind.
#[derive(Clone, Copy, Debug)]
pub struct Callgrind {
    /// Its result, and Callgrind's CPU time for its rounds.
    pub run: HostRun,
    /// Instructions from the first to the last.
    pub instructions: u64,
}

/// The programs, as a file for as long as this is there.
#[derive(Debug)]
pub struct ProgramFile {
    folder: TempDir,
}

impl ProgramFile {
    /// Writes the file.
    ///
    /// # Errors
    /// There is no place for it.
    pub fn new(image: &[u8]) -> Result<Self, HostError> {
        let folder = TempDir::new().map_err(HostError::Write)?;
        let file = ProgramFile { folder };
        fs::write(file.path(), image).map_err(HostError::Write)?;
        let mode = Permissions::from_mode(0o700);
        fs::set_permissions(file.path(), mode).map_err(HostError::Write)?;
        Ok(file)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("programs")
    }

    /// Runs a program on this processor.
    ///
    /// # Errors
    /// Why it did not end well.
    pub fn run(&self, program: &Program, rounds: u64) -> Result<HostRun, HostError> {
        let command = Command::new(self.path());
        Ok(outcome("the program", command, program, rounds)?.0)
    }

    /// Runs a program under Callgrind.
    ///
    /// # Errors
    /// Why it did not end well; there may be no Valgrind.
    pub fn run_in_callgrind(&self, program: &Program, rounds: u64) -> Result<Callgrind, HostError> {
        let mut command = Command::new("valgrind");
        command
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
            .arg(self.path());
        let (run, output) = outcome("valgrind", command, program, rounds)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let count = said.lines().find_map(|line| {
            let (_, number) = line.split_once("Collected :")?;
            number.trim().parse().ok()
        });
        let instructions = count.ok_or_else(|| HostError::Count(said.trim().to_owned()))?;
        Ok(Callgrind { run, instructions })
    }
}

fn outcome(
    what: &'static str,
    mut command: Command,
    program: &Program,
    rounds: u64,
) -> Result<(HostRun, Output), HostError> {
    let start = |error| HostError::Start {
        command: what,
        error,
    };
    command
        .args(as_command(program, rounds))
        .stdin(Stdio::null());
    let output = command.output().map_err(start)?;
    let words = (
        output.stdout.first_chunk().copied().map(u64::from_le_bytes),
        output.stdout.last_chunk().copied().map(u64::from_le_bytes),
    );
    match words {
        (Some(result), Some(nanos)) if output.status.success() => {
            let time = Duration::from_nanos(nanos);
            Ok((HostRun { result, time }, output))
        }
        _ => {
            let said = String::from_utf8_lossy(&output.stderr);
            let (name, said) = (program.name, said.trim());
            Err(HostError::Ended(format!(
                "{what} ended with {} in {name}: {said}",
                output.status
            )))
        }
    }
}
