//! Why a command was refused.

use std::borrow::Cow;
use std::fmt;

use super::Subcode;

macro_rules! errnos {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        /// An error number of Linux on x86-64, as far as the interface uses it.
        #[allow(clippy::upper_case_acronyms)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(i32)]
        pub enum Errno {
            $(#[doc = $text] $name = $number,)*
        }

        impl Errno {
            /// Every one of them.
            pub const ALL: &[Errno] = &[$(Errno::$name),*];

            /// Its name in C.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Errno::$name => stringify!($name),)* }
            }

            /// What it means in general.
            #[must_use]
            pub fn text(self) -> &'static str {
                match self { $(Errno::$name => $text,)* }
            }

            /// The error of this number; `None` if the interface does not use it.
            #[must_use]
            pub fn from_number(number: i32) -> Option<Self> {
                match number { $($number => Some(Errno::$name),)* _ => None }
            }
        }
    };
}

errnos! {
    EPERM = 1, "operation not permitted";
    ENOENT = 2, "no such file";
    ESRCH = 3, "no such vCPU or core";
    EINTR = 4, "interrupted";
    EIO = 5, "input/output error";
    E2BIG = 7, "argument too long";
    EBADF = 9, "not the descriptor of a context";
    EAGAIN = 11, "try again";
    ENOMEM = 12, "out of memory";
    EACCES = 13, "permission denied";
    EFAULT = 14, "bad argument vector";
    EBUSY = 16, "busy";
    ENODEV = 19, "no such device";
    EINVAL = 22, "invalid argument";
    ENFILE = 23, "too many open files in the system";
    EMFILE = 24, "too many open files";
    ENOSPC = 28, "no space left";
    ESPIPE = 29, "illegal seek";
    ENOSYS = 38, "the interface is not available";
    EPROTO = 71, "protocol error";
    EOVERFLOW = 75, "value too large";
    EMSGSIZE = 90, "message too long";
    EOPNOTSUPP = 95, "not supported";
    ECONNRESET = 104, "connection reset by peer";
    ETIMEDOUT = 110, "timed out";
    ECONNREFUSED = 111, "connection refused";
    ECANCELED = 125, "canceled";
}

impl Errno {
    /// Its number.
    #[must_use]
    pub fn number(self) -> i32 {
        self as i32
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.text(), self.name())
    }
}

impl std::error::Error for Errno {}

/// A command was refused: which error the caller gets, and one line that says
/// what was wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What `errno` becomes.
    pub errno: Errno,
    /// One line for people: what was wrong and, where there is something, what
    /// to do about it.
    pub reason: Cow<'static, str>,
    /// What exactly was wrong.
    pub subcode: Subcode,
}

impl Refusal {
    /// A refusal for a reason.
    #[must_use]
    pub fn new(errno: Errno, reason: impl Into<Cow<'static, str>>) -> Self {
        Refusal {
            errno,
            reason: reason.into(),
            subcode: Subcode::None,
        }
    }

    /// The same, and what exactly was wrong.
    #[must_use]
    pub fn because(self, subcode: Subcode) -> Self {
        Refusal { subcode, ..self }
    }
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Refusal::new(errno, errno.text())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.reason, self.errno.name())
    }
}

impl std::error::Error for Refusal {}
