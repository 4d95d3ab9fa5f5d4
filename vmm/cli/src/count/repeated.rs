//! The same run in several processes that have little else in common: counts are to be equal.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::hint::spin_loop;
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tempfile::{NamedTempFile, TempDir};
use umpire_count::Record;
use umpire_count::compare::{Comparison, Gate};

use super::ended::{Ended, Who, failed};
use super::job::Errand;
use super::kernel::Choice;
use super::report;
use crate::exit::{UserError, complain};
use crate::flags::CountFlags;

/// Runs it as often as the options say. The first run is as it would be alone, and its program's
/// output is the command's; the others have another cache, in which they boot a machine of their
/// own, another working folder, another user's name, and a processor that has something else to do.
///
/// The record of the first one, if all were equal; else how the command ends.
pub(super) fn run(
    flags: &CountFlags,
    kernel: &Choice,
    errand: &Errand,
) -> Result<Result<Record, Ended>, UserError> {
    let unusable = |error| failed(format!("-r: {error}"));
    let work = TempDir::new().map_err(unusable)?;
    let mut stdin = NamedTempFile::new_in(work.path()).map_err(unusable)?;
    stdin.write_all(&errand.stdin).map_err(unusable)?;
    let runs = Runs {
        flags,
        kernel,
        errand,
        work: work.path(),
        stdin: stdin.path(),
    };
    let mut first: Option<Record> = None;
    for number in 1..=flags.repeat {
        if number == 2 {
            complain(&"the second run boots a machine of its own …");
        }
        let record = match runs.one(number)? {
            Ok(record) => record,
            Err(ended) => return Ok(Err(ended)),
        };
        match &first {
            None => first = Some(record),
            Some(first) => equal(first, &record, number)?,
        }
    }
    let runs = flags.repeat;
    complain(&format_args!("{runs} runs, each count the same"));
    first.map(Ok).ok_or_else(|| failed("-r: nothing was run"))
}

/// Counts of each thread, system call and function are those of the first run.
fn equal(first: &Record, other: &Record, number: u8) -> Result<(), UserError> {
    if first.counts == other.counts && first.outcome == other.outcome {
        return Ok(());
    }
    let gate = Gate {
        events: &Gate::DEFAULT,
        threshold: None,
        kernel: true,
    };
    let mut text = Vec::new();
    Comparison::of(first, other, &gate)
        .write("the first run", &mut text)
        .map_err(failed)?;
    // Where nobody reads it the status says enough.
    let _ = std::io::stderr().write_all(&text);
    Err(failed(format!(
        "run {number} counted otherwise than the first one"
    )))
}

struct Runs<'a> {
    flags: &'a CountFlags,
    kernel: &'a Choice,
    errand: &'a Errand,
    work: &'a Path,
    stdin: &'a Path,
}

impl Runs<'_> {
    fn one(&self, number: u8) -> Result<Result<Record, Ended>, UserError> {
        let [record, status] =
            ["record", "status"].map(|it| self.work.join(format!("{it}{number}")));
        let mut command = Command::new("/proc/self/exe");
        command
            .args(["count", "--output", "/dev/null", "--save"])
            .arg(&record);
        command.arg("--status-file").arg(&status);
        self.options(&mut command, number);
        let input = File::open(self.stdin).map_err(failed)?;
        command.stdin(input);
        let busy = AtomicBool::new(number > 1);
        let ended = thread::scope(|threads| {
            threads.spawn(|| {
                while busy.load(Ordering::Relaxed) {
                    spin_loop();
                }
            });
            let ended = if number > 1 {
                quietly(&mut command)
            } else {
                command.status()
            };
            busy.store(false, Ordering::Relaxed);
            ended
        });
        let ended =
            ended.map_err(|error| failed(format!("-r: umpire cannot be started: {error}")))?;
        let who = fs::read_to_string(&status).unwrap_or_default();
        match who.split(' ').next() {
            Some("program" | "signal") => report::read(&record).map(Ok),
            Some("timeout") => Ok(Err(Ended::by(Who::Timeout))),
            Some("interrupted") => Ok(Err(Ended::by(Who::Interrupted))),
            // It has said why.
            Some("umpire") => Ok(Err(Ended::by(Who::Umpire))),
            _ => Err(failed(format!("run {number} ended by {ended}"))),
        }
    }

    /// The options of one run, by absolute paths.
    fn options(&self, command: &mut Command, number: u8) {
        let CountFlags { guest, .. } = self.flags;
        let word = |bytes: &Vec<u8>| OsString::from_vec(bytes.clone());
        for variable in &self.errand.job.environment {
            command.arg("--env").arg(word(variable));
        }
        for path in &self.errand.given.with {
            command.arg("--with").arg(path);
        }
        command.arg("--chdir").arg(&self.errand.given.folder);
        command.arg("--memory").arg(guest.memory.to_string());
        if self.flags.by_function() {
            command.arg("--functions");
        }
        if guest.tty {
            command.arg("--tty");
        }
        if let Some(time) = guest.timeout {
            command
                .arg("--timeout")
                .arg(format!("{}s", time.0.as_secs_f64()));
        }
        if number == 1 {
            let here = env::current_dir().unwrap_or_default();
            for (name, path) in [("--out", &guest.out), ("--cache", &self.flags.store.cache)] {
                if let Some(path) = path {
                    command.arg(name).arg(here.join(path));
                }
            }
            if let Some(path) = &self.flags.store.kernel {
                command.arg("--kernel").arg(here.join(path));
            }
        } else {
            // The machine of the second run serves those behind it.
            command.arg("--cache").arg(self.work.join("cache"));
            command.arg("--kernel").arg(self.kernel.file());
            command.current_dir(self.work);
            for name in ["USER", "LOGNAME"] {
                command.env(name, "somebody-else");
            }
            command.env("HOME", self.work);
        }
        let arguments = self.errand.job.arguments.iter().map(word);
        command.arg("--").args(arguments);
    }
}

/// Runs a command of whose output nobody hears, unless it fails itself.
fn quietly(command: &mut Command) -> std::io::Result<ExitStatus> {
    let output = command
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()?;
    let is_ours = output.status.code() == Some(125);
    if is_ours {
        std::io::stderr().write_all(&output.stderr)?;
    }
    Ok(output.status)
}
