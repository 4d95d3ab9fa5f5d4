//! Why a call failed: a number for `errno`, a line for people, and the arbiter's word.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use umpire_lease::{CallError, Lease, Reason};

/// So many of those who are in the way are named.
const NAMED: usize = 3;

/// A call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// What `errno` becomes.
    pub(crate) number: i32,
    /// What is wrong, and what to do.
    text: String,
    /// The arbiter's word for it; empty if it did not refuse.
    reason: String,
}

/// What is told of a thread's last call.
#[derive(Debug, Default)]
struct Last {
    text: CString,
    reason: CString,
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::default();
}

impl Failure {
    pub(crate) fn new(number: i32, text: impl Into<String>) -> Self {
        Failure {
            number,
            text: text.into(),
            reason: String::new(),
        }
    }

    /// Keeps it for [`text`] and [`reason`] of this thread.
    pub(crate) fn keep(self) -> i32 {
        LAST.with_borrow_mut(|last| {
            last.text = c_string(&self.text);
            last.reason = c_string(&self.reason);
        });
        self.number
    }
}

/// A text for C, up to the first zero byte.
pub(crate) fn c_string(text: &str) -> CString {
    let text = text.split('\0').next().unwrap_or_default();
    CString::new(text).unwrap_or_default()
}

/// Forgets the last failure of this thread.
pub(crate) fn forget() {
    LAST.take();
}

/// What was wrong with this thread's last call; valid until its next one.
pub(crate) fn text() -> *const c_char {
    LAST.with_borrow(|last| last.text.as_ptr())
}

/// The arbiter's word for it; valid until the thread's next call.
pub(crate) fn reason() -> *const c_char {
    LAST.with_borrow(|last| last.reason.as_ptr())
}

/// The number for a refusal of the arbiter.
fn number_of(reason: &Reason) -> i32 {
    match reason {
        Reason::Held
        | Reason::Outside
        | Reason::Kept
        | Reason::Behind
        | Reason::QueueFull
        | Reason::GroupsBelow
        | Reason::BeyondGroup
        | Reason::TooManyBelow
        | Reason::Leaving
        | Reason::Wanted => libc::EBUSY,
        Reason::NoSuchLease => libc::ENOENT,
        Reason::WrongGeneration => libc::ESTALE,
        Reason::WrongRequest
        | Reason::WrongNumber
        | Reason::NoCpus
        | Reason::NoSuchCpu
        | Reason::NoSuchCounters
        | Reason::NotOnCpu
        | Reason::NotForThreads
        | Reason::NoThreads
        | Reason::TooManyKinds
        | Reason::MoreThanThereIs => libc::EINVAL,
        _ => libc::EPERM,
    }
}

/// Who is in the way, as far as the caller may know it.
fn holders(leases: &[Lease]) -> String {
    let name = |lease: &Lease| match lease.label.as_str() {
        "" => format!("lease {} of tenant {}", lease.id, lease.tenant),
        label => format!("'{label}' of tenant {}", lease.tenant),
    };
    let named = leases.iter().take(NAMED);
    let named = named.map(|lease| format!("{} has {}", name(lease), lease.holds));
    let mut text = named.collect::<Vec<_>>().join(", ");
    if leases.len() > NAMED {
        text += &format!(" and {} more", leases.len() - NAMED);
    }
    text
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        let text = match &error {
            CallError::Refused(refusal) if !refusal.held_by.is_empty() => {
                format!("{error} ({})", holders(&refusal.held_by))
            }
            _ => error.to_string(),
        };
        let number = match &error {
            CallError::Refused(refusal) => number_of(&refusal.reason),
            CallError::NoArbiter { error, .. } => error.raw_os_error().unwrap_or(libc::EIO),
            CallError::Ended => libc::ECONNRESET,
            CallError::Silent => libc::ETIMEDOUT,
            CallError::Io(error) => match error.kind() {
                std::io::ErrorKind::BrokenPipe => libc::ECONNRESET,
                std::io::ErrorKind::InvalidData | std::io::ErrorKind::UnexpectedEof => libc::EPROTO,
                _ => error.raw_os_error().unwrap_or(libc::EPROTO),
            },
            CallError::Other(_) => libc::EPROTO,
        };
        let reason = match error {
            CallError::Refused(refusal) => refusal.reason.to_string(),
            _ => String::new(),
        };
        Failure {
            number,
            text,
            reason,
        }
    }
}
