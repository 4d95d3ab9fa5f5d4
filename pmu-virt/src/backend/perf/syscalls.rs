//! The seam to the kernel: what `perf` asks of `perf_event_open(2)`, typed.

use std::fmt::{self, Debug};

use pmu_model::{Provenance, SoftwareEvent};

/// What an event counts, as `type` and `config` of `perf_event_attr` have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventSource {
    /// `PERF_COUNT_SW_DUMMY`: counts nothing; leads a group.
    Dummy,
    /// `PERF_TYPE_SOFTWARE`.
    Software(SoftwareEvent),
    /// `PERF_TYPE_HARDWARE`.
    Generic(GenericEvent),
    /// `PERF_TYPE_RAW`: event select, unit mask, edge, invert and counter
    /// mask where the vendor's control register has them.
    Raw(u64),
}

impl EventSource {
    /// Whether a physical counter is needed.
    pub fn is_hardware(self) -> bool {
        matches!(self, EventSource::Generic(_) | EventSource::Raw(_))
    }

    /// Whether it counts nanoseconds, by a timer of the kernel's own.
    pub(super) fn is_time(self) -> bool {
        self == EventSource::Software(SoftwareEvent::TaskClock)
    }

    /// Label of its counts while nothing is lost.
    pub(super) fn provenance(self) -> Provenance {
        if self.is_hardware() {
            Provenance::Hardware
        } else {
            Provenance::Exact
        }
    }
}

/// Events that the kernel translates for the host's processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GenericEvent {
    /// `PERF_COUNT_HW_CPU_CYCLES`.
    Cycles,
    /// `PERF_COUNT_HW_REF_CPU_CYCLES`.
    RefCycles,
    /// `PERF_COUNT_HW_INSTRUCTIONS`.
    Instructions,
    /// `PERF_COUNT_HW_BRANCH_INSTRUCTIONS`.
    Branches,
    /// `PERF_COUNT_HW_BRANCH_MISSES`.
    BranchMisses,
    /// `PERF_COUNT_HW_CACHE_REFERENCES`.
    CacheReferences,
    /// `PERF_COUNT_HW_CACHE_MISSES`.
    CacheMisses,
}

/// An event to open on the calling thread, whichever CPU it runs on.
///
/// It starts disabled. Reads give `PERF_FORMAT_GROUP`, `ID` and both times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventSpec {
    /// What it counts.
    pub source: EventSource,
    /// Leave CPL 3 out.
    pub exclude_user: bool,
    /// Leave CPL 0 out.
    pub exclude_kernel: bool,
    /// Count only while the thread runs a guest.
    pub exclude_host: bool,
    /// Always on the counter, or in error; for leaders.
    pub pinned: bool,
    /// Events between two overflows; `None` for an event without overflows.
    pub period: Option<u64>,
}

impl EventSpec {
    /// A pinned leader that counts nothing.
    pub const LEADER: EventSpec = EventSpec {
        source: EventSource::Dummy,
        exclude_user: false,
        // A dummy without the kernel is open to every user.
        exclude_kernel: true,
        exclude_host: false,
        pinned: true,
        period: None,
    };
}

/// An open event's file descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventFd(pub i32);

/// Why the kernel refused, as a positive `errno`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// Whether the same call may succeed later, with nothing changed.
    pub fn is_transient(self) -> bool {
        matches!(
            self.0,
            libc::EINTR
                | libc::EAGAIN
                | libc::EBUSY
                | libc::EMFILE
                | libc::ENFILE
                | libc::ENOMEM
                | libc::ENOSPC
        )
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&std::io::Error::from_raw_os_error(self.0), f)
    }
}

/// The system calls behind `perf`. Every one can fail, and tests let it.
///
/// The backend repeats a call that was interrupted, so an implementation need
/// not.
pub trait PerfSyscalls: Send + Debug {
    /// `perf_event_open` on the calling thread; `group` is the leader's.
    ///
    /// # Errors
    /// What the kernel answered.
    fn open(&mut self, event: &EventSpec, group: Option<EventFd>) -> Result<EventFd, Errno>;

    /// `PERF_EVENT_IOC_ID`: the number that names the event in a group's read.
    ///
    /// # Errors
    /// What the kernel answered.
    fn id(&mut self, event: EventFd) -> Result<u64, Errno>;

    /// `PERF_EVENT_IOC_ENABLE`, for this event alone.
    ///
    /// # Errors
    /// What the kernel answered.
    fn enable(&mut self, event: EventFd) -> Result<(), Errno>;

    /// `PERF_EVENT_IOC_DISABLE`, for this event alone.
    ///
    /// # Errors
    /// What the kernel answered.
    fn disable(&mut self, event: EventFd) -> Result<(), Errno>;

    /// `PERF_EVENT_IOC_PERIOD`: the next overflow comes after `events` more.
    ///
    /// # Errors
    /// What the kernel answered.
    fn set_period(&mut self, event: EventFd, events: u64) -> Result<(), Errno>;

    /// Sends `signal` to the calling thread at every overflow (`F_SETSIG`,
    /// `F_SETOWN_EX` with `F_OWNER_TID`, `O_ASYNC`).
    ///
    /// # Errors
    /// What the kernel answered.
    fn signal_on_overflow(&mut self, event: EventFd, signal: i32) -> Result<(), Errno>;

    /// Reads a leader's group into `words`; returns the number of bytes. 0
    /// says that a pinned group has lost its counters.
    ///
    /// # Errors
    /// What the kernel answered.
    fn read(&mut self, leader: EventFd, words: &mut [u64]) -> Result<usize, Errno>;

    /// Maps an event's page, for [`PerfSyscalls::sample`].
    ///
    /// # Errors
    /// What the kernel answered.
    fn map(&mut self, event: EventFd) -> Result<(), Errno>;

    /// The event's count, read from its counter without a system call; `None`
    /// where that is not allowed, or while the event is on no counter.
    fn sample(&mut self, event: EventFd) -> Option<u64>;

    /// Whether the event is on a counter now, by its page; `None` where there is no
    /// page, or one that does not tell.
    fn is_on_counter(&mut self, event: EventFd) -> Option<bool>;

    /// Closes an event and unmaps its page.
    fn close(&mut self, event: EventFd);
}

/// Repeats an interrupted call; a signal a time is taken, a storm is not.
pub(super) fn uninterrupted<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    const TRIES: usize = 16;
    let mut result = call();
    for _ in 1..TRIES {
        match result {
            Err(Errno(libc::EINTR)) => result = call(),
            other => return other,
        }
    }
    result
}
