//! For how long a tool looks, and a command that runs meanwhile.

use std::ffi::OsString;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use clap::Args;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::duration::Span;
use crate::error::host;
use crate::wait::{Waiter, Woken};
use crate::{Completion, ToolError};

/// What a waiter calls the command; whatever else a tool waits for has small numbers.
const COMMAND: usize = usize::MAX - 1;
/// How long a command may go on after Ctrl-C before it is told to end.
const PATIENCE: Duration = Duration::from_secs(1);
/// The exit status of a command that SIGTERM ended, as a shell has it.
const TERMINATED: u8 = 128 + 15;

/// How long a tool looks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Until {
    /// Until Ctrl-C, or the end of the VM.
    #[default]
    Stopped,
    /// For so long.
    Passed(Duration),
    /// While this command runs: program and arguments.
    CommandEnds(Vec<OsString>),
}

/// How long a tool looks, as somebody says it.
#[derive(Clone, Debug, Default, Args)]
#[group(id = "until", multiple = false)]
pub struct UntilOptions {
    /// How long: 5s, 500ms, 2m [default: until Ctrl-C or the end of the VM]
    #[arg(long = "for", value_name = "TIME")]
    pub time: Option<Span>,
    /// As long as this command runs on the host; its status is that of this program. It begins
    /// at --, or at the first word without a hyphen
    #[arg(value_name = "COMMAND", trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

impl UntilOptions {
    /// How long that is.
    ///
    /// # Errors
    /// The command is a time, which has an option of its own.
    pub fn until(&self) -> Result<Until, ToolError> {
        if let Some(time) = self.time {
            return Ok(Until::Passed(time.0));
        }
        let time = self.command.first().and_then(|word| word.to_str());
        match (self.command.len(), time) {
            (0, _) => Ok(Until::Stopped),
            (1, Some(time)) if time.parse::<Span>().is_ok() => Err(ToolError::Input(format!(
                "'{time}' is no command; to look for a time, give --for {time}"
            ))),
            _ => Ok(Until::CommandEnds(self.command.clone())),
        }
    }
}

/// What ends a tool's look besides the VM's end.
#[derive(Debug)]
pub(crate) struct Limit {
    deadline: Option<Instant>,
    command: Option<RunningCommand>,
    /// The command is told to end then.
    times_out: Option<Instant>,
    completion: Completion,
}

impl Limit {
    /// From now on.
    ///
    /// # Errors
    /// The command cannot be started.
    pub(crate) fn begin(until: &Until, waiter: &Waiter) -> Result<Self, ToolError> {
        Self::begin_with(until, waiter, Duration::ZERO, CommandOutput::Own)
    }

    /// A command begins now, and writes there; a time begins after the delay.
    ///
    /// # Errors
    /// The command cannot be started.
    pub(crate) fn begin_with(
        until: &Until,
        waiter: &Waiter,
        delay: Duration,
        output: CommandOutput,
    ) -> Result<Self, ToolError> {
        let (deadline, command) = match until {
            Until::Stopped => (None, None),
            Until::Passed(duration) => (Some(Instant::now() + delay + *duration), None),
            Until::CommandEnds(words) => (None, RunningCommand::start(words, waiter, output)?),
        };
        Ok(Self {
            deadline,
            command,
            times_out: None,
            completion: Completion::Complete,
        })
    }

    /// Moves the end of the time to look, where it is a time, since looking begins later.
    pub(crate) fn postpone(&mut self, by: Duration) {
        self.deadline = self.deadline.map(|at| at + by);
    }

    /// It is over after `time` from now at the latest: a command that still runs then is told
    /// to end, and how it ends by that is no failure.
    pub(crate) fn end_after(&mut self, time: Duration) {
        let at = Instant::now() + time;
        match &mut self.command {
            Some(command) => {
                command.end_by(at);
                self.times_out = Some(at);
            }
            None => self.deadline = Some(self.deadline.map_or(at, |deadline| deadline.min(at))),
        }
    }

    /// Whether a command says how long, whatever becomes of the VM.
    pub(crate) fn is_command(&self) -> bool {
        self.command.is_some()
    }

    /// When [`Limit::is_over`] is to be asked again, at the latest.
    pub(crate) fn due(&self) -> Option<Instant> {
        let command = self.command.as_ref().and_then(RunningCommand::due);
        self.deadline.into_iter().chain(command).min()
    }

    /// Whether it is over. A command gets Ctrl-C from the terminal as well; what does not
    /// end by it is told to.
    ///
    /// # Errors
    /// The host refuses to tell.
    pub(crate) fn is_over(&mut self, woken: &Woken) -> Result<bool, ToolError> {
        if let Some(command) = &mut self.command {
            command.hear(woken);
            let Some(status) = command.status()? else {
                return Ok(false);
            };
            let late = self.times_out.is_some_and(|at| at <= Instant::now());
            self.completion = match status {
                TERMINATED if late && !command.stopped => Completion::Complete,
                status => Completion::Command(status),
            };
            return Ok(true);
        }
        if woken.stop && self.deadline.is_some() {
            self.completion = Completion::CutShort;
        }
        Ok(woken.stop || self.deadline.is_some_and(|at| at <= Instant::now()))
    }

    /// How the look has ended.
    pub(crate) fn completion(&self) -> Completion {
        self.completion
    }
}

/// Where the output of a command goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandOutput {
    /// To this program's standard output.
    Own,
    /// To its standard error, since its standard output has something else.
    Error,
}

