//! The same run in several processes that have little else in common: counts are to be equal.

use std::collections::VecDeque;
use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::hint::spin_loop;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::NamedTempFile;
use umpire_count::Record;
use umpire_count::compare::{Comparison, Gate};

use super::ended::{Ended, Who, failed};
use super::job::Errand;
use super::kernel::Choice;
use super::report;
use super::store::Store;
use crate::exit::{UserError, complain};
use crate::flags::CountFlags;

/// Runs it as often as the options say. The first run is as it would be alone, and its program's
/// output is the command's; the others have another cache, in which they boot a machine of their
/// own, another working folder, another user's name, and a processor that has something else to do.
///
/// The record of the first one, if all were equal; else how the command ends.
pub(super) fn run(
    flags: &CountFlags,
    store: &Store,
    kernel: &Choice,
    errand: &Errand,
    interrupted: &AtomicBool,
) -> Result<Result<Record, Ended>, UserError> {
    let unusable = |error| failed(format!("-r: {error}"));
    let work = store.partial().map_err(unusable)?;
    let variables = work.path().join("variables");
    fs::write(&variables, errand.job.environment.join(&0)).map_err(unusable)?;
    let mut stdin = NamedTempFile::new_in(work.path()).map_err(unusable)?;
    stdin.write_all(&errand.stdin).map_err(unusable)?;
    let runs = Runs {
        flags,
        kernel,
        errand,
        work: work.path(),
        stdin: stdin.path(),
        variables: &variables,
        interrupted,
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
        regions_alone: false,
    };
    let mut text = Vec::new();
    Comparison::of(first, other, &gate)
        .write("the first run", &mut text)
        .map_err(failed)?;
    // Where nobody reads it the status says enough.
    let _ = io::stderr().write_all(&text);
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
    variables: &'a Path,
    interrupted: &'a AtomicBool,
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
            let ended = self.to_its_end(&mut command, number > 1);
            busy.store(false, Ordering::Relaxed);
            ended
        });
        let ended = ended.map_err(|error| failed(format!("-r: umpire cannot be run: {error}")))?;
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
        // Everybody can read arguments; a file is the user's own.
        command.arg("--env-file").arg(self.variables);
        for path in &self.errand.given.with {
            command.arg("--with").arg(path);
        }
        command.arg("--chdir").arg(&self.errand.given.folder);
        command.arg("--memory").arg(guest.memory.to_string());
        if self.flags.by_function() {
            command.arg("--functions");
        }
        if self.flags.by_context() {
            command.arg("--keep-contexts");
        }
        let collect = self.flags.collect.collect();
        for (name, on) in [
            ("--instr-atstart", collect.instrumented),
            ("--collect-atstart", collect.collected),
        ] {
            command.args([name, if on { "yes" } else { "no" }]);
        }
        for function in &collect.toggles {
            command.args(["--toggle-collect", function]);
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

    /// Runs it, and ends it if this process is to end. Of one that is quiet only its own trouble is
    /// heard.
    fn to_its_end(&self, command: &mut Command, quiet: bool) -> io::Result<ExitStatus> {
        if quiet {
            command.stdout(Stdio::null()).stderr(Stdio::piped());
        }
        // A terminal's Ctrl-C is this process's alone, which hands it on once: a second one ends at
        // once, with nothing removed.
        let mut child = command.process_group(0).spawn()?;
        let said = child.stderr.take();
        let tail = said.map(|said| thread::spawn(move || tail_of(said)));
        let mut is_told = false;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if self.interrupted.load(Ordering::Relaxed) && !is_told {
                is_told = true;
                // It removes what it has made, and says how it ended.
                kill_process(Pid::from_child(&child), Signal::TERM)?;
            }
            thread::sleep(Duration::from_millis(20));
        };
        let tail = tail.and_then(|thread| thread.join().ok());
        if status.code() == Some(125) {
            io::stderr().write_all(&tail.unwrap_or_default())?;
        }
        Ok(status)
    }
}

/// The last bytes of what somebody says.
fn tail_of(mut said: impl Read) -> Vec<u8> {
    const MOST: usize = 16 << 10;
    let mut tail = VecDeque::new();
    let mut piece = [0; 4096];
    while let Ok(read) = said.read(&mut piece) {
        if read == 0 {
            break;
        }
        tail.extend(piece.iter().take(read));
        let rest = tail.len().saturating_sub(MOST);
        tail.drain(..rest);
    }
    tail.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_is_the_end() {
        let all: Vec<u8> = (0..100_000u32)
            .map(|number| number.to_le_bytes()[0])
            .collect();
        assert_eq!(tail_of(&all[..]), &all[all.len() - (16 << 10)..]);
        assert_eq!(tail_of(&b"x"[..]), b"x");
    }
}
