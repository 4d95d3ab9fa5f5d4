//! The status that the process ends with, and the one line that says why.

use std::error::Error;
use std::fmt;
use std::io::{self, Write, stderr};
use std::process::ExitCode;

use umpire_events::one_line;

/// A process exit status.
///
/// All of these but those of `umpire count`, which runs no kernel of the user's, are even: a
/// guest's test exit gives an odd status, so the two are never mistaken for each other. See
/// [`GuestEnd::exit_status`](vmm::devices::GuestEnd::exit_status).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitStatus(u8);

impl ExitStatus {
    /// It went well; the guest ended by itself.
    pub const SUCCESS: Self = Self(0);
    /// What the user asked for cannot be done as asked: options, files, or a host
    /// that cannot do it. Nothing was started.
    pub const BAD_INPUT: Self = Self(2);
    /// The host or its KVM failed in the middle of the work.
    pub const HOST_FAILURE: Self = Self(4);
    /// The guest ended by a triple fault, or did what KVM cannot emulate, or sleeps for ever.
    pub const GUEST_FAILURE: Self = Self(6);
    /// The engine emu lacks what its CPUID announces or every processor can do: a bug of
    /// Umpire's, or an old mode that the message names.
    pub const UNIMPLEMENTED: Self = Self(8);
    /// `--timeout` passed (the status that timeout(1) uses).
    pub const TIMED_OUT: Self = Self(124);
    /// `umpire count`: a count is more than the threshold allows. All statuses but this, the next
    /// one, a time-out and an interrupt are those of the program that it ran.
    pub const OVER_THRESHOLD: Self = Self(123);
    /// `umpire count`: the program could not be run, or not counted (the status that timeout(1)
    /// uses).
    pub const COUNT_FAILED: Self = Self(125);
    /// Ctrl-C or SIGTERM.
    pub const INTERRUPTED: Self = Self(130);

    /// That of a command that was run for the user.
    pub fn of_command(status: u8) -> Self {
        Self(status)
    }

    /// The status as a number.
    pub fn code(self) -> u8 {
        self.0
    }
}

impl From<ExitStatus> for ExitCode {
    fn from(status: ExitStatus) -> Self {
        status.0.into()
    }
}

/// An error for the user: one line, and the status to end with.
#[derive(Debug)]
pub struct UserError {
    source: Box<dyn Error + Send + Sync>,
    status: ExitStatus,
}

impl UserError {
    /// Input that cannot be used: [`ExitStatus::BAD_INPUT`].
    pub fn bad_input(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::with_status(source, ExitStatus::BAD_INPUT)
    }

    /// Any error with any status.
    pub fn with_status(
        source: impl Into<Box<dyn Error + Send + Sync>>,
        status: ExitStatus,
    ) -> Self {
        Self {
            source: source.into(),
            status,
        }
    }

    /// Standard output that takes no more: [`ExitStatus::HOST_FAILURE`].
    pub fn unwritable(error: io::Error) -> Self {
        let text = format!("cannot write to standard output: {error}");
        Self::with_status(text, ExitStatus::HOST_FAILURE)
    }

    /// The status to end the process with.
    pub fn status(&self) -> ExitStatus {
        self.status
    }
}

/// The whole chain of causes in one line. A cause whose text an outer error
/// already carries is not repeated.
impl fmt::Display for UserError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = one_line(&self.source.to_string());
        let mut cause = self.source.source();
        while let Some(error) = cause {
            let more = one_line(&error.to_string());
            if !text.contains(&more) {
                text.push_str(": ");
                text.push_str(&more);
            }
            cause = error.source();
        }
        f.write_str(&text)
    }
}

impl Error for UserError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.source()
    }
}

/// Standard output that nobody reads any more is no error: whoever closes it early,
/// as `head` does, has seen enough.
///
/// # Errors
/// It takes no more for another reason.
pub fn written(end: io::Result<()>) -> Result<(), UserError> {
    match end {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(UserError::unwritable(error))
        }
        _ => Ok(()),
    }
}

/// One line on standard error. Where nobody reads that, the exit status says
/// enough; `eprintln!` would panic.
pub fn complain(what: &dyn fmt::Display) {
    let _ = writeln!(stderr(), "umpire: {what}");
}

#[cfg(test)]
mod tests {
    use thiserror::Error;

    use super::*;

    #[derive(Debug, Error)]
    #[error("outer\n  text")]
    struct Outer(#[source] io::Error);

    #[test]
    fn a_chain_is_one_line() {
        let error = UserError::bad_input(Outer(std::io::Error::other("inner\ttext")));
        assert_eq!(error.to_string(), "outer text: inner text");
        assert_eq!(error.status(), ExitStatus::BAD_INPUT);
    }

    #[test]
    fn statuses_are_even_as_test_exits_are_odd() {
        for status in [
            ExitStatus::SUCCESS,
            ExitStatus::BAD_INPUT,
            ExitStatus::HOST_FAILURE,
            ExitStatus::GUEST_FAILURE,
            ExitStatus::UNIMPLEMENTED,
            ExitStatus::TIMED_OUT,
            ExitStatus::INTERRUPTED,
        ] {
            assert_eq!(status.code() % 2, 0);
        }
    }
}