/// A command of the user's.
#[derive(Debug)]
pub(crate) struct RunningCommand {
    child: Child,
    /// What `waiter` waits for.
    _pidfd: OwnedFd,
    /// When it is told to end.
    ends: Option<Instant>,
    /// Ctrl-C came.
    stopped: bool,
}

impl RunningCommand {
    /// Starts `words`, if there are any; `waiter` wakes at its end, by [`COMMAND`].
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn start(
        words: &[OsString],
        waiter: &Waiter,
        output: CommandOutput,
    ) -> Result<Option<Self>, ToolError> {
        let Some((program, arguments)) = words.split_first() else {
            return Ok(None);
        };
        let mut command = Command::new(program);
        command.args(arguments);
        if output == CommandOutput::Error {
            let error = std::io::stderr().as_fd().try_clone_to_owned();
            command.stdout(error.map_err(host("starting the command"))?);
        }
        let started = command.spawn();
        let mut child = started.map_err(|error| {
            let program = program.display();
            ToolError::Input(format!("'{program}' cannot be started: {error}"))
        })?;
        let watched = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        let added = watched.map_err(Into::into).and_then(|fd| {
            waiter.add(&fd, COMMAND)?;
            Ok(fd)
        });
        match added {
            Ok(pidfd) => Ok(Some(Self {
                child,
                _pidfd: pidfd,
                ends: None,
                stopped: false,
            })),
            Err(error) => {
                // Nobody would wait for it.
                let _ = child.kill().and_then(|()| child.wait());
                Err(host("watching the command")(error))
            }
        }
    }

    /// Takes in what came: after Ctrl-C it is told to end in time.
    pub(crate) fn hear(&mut self, woken: &Woken) {
        let now = Instant::now();
        if woken.stop {
            self.stopped = true;
            self.end_by(now + PATIENCE);
        }
        if self.ends.is_some_and(|ends| ends <= now) {
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
            self.ends = Some(now + PATIENCE);
        }
    }

    /// It is told to end at this moment, if not before.
    fn end_by(&mut self, at: Instant) {
        self.ends = Some(self.ends.map_or(at, |ends| ends.min(at)));
    }

    /// When [`RunningCommand::hear`] is to be called again, at the latest.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.ends
    }

    /// Its exit status once it has ended, as a shell has it.
    ///
    /// # Errors
    /// The host refuses to tell.
    pub(crate) fn status(&mut self) -> Result<Option<u8>, ToolError> {
        let ended = self.child.try_wait();
        let ended = ended.map_err(host("waiting for the command"))?;
        Ok(ended.map(|status| {
            let signal = status.signal().map(|signal| 128 + signal);
            let code = status.code().or(signal).unwrap_or(1);
            u8::try_from(code).unwrap_or(u8::MAX)
        }))
    }

    /// Waits until it has ended.
    pub(crate) fn wait(&mut self) {
        let _ = self.child.wait();
    }
}

impl Drop for RunningCommand {
    /// A tool that failed leaves no command behind that it has started and nobody watches.
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    fn status_of(until: &Until, stop: bool) -> Completion {
        let waiter = Waiter::new().unwrap();
        let mut limit = Limit::begin(until, &waiter).unwrap();
        let mut woken = Woken {
            stop,
            ..Woken::default()
        };
        while !limit.is_over(&woken).unwrap() {
            woken = waiter.wait(limit.due()).unwrap();
        }
        limit.completion()
    }

    #[test]
    fn a_command_says_how_long_and_has_a_status() {
        let command = |text| Until::CommandEnds(words(text));
        assert_eq!(status_of(&command("true"), false), Completion::Command(0));
        assert_eq!(status_of(&command("false"), false), Completion::Command(1));
        // One that does not hear Ctrl-C is told to end after a second.
        assert_eq!(
            status_of(&command("sleep 60"), true),
            Completion::Command(128 + 15)
        );
        let waiter = Waiter::new().unwrap();
        let missing = Limit::begin(&command("/no/such/program"), &waiter);
        assert!(
            missing
                .unwrap_err()
                .to_string()
                .contains("'/no/such/program'")
        );
    }

    /// How a command ends that may run for so many milliseconds.
    fn check_late(command: &str, ms: u64, expected: Completion) {
        let waiter = Waiter::new().unwrap();
        let until = Until::CommandEnds(words(command));
        let mut limit = Limit::begin(&until, &waiter).unwrap();
        limit.end_after(Duration::from_millis(ms));
        let mut woken = Woken::default();
        while !limit.is_over(&woken).unwrap() {
            woken = waiter.wait(limit.due()).unwrap();
        }
        assert_eq!(limit.completion(), expected, "{command}");
    }

    #[test]
    fn a_command_that_takes_too_long_is_ended_without_blame() {
        let began = Instant::now();
        check_late("sleep 60", 20, Completion::Complete);
        assert!(began.elapsed() < Duration::from_secs(30));
        check_late("false", 60_000, Completion::Command(1));
        let script = std::env::temp_dir().join(format!("umpire-late-{}", std::process::id()));
        // One that has its own way to end has its own status.
        std::fs::write(&script, "trap 'exit 3' TERM; while :; do sleep 0.01; done").unwrap();
        check_late(
            &format!("sh {}", script.display()),
            300,
            Completion::Command(3),
        );
        let _ = std::fs::remove_file(&script);
    }

    #[test]
    fn a_time_passes_or_is_cut_short() {
        let short = Until::Passed(Duration::from_millis(5));
        assert_eq!(status_of(&short, false), Completion::Complete);
        let long = Until::Passed(Duration::from_secs(600));
        assert_eq!(status_of(&long, true), Completion::CutShort);
        assert_eq!(status_of(&Until::Stopped, true), Completion::Complete);
    }
}
