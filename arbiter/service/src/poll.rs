//! What a server's thread waits for: its descriptors, each by a number of the server's.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};

/// What has come of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Happened {
    /// The number of the descriptor.
    pub token: u64,
    /// The other end is closed, in both directions.
    pub gone: bool,
}

/// The descriptors that a thread waits for.
#[derive(Clone, Debug)]
pub struct Poll {
    epoll: Arc<OwnedFd>,
}

impl Poll {
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Poll {
            epoll: Arc::new(epoll),
        })
    }

    /// Reports `source` by `token`. Its end always is reported.
    ///
    /// # Errors
    /// That of `epoll_ctl`.
    pub fn watch(&self, source: &impl AsFd, token: u64, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::add(
            &self.epoll,
            source,
            EventData::new_u64(token),
            flags,
        )?)
    }

    /// Has other things reported of it.
    ///
    /// # Errors
    /// That of `epoll_ctl`: it is not watched.
    pub fn listen(&self, source: &impl AsFd, token: u64, flags: EventFlags) -> io::Result<()> {
        let data = EventData::new_u64(token);
        Ok(epoll::modify(&self.epoll, source, data, flags)?)
    }

    /// Reports it no longer.
    pub fn forget(&self, source: &impl AsFd) {
        // It fails only for what is not watched.
        let _ = epoll::delete(&self.epoll, source);
    }

    /// What has come, `BATCH` at a time; it is waited for no longer than `most`.
    ///
    /// # Errors
    /// That of `epoll_wait`, but for a signal: then nothing has come.
    pub fn wait<const BATCH: usize>(&self, most: Option<Duration>) -> io::Result<Vec<Happened>> {
        let none = epoll::Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        };
        let mut events = [none; BATCH];
        // A time that cannot be told is as good as none.
        let most = most.and_then(|most| Timespec::try_from(most).ok());
        let count = match epoll::wait(&self.epoll, &mut events[..], most.as_ref()) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        let happened = |event: &epoll::Event| {
            let flags = event.flags;
            Happened {
                token: event.data.u64(),
                gone: flags.intersects(EventFlags::HUP | EventFlags::ERR),
            }
        };
        Ok(events[..count].iter().map(happened).collect())
    }
}

/// Can be read from when something has come.
impl AsFd for Poll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_is_watched_is_reported_by_its_number() {
        let poll = Poll::new().expect("an epoll");
        let (mut writes, reads) = UnixStream::pair().expect("a pair");
        poll.watch(&reads, 7, EventFlags::IN).expect("it is open");
        let wait = |poll: &Poll| poll.wait::<4>(Some(Duration::ZERO)).expect("no error");
        assert_eq!(wait(&poll), []);
        let at_seven = |gone| [Happened { token: 7, gone }];
        writes.write_all(b"x").expect("there is room");
        assert_eq!(wait(&poll), at_seven(false));
        poll.listen(&reads, 7, EventFlags::empty())
            .expect("it is watched");
        assert_eq!(wait(&poll), []);
        drop(writes);
        assert_eq!(wait(&poll), at_seven(true));
        poll.forget(&reads);
        assert_eq!(wait(&poll), []);
    }
}
