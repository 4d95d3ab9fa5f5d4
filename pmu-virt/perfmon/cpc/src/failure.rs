//! Why a call failed: `errno`, a sub-code and a line for people. Nothing here allocates: calls
//! come from signal handlers too.

use std::fmt;

use umpire_perfmon::c_calls;

/// What exactly was wrong; `CPC_*` of `libcpc.h`.
pub(crate) use perfmon_abi::wire::Subcode;

/// A call failed. The line is kept for the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) errno: i32,
    pub(crate) subcode: Subcode,
}

/// A failure for this reason.
pub(crate) fn fail(errno: i32, subcode: Subcode, reason: fmt::Arguments<'_>) -> Failure {
    c_calls::keep(subcode, reason);
    Failure { errno, subcode }
}
