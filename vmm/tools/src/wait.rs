//! Waiting for what comes first: a message, Ctrl-C, or a moment.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::pipe;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// What came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Woken {
    /// Ctrl-C, or SIGTERM or SIGHUP.
    pub(crate) stop: bool,
    /// What of the things that were added has something to read, or nobody
    /// behind it any more.
    pub(crate) ready: Vec<usize>,
}

/// Waits, with the process's signals taken over where it is to hear them.
#[derive(Debug)]
pub(crate) struct Waiter {
    epoll: Epoll,
    /// Has a byte for each signal that came.
    stop: Option<UnixStream>,
}

/// The number of the event that signals write.
const STOP: u64 = u64::MAX;
/// How many things one wait reports; the next wait reports the others.
const AT_ONCE: usize = 64;

impl Waiter {
    /// From now on Ctrl-C ends a wait, not the process.
    ///
    /// # Errors
    /// The host refuses.
    pub(crate) fn new() -> io::Result<Self> {
        let (stop, signalled) = UnixStream::pair()?;
        stop.set_nonblocking(true)?;
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            pipe::register(signal, signalled.try_clone()?)?;
        }
        let waiter = Self::without_signals()?;
        let event = EpollEvent::new(EventSet::IN, STOP);
        waiter
            .epoll
            .ctl(ControlOperation::Add, stop.as_raw_fd(), event)?;
        Ok(Self {
            stop: Some(stop),
            ..waiter
        })
    }

    /// For a thread beside the one that hears of signals.
    ///
    /// # Errors
    /// The host refuses.
    pub(crate) fn without_signals() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new()?,
            stop: None,
        })
    }

    /// Waits for `thing`, too, and calls it `number`. Closing it ends this.
    ///
    /// # Errors
    /// The host refuses.
    pub(crate) fn add(&self, thing: impl AsFd, number: usize) -> io::Result<()> {
        let event = EpollEvent::new(EventSet::IN, number as u64);
        let fd = thing.as_fd().as_raw_fd();
        self.epoll.ctl(ControlOperation::Add, fd, event)
    }

    /// Does not wait for `thing` any more. One that was not added is no error.
    pub(crate) fn remove(&self, thing: impl AsFd) {
        let fd = thing.as_fd().as_raw_fd();
        let nothing = EpollEvent::default();
        let _ = self.epoll.ctl(ControlOperation::Delete, fd, nothing);
    }

    /// Waits until `until`, or until something came.
    ///
    /// # Errors
    /// The host refuses.
    pub(crate) fn wait(&self, until: Option<Instant>) -> io::Result<Woken> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let mut events = [EpollEvent::default(); AT_ONCE];
        let count = match self.epoll.wait(milliseconds(left), &mut events) {
            // The handler of a signal ran, and its event is readable now.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                self.epoll.wait(0, &mut events)?
            }
            other => other?,
        };
        let mut woken = Woken::default();
        for event in events.iter().take(count) {
            match event.data() {
                STOP => {
                    woken.stop = true;
                    // Or the next wait would end at once.
                    let _ = self.stop.as_ref().map(|mut stop| stop.read(&mut [0; 64]));
                }
                number => woken.ready.extend(usize::try_from(number)),
            }
        }
        Ok(woken)
    }
}

/// For `epoll_wait`: not less than asked for, or a loop would turn until the
/// moment has come.
fn milliseconds(left: Option<Duration>) -> i32 {
    let Some(left) = left else { return -1 };
    let whole = left.as_nanos().div_ceil(1_000_000);
    i32::try_from(whole).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::milliseconds;
    use std::time::Duration;

    #[test]
    fn waits_are_not_too_short() {
        assert_eq!(milliseconds(None), -1);
        assert_eq!(milliseconds(Some(Duration::ZERO)), 0);
        assert_eq!(milliseconds(Some(Duration::from_nanos(1))), 1);
        assert_eq!(milliseconds(Some(Duration::from_millis(7))), 7);
        assert_eq!(milliseconds(Some(Duration::MAX)), i32::MAX);
    }
}
