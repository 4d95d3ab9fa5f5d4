//! What the server waits for.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use pmu_virt::perfmon::ContextId;
use rustix::event::{Timespec, epoll};

use super::answer::ConnectionId;

/// Most events taken at once.
const BATCH: usize = 64;

/// What a descriptor is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    /// A connection waits to be accepted.
    Listener,
    /// Threads of vCPUs have reported something.
    Reports,
    /// The machine has ended.
    Stop,
    /// A connection has a packet, or its end.
    Connection(ConnectionId),
    /// Nobody has the descriptor of this context any more.
    Context(ContextId),
}

const LISTENER: u64 = 0;
const REPORTS: u64 = 1;
const STOP: u64 = 2;
const CONNECTION: u64 = 1 << 62;
const CONTEXT: u64 = 1 << 63;

impl Token {
    fn number(self) -> u64 {
        match self {
            Token::Listener => LISTENER,
            Token::Reports => REPORTS,
            Token::Stop => STOP,
            Token::Connection(id) => CONNECTION | id.0,
            Token::Context(id) => CONTEXT | u64::from(id.0),
        }
    }

    fn of(number: u64) -> Option<Self> {
        Some(match number {
            LISTENER => Token::Listener,
            REPORTS => Token::Reports,
            STOP => Token::Stop,
            number if number & CONTEXT != 0 => {
                Token::Context(ContextId(u32::try_from(number & !CONTEXT).ok()?))
            }
            number if number & CONNECTION != 0 => {
                Token::Connection(ConnectionId(number & !CONNECTION))
            }
            _ => return None,
        })
    }
}

/// The descriptors that the server waits for.
#[derive(Debug)]
pub(super) struct Events {
    epoll: OwnedFd,
}

impl Events {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self { epoll })
    }

    /// Reports `token` when `source` can be read. Of a context it reports only that
    /// the other end is gone.
    pub(super) fn add(&self, source: &impl AsFd, token: Token) -> io::Result<()> {
        let flags = match token {
            Token::Context(_) => epoll::EventFlags::empty(),
            _ => epoll::EventFlags::IN,
        };
        let data = epoll::EventData::new_u64(token.number());
        Ok(epoll::add(&self.epoll, source, data, flags)?)
    }

    /// Whether packets of a connection are reported. Its end always is.
    pub(super) fn listen(&self, source: &impl AsFd, token: Token, on: bool) -> io::Result<()> {
        let flags = if on {
            epoll::EventFlags::IN
        } else {
            epoll::EventFlags::empty()
        };
        let data = epoll::EventData::new_u64(token.number());
        Ok(epoll::modify(&self.epoll, source, data, flags)?)
    }

    pub(super) fn remove(&self, source: &impl AsFd) {
        // It cannot fail: the descriptor was added.
        let _ = epoll::delete(&self.epoll, source);
    }

    /// What can be read, after `most` at the latest.
    pub(super) fn wait(&self, most: Option<Duration>) -> io::Result<Vec<Token>> {
        let none = epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        };
        let mut events = [none; BATCH];
        let most = most.and_then(|most| Timespec::try_from(most).ok());
        match epoll::wait(&self.epoll, &mut events[..], most.as_ref()) {
            Ok(count) => Ok(events[..count]
                .iter()
                .filter_map(|event| Token::of(event.data.u64()))
                .collect()),
            Err(rustix::io::Errno::INTR) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back() {
        for token in [
            Token::Listener,
            Token::Reports,
            Token::Stop,
            Token::Connection(ConnectionId(0)),
            Token::Connection(ConnectionId(1 << 40)),
            Token::Context(ContextId(0)),
            Token::Context(ContextId(u32::MAX)),
        ] {
            assert_eq!(Token::of(token.number()), Some(token));
        }
        assert_eq!(Token::of(9), None);
    }
}
