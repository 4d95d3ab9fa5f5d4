//! Perf events that one process opens for another.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::budget::{Errno, HandedEvent, sys};

/// An event that was opened for somebody else: pinned, and not enabled yet. Its descriptor can
/// be handed over; this keeps one, too, by which the event is stopped.
#[derive(Debug)]
pub struct Handed {
    event: OwnedFd,
}

impl Handed {
    /// Opens it (`perf_event_open(2)`).
    ///
    /// # Errors
    /// What the kernel answered. A lack of counters shows in a read of the event only.
    pub fn open(event: &HandedEvent) -> Result<Self, Errno> {
        sys::open_handed(event, None).map(|event| Handed { event })
    }

    /// Opens one for what runs in a control group, and in those below it, on the event's CPU.
    /// `group`: its folder, which can be read from (`PERF_FLAG_PID_CGROUP` of
    /// `perf_event_open(2)`; a descriptor of `O_PATH` is none for it).
    ///
    /// # Errors
    /// What the kernel answered: `ENOENT` where control groups of this version do not have its
    /// controller of perf events.
    pub fn open_for_group(event: &HandedEvent, group: BorrowedFd<'_>) -> Result<Self, Errno> {
        sys::open_handed(event, Some(group)).map(|event| Handed { event })
    }

    /// The event of a descriptor that a service manager has given to this process
    /// (`LISTEN_FDS`), which takes it over: nobody else may use the number.
    ///
    /// # Errors
    /// It is no perf event.
    pub fn given(descriptor: RawFd) -> io::Result<Self> {
        sys::given_event(descriptor).map(|event| Handed { event })
    }

    /// Has it count from now on.
    ///
    /// # Errors
    /// What the kernel answered.
    pub fn enable(&self) -> Result<(), Errno> {
        sys::enable(self.as_fd())
    }

    /// Stops it, in all that counts by it. Whoever has a descriptor can start it again, which
    /// shows in [`Handed::enabled`].
    ///
    /// # Errors
    /// What the kernel answered.
    pub fn disable(&self) -> Result<(), Errno> {
        sys::disable(self.as_fd())
    }

    /// How long it was to count, as far as it is known: the time stands still while it is
    /// disabled. `None`: the kernel found no counter for it, and has given it up until
    /// somebody enables it anew. When its thread has ended, its time is told all the same.
    ///
    /// # Errors
    /// What the kernel answered.
    pub fn enabled(&self) -> Result<Option<Duration>, Errno> {
        let times = sys::times_of(self.as_fd())?;
        Ok(times.map(|times| times.enabled))
    }
}

impl From<Handed> for OwnedFd {
    fn from(handed: Handed) -> OwnedFd {
        handed.event
    }
}

impl AsFd for Handed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::{EventSpec, Follows, Rings};

    #[test]
    fn an_event_is_stopped_by_whoever_opened_it() {
        // PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK.
        let event = HandedEvent {
            spec: EventSpec {
                perf_type: 1,
                config: 1,
                config1: 0,
                config2: 0,
            },
            thread: Some(0),
            cpu: None,
            rings: Rings::User,
            period: None,
            follows: Follows::Nothing,
        };
        let handed = match Handed::open(&event) {
            Ok(handed) => handed,
            Err(error) => {
                println!("skipped: an_event_is_stopped_by_whoever_opened_it: {error}");
                return;
            }
        };
        let enabled = || handed.enabled().expect("it can be read");
        let spend = || (0..200_000u64).fold(0, |sum, one| sum ^ std::hint::black_box(one));
        spend();
        assert_eq!(enabled(), Some(Duration::ZERO), "nobody has enabled it");
        handed.disable().expect("it can be stopped");
        spend();
        assert_eq!(enabled(), Some(Duration::ZERO));
        handed.enable().expect("it can be started");
        spend();
        assert!(enabled() > Some(Duration::ZERO));
        let impossible = HandedEvent {
            cpu: Some(u32::MAX),
            ..event
        };
        assert!(Handed::open(&impossible).is_err());
    }
}
