//! What a measurement finds, and why there may be no number.

use std::fmt;
use std::time::Duration;

use crate::budget::{Capacity, Errno, Fixed};

/// How many counters of a kind can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Free {
    /// So many; one more found no counter.
    Exactly(u32),
    /// So many were had when the time or [`MAX_EVENTS`](crate::budget::MAX_EVENTS) was used up, or while others took
    /// and returned counters. There may be more.
    AtLeast(u32),
}

impl fmt::Display for Free {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Free::Exactly(count) => write!(f, "{count}"),
            Free::AtLeast(count) => write!(f, "at least {count}"),
        }
    }
}

/// Whether a fixed-function counter can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FixedState {
    /// It can.
    Free,
    /// Somebody else has it.
    Held,
    /// The PMU has no such counter, or the kernel gives none.
    Absent,
    /// Time, events or tries were used up before that was known.
    Unmeasured,
}

impl fmt::Display for FixedState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FixedState::Free => "free",
            FixedState::Held => "held",
            FixedState::Absent => "absent",
            FixedState::Unmeasured => "not measured",
        })
    }
}

/// What can be had of a PMU on one CPU, with everything in place that is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// The CPU, or the designated one of an uncore domain.
    pub cpu: u32,
    /// What the PMU has, by CPUID. `None` if it is not named `cpu`: on hybrid processors CPUID
    /// does not tell for sure.
    pub capacity: Option<Capacity>,
    /// Programmable counters.
    pub programmable: Free,
    /// Fixed-function counters, in the order of [`Fixed::ALL`]; none for an uncore PMU.
    pub fixed: Vec<(Fixed, FixedState)>,
    /// Whether an event that is not pinned has to wait: flexible holders press, or nothing is
    /// free. `None` if that could not be seen, or was not looked for.
    pub flexible_waits: Option<bool>,
    /// How long the measurement took. The probe held counters for this time at most.
    pub took: Duration,
}

/// Why there is no number. It is not 0, it is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotMeasured {
    /// The kernel has no such PMU (`ENOENT`, `EOPNOTSUPP`, `ENODEV`, `ENOSYS`).
    #[error("the kernel has no such hardware PMU ({0})")]
    NotSupported(Errno),
    /// This process may not open the events (`EACCES`, `EPERM`).
    #[error(
        "not allowed ({0}): give the process CAP_PERFMON, or set /proc/sys/kernel/perf_event_paranoid \
         to 2 or less (0 for uncore PMUs), and let seccomp pass perf_event_open"
    )]
    NotAllowed(Errno),
    /// The CPU is offline, outside of this process's cpuset, or not one of the PMU's.
    #[error("CPU {0} is offline, outside of the cpuset, or not counted by this PMU")]
    Offline(u32),
    /// The kernel refused the event with this index in the list (`EINVAL`, `ENOENT`): no
    /// counter counts it, also when all are free.
    #[error("event {index} of the list cannot be counted ({errno})")]
    NotAnEvent {
        /// Its place in the list.
        index: usize,
        /// What the kernel said.
        errno: Errno,
    },
    /// Time or events were used up.
    #[error("no end was found in time; at least {0} events can be pinned")]
    Unfinished(usize),
    /// A system call failed for another reason, such as `EMFILE` or `EBUSY`.
    #[error("{call} failed: {errno}")]
    Failed {
        /// Its name.
        call: &'static str,
        /// What the kernel said.
        errno: Errno,
    },
}

impl NotMeasured {
    pub(super) fn no_thread(errno: Errno) -> Self {
        let call = "clone";
        NotMeasured::Failed { call, errno }
    }
}

/// What a refusal of `perf_event_open(2)` means.
impl From<Errno> for NotMeasured {
    fn from(errno: Errno) -> Self {
        match errno.0 {
            libc::ENOENT | libc::EOPNOTSUPP | libc::ENODEV | libc::ENOSYS => {
                NotMeasured::NotSupported(errno)
            }
            libc::EACCES | libc::EPERM => NotMeasured::NotAllowed(errno),
            _ => NotMeasured::Failed {
                call: "perf_event_open",
                errno,
            },
        }
    }
}
