//! What the one thread waits for: the socket at which calls come in, and all other descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::epoll::EventFlags;
use umpire_service::{Accepted, BACKLOG, ClientSocket, Closer, Happened, Listener, Poll};

/// Most events taken at once.
pub(super) const BATCH: usize = 1024;
/// That nobody can be accepted is said so often, in nanoseconds.
const FULL_AGAIN: u64 = 10_000_000_000;
/// So long nobody is accepted then, in nanoseconds.
const FULL: u64 = 100_000_000;

/// Where calls come from.
#[derive(Debug)]
pub(super) enum Incoming {
    /// A socket that this process made.
    Own(Listener),
    /// One that the service manager made (`LISTEN_FDS`).
    Given(ClientSocket, Closer),
}

#[derive(Debug)]
pub(super) struct Doors {
    incoming: Incoming,
    poll: Poll,
    /// How many were accepted since then: who waits behind so many as can wait has come later.
    accepted: u16,
    /// Nobody is accepted until then: there are no descriptors left.
    full_until: Option<u64>,
    /// It is not said again before.
    says_full: u64,
}

impl Doors {
    /// # Errors
    /// The kernel has no epoll for it.
    pub(super) fn new(incoming: Incoming) -> io::Result<Self> {
        Ok(Doors {
            incoming,
            poll: Poll::new()?,
            accepted: 0,
            full_until: None,
            says_full: 0,
        })
    }

    pub(super) fn poll(&self) -> &Poll {
        &self.poll
    }

    /// Can be read from when somebody wants to connect.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.incoming {
            Incoming::Own(listener) => listener.as_fd(),
            Incoming::Given(socket, _) => socket.as_fd(),
        }
    }

    pub(super) fn watch(&self, source: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        self.poll.watch(&source, token, EventFlags::IN)
    }

    pub(super) fn accept(&mut self) -> Accepted {
        self.accepted = self.accepted.saturating_add(1);
        match &self.incoming {
            Incoming::Own(listener) => listener.accept(),
            Incoming::Given(socket, closer) => umpire_service::accept(socket, closer),
        }
    }

    /// From now on it is counted who was accepted.
    pub(super) fn count_anew(&mut self) {
        self.accepted = 0;
    }

    /// Whether all were accepted who had come by the time from which on they are counted.
    pub(super) fn has_accepted_all(&self) -> bool {
        let most_waiting = match &self.incoming {
            Incoming::Own(_) => BACKLOG + 1,
            // What the kernel allows if it is not told otherwise.
            Incoming::Given(..) => 4096 + 1,
        };
        self.accepted >= most_waiting
    }

    /// Nobody can be accepted for want of descriptors: that is tried again later.
    pub(super) fn pause(&mut self, error: &io::Error, now: u64) {
        if now >= self.says_full {
            self.says_full = now.saturating_add(FULL_AGAIN);
            log::warn!("no connection can be accepted: {error}; trying again each 100 ms");
        }
        self.full_until = Some(now.saturating_add(FULL));
    }

    /// Whether that pause is over just now.
    pub(super) fn resume(&mut self, now: u64) -> bool {
        let is_over = self.full_until.is_some_and(|until| until <= now);
        if is_over {
            self.full_until = None;
        }
        is_over
    }

    /// When it is over.
    pub(super) fn due(&self) -> Option<u64> {
        self.full_until
    }

    /// What has come. `most`: it is waited for no longer, in nanoseconds.
    pub(super) fn wait(&self, most: Option<u64>) -> io::Result<Vec<Happened>> {
        self.poll.wait::<BATCH>(most.map(Duration::from_nanos))
    }

    /// The socket's name stays, if it is this process's: the next arbiter sees by it that
    /// holders may count on.
    pub(super) fn leave_name(self) {
        if let Incoming::Own(listener) = self.incoming {
            std::mem::forget(listener);
        }
    }
}
