//! How `umpire count` ends, and who says so.

use std::error::Error;
use std::fs;
use std::io;
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
    /// Ctrl-C, SIGTERM or SIGHUP.
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

    /// The same, where it was interrupted with the status that a shell has of the signal: 130 after
    /// Ctrl-C, 143 after SIGTERM.
    pub(super) fn after_signal(self, signal: usize) -> Self {
        match (self.who, u8::try_from(signal)) {
            (Who::Interrupted, Ok(signal @ 1..)) => {
                let status = signal.saturating_add(128);
                Ended { status, ..self }
            }
            _ => self,
        }
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
                let error = with_advice(&error);
                complain(&format_args!("--status-file {}: {error}", file.display()));
                ExitStatus::COUNT_FAILED.code()
            }
        }
    }
}

/// An error, and what to do where it comes of a full disk.
pub(super) fn with_advice(error: &(dyn Error + 'static)) -> String {
    let is_full = |one: &(dyn Error + 'static)| {
        let kind = one.downcast_ref::<io::Error>().map(io::Error::kind);
        let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
        kind.is_some_and(|kind| full.contains(&kind))
    };
    let mut cause = Some(error);
    while let Some(one) = cause {
        if is_full(one) {
            return format!("{error}: make room on its disk, or name another place");
        }
        cause = one.source();
    }
    error.to_string()
}

/// What went wrong, with the status for it.
pub(super) fn failed(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> UserError {
    UserError::with_status(why, ExitStatus::COUNT_FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_has_advice() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let advised = |error: &(dyn Error + 'static)| with_advice(error).contains("make room");
        assert!(advised(&full()));
        let within = guest_files::UnpackError::Here {
            name: Vec::new(),
            error: full(),
        };
        assert!(advised(&within));
        assert!(!advised(&io::Error::from(io::ErrorKind::NotFound)));
    }

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
        for (signal, line) in [
            (0, "interrupted 130\n"),
            (2, "interrupted 130\n"),
            (15, "interrupted 143\n"),
        ] {
            let ended = Ended::by(Who::Interrupted).after_signal(signal);
            assert_eq!(ended.line(), line);
        }
        assert_eq!(Ended::by(Who::Gate).after_signal(15).status, 123);
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("status");
        assert_eq!(Ended::by_program(0).tell(Some(&file)), 0);
        assert_eq!(fs::read_to_string(&file).expect("text"), "program 0\n");
        let gone = folder.path().join("gone/status");
        assert_eq!(Ended::by_program(0).tell(Some(&gone)), 125);
    }
}
