//! The seam to the kernel: what a measurement asks of `perf_event_open(2)`, typed.

use std::fmt;
use std::time::Duration;

/// An event, as `perf_event_attr` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventSpec {
    /// `type`: that of a PMU ([`Pmu::perf_type`](crate::budget::Pmu::perf_type)), or a generic one such
    /// as `PERF_TYPE_HARDWARE`.
    pub perf_type: u32,
    pub config: u64,
    pub config1: u64,
    pub config2: u64,
}

/// Whose doings an event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The calling thread's, at CPL 3 only: open to everybody at `perf_event_paranoid` 2.
    Thread,
    /// Whatever runs on this CPU, as uncore PMUs want it.
    Cpu(u32),
}

/// An event to open, enabled at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeEvent {
    /// What it counts.
    pub spec: EventSpec,
    /// Whose doings.
    pub target: Target,
    /// Always on a counter, or in error. Otherwise flexible: it may wait.
    pub pinned: bool,
}

/// What of the CPU's doings an event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rings {
    /// Programs, not the kernel.
    User,
    /// Guests of KVM, whatever their ring, and nothing of the host.
    Guest,
    /// All.
    All,
}

/// An event that somebody else is to have. It says no addresses, no call chains, and nothing
/// of other threads: these attributes are all there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandedEvent {
    /// What it counts.
    pub spec: EventSpec,
    /// Whose doings; without one those of all threads on `cpu`.
    pub thread: Option<u32>,
    /// Where; without one wherever the thread runs.
    pub cpu: Option<u32>,
    /// What of them.
    pub rings: Rings,
    /// After so many it overflows, which says nothing but that.
    pub period: Option<u64>,
    /// What else it counts of what its thread starts from then on.
    pub follows: Follows,
}

/// Whose doings an event counts beside those of its thread: of what this one, and whatever
/// counts by it, starts after the event was opened (`inherit` and `inherit_thread` of
/// `perf_event_open(2)`). Not of what ran already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Follows {
    /// Nothing else.
    Nothing,
    /// Threads of the same process. Linux 5.13 and later.
    Threads,
    /// Threads and processes.
    Children,
}

/// An open event's file descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventFd(pub i32);

/// An event's two times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// How long it was to count.
    pub enabled: Duration,
    /// How long it was on a counter.
    pub running: Duration,
}

/// The four registers that CPUID fills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuidLeaf {
    pub eax: u32,
    pub ebx: u32,
    pub ecx: u32,
    pub edx: u32,
}

/// Why the kernel refused, as a positive `errno`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&std::io::Error::from_raw_os_error(self.0), f)
    }
}

/// The system calls of a measurement, on the thread that makes them. Tests let them fail.
pub trait ProbeCalls {
    /// Binds the calling thread to `cpu` (`sched_setaffinity(2)`).
    ///
    /// # Errors
    /// `EINVAL`: the CPU is offline, or outside of the thread's cpuset.
    fn bind(&mut self, cpu: u32) -> Result<(), Errno>;

    /// The CPU that the thread is on.
    ///
    /// # Errors
    /// What the kernel answered.
    fn current_cpu(&mut self) -> Result<u32, Errno>;

    /// Opens an event that counts from now on.
    ///
    /// # Errors
    /// What `perf_event_open(2)` lists. A lack of counters is no error.
    fn open(&mut self, event: &ProbeEvent) -> Result<EventFd, Errno>;

    /// The event's times; `None` at the end of the file, by which the kernel says that a pinned
    /// event has no counter (`perf_event_open(2)`, "pinned").
    ///
    /// # Errors
    /// What the kernel answered.
    fn read(&mut self, event: EventFd) -> Result<Option<Times>, Errno>;

    /// Closes an event.
    fn close(&mut self, event: EventFd);

    /// Time since a fixed moment, which never goes back.
    fn now(&mut self) -> Duration;

    /// CPUID on the CPU that the thread is on; zeros where the processor has none.
    fn cpuid(&mut self, leaf: u32) -> CpuidLeaf;
}
