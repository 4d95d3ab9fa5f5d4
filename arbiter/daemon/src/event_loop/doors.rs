//! What the one thread waits for: the socket at which calls come in, and the epoll in which all
//! descriptors are.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{Timespec, epoll};
use umpire_service::{BACKLOG, ClientSocket, Closer, Listener};

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
    epoll: Arc<OwnedFd>,
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
            epoll: Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?),
            accepted: 0,
            full_until: None,
            says_full: 0,
        })
    }

    pub(super) fn epoll(&self) -> &Arc<OwnedFd> {
        &self.epoll
    }

    /// Can be read from when somebody wants to connect.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.incoming {
            Incoming::Own(listener) => listener.as_fd(),
            Incoming::Given(socket, _) => socket.as_fd(),
        }
    }

    pub(super) fn watch(&self, source: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::add(
            &self.epoll,
            source,
            data,
            epoll::EventFlags::IN,
        )?)
    }

    pub(super) fn forget(&self, source: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, source)?)
    }

    pub(super) fn accept(&mut self) -> io::Result<ClientSocket> {
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

    /// The tokens of what has come, and whether that is the end of a connection. `most`: it is
    /// waited for no longer, in nanoseconds.
    pub(super) fn wait(&self, most: Option<u64>) -> io::Result<Vec<(u64, bool)>> {
        let none = epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        };
        let mut events = [none; BATCH];
        let most = most.map(|ns| Timespec {
            tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(ns % 1_000_000_000).unwrap_or(0),
        });
        let count = match epoll::wait(&self.epoll, &mut events[..], most.as_ref()) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        let gone = epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        let event = |event: &epoll::Event| {
            let flags = event.flags;
            (event.data.u64(), flags.intersects(gone))
        };
        Ok(events[..count].iter().map(event).collect())
    }

    /// The socket's name stays, if it is this process's: the next arbiter sees by it that
    /// holders may count on.
    pub(super) fn leave_name(self) {
        if let Incoming::Own(listener) = self.incoming {
            std::mem::forget(listener);
        }
    }
}
