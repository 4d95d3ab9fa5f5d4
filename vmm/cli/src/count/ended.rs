//! How `umpire count` ends, and who says so.

use std::fs;
use std::path::Path;

use vmm::count::Met;

use crate::exit::{ExitStatus, UserError, complain};

/// Who ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    /// The program, with a status of its own.
    Program,
    /// A signal ended the program.
    Signal,
    /// A count is over the threshold.
    Gate,
    /// `--timeout`.
    Timeout,
    /// Ctrl-C or SIGTERM.
    Interrupted,
    /// It could not be run or counted.
    Umpire,
}

impl From<Met> for Who {
    fn from(met: Met) -> Self {
        match met {
            Met::Time => Who::Timeout,
            Met::Interrupt => Who::Interrupted,
        }
    }
}

/// The end of the command: who ended it, and its status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) who: Who,
    pub(super) status: u8,
}

impl Ended {
    /// By the program, or by itself after it did what was asked for.
    pub(super) fn by_program(status: u8) -> Self {
        let who = Who::Program;
        Ended { who, status }
    }

    /// By something else than the program.
    pub(super) fn by(who: Who) -> Self {
        let status = match who {
            Who::Program | Who::Signal => ExitStatus::SUCCESS,
            Who::Gate => ExitStatus::OVER_THRESHOLD,
            Who::Timeout => ExitStatus::TIMED_OUT,
            Who::Interrupted => ExitStatus::INTERRUPTED,
            Who::Umpire => ExitStatus::COUNT_FAILED,
        };
        let status = status.code();
        Ended { who, status }
    }

    /// The line of `--status-file`: `program 0`.
    pub(super) fn line(self) -> String {
        let word = match self.who {
            Who::Program => "program",
            Who::Signal => "signal",
            Who::Gate => "gate",
            Who::Timeout => "timeout",
            Who::Interrupted => "interrupted",
            Who::Umpire => "umpire",
        };
        format!("{word} {}\n", self.status)
    }

    /// Writes it to the file of `--status-file`. One that cannot be written is no success.
    pub(super) fn tell(self, file: Option<&Path>) -> u8 {
        let Some(file) = file else { return self.status };
        match fs::write(file, self.line()) {
            Ok(()) => self.status,
            Err(error) => {
                complain(&format_args!("--status-file {}: {error}", file.display()));
                ExitStatus::COUNT_FAILED.code()
            }
        }
    }
}

/// What went wrong, with the status for it.
pub(super) fn failed(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> UserError {
    UserError::with_status(why, ExitStatus::COUNT_FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_has_its_status_and_word() {
        for (ended, status, line) in [
            (Ended::by_program(3), 3, "program 3\n"),
            (Ended::by(Who::Gate), 123, "gate 123\n"),
            (Ended::by(Who::Timeout), 124, "timeout 124\n"),
            (Ended::by(Who::Umpire), 125, "umpire 125\n"),
            (Ended::by(Who::Interrupted), 130, "interrupted 130\n"),
        ] {
            assert_eq!((ended.tell(None), ended.line().as_str()), (status, line));
        }
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("status");
        assert_eq!(Ended::by_program(0).tell(Some(&file)), 0);
        assert_eq!(fs::read_to_string(&file).expect("text"), "program 0\n");
        let gone = folder.path().join("gone/status");
        assert_eq!(Ended::by_program(0).tell(Some(&gone)), 125);
    }
}
