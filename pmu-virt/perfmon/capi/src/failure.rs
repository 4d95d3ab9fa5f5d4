//! Why a call failed: a number for `errno`, and a line for people.

use perfmon_abi::wire::{Errno, Refusal, Reply, Subcode};
use rustix::io::Errno as OsErrno;
use umpire_perfmon::c_calls;
use umpire_perfmon::link::LinkError;

/// A call failed; `pfm_strerror_last` and `pfm_subcode_last` know why.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    /// What `errno` becomes.
    pub(crate) number: i32,
}

/// A failure for a reason, which is copied.
pub(crate) fn failure(errno: Errno, reason: &str) -> Failure {
    because(errno, Subcode::None, reason)
}

/// The same, and what exactly was wrong.
pub(crate) fn because(errno: Errno, subcode: Subcode, reason: &str) -> Failure {
    c_calls::keep(subcode, format_args!("{reason}"));
    Failure {
        number: errno.number(),
    }
}

/// Whether the VM did what it was asked for. [`Reply::result`] says the same, and allocates.
///
/// # Errors
/// It refused.
pub(crate) fn accepted(reply: &Reply<'_>) -> Result<(), Failure> {
    match (reply.errno, Errno::from_number(reply.errno)) {
        (0, _) => Ok(()),
        (_, Some(errno)) if reply.reason.is_empty() => {
            Err(because(errno, reply.subcode, errno.text()))
        }
        (_, Some(errno)) => Err(because(errno, reply.subcode, reply.reason)),
        (_, None) => Err(failure(
            Errno::EPROTO,
            "the VM answered with an unknown error",
        )),
    }
}

/// What came is not what the command answers with.
pub(crate) fn malformed() -> Failure {
    failure(Errno::EPROTO, "the reply is malformed")
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        because(refusal.errno, refusal.subcode, &refusal.reason)
    }
}

impl From<LinkError> for Failure {
    fn from(error: LinkError) -> Self {
        Refusal::from(error).into()
    }
}

impl From<OsErrno> for Failure {
    fn from(error: OsErrno) -> Self {
        let number = error.raw_os_error();
        let reason = Errno::from_number(number).map_or("the system refused it", Errno::text);
        c_calls::keep(Subcode::None, format_args!("{reason}"));
        Failure { number }
    }
}
