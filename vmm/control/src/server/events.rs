//! What the server waits for.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use pmu_virt::perfmon::ContextId;
use rustix::event::epoll::EventFlags;
use umpire_service::{ClientSocket, Poll};

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
    poll: Poll,
}

impl Events {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { poll: Poll::new()? })
    }

    /// Reports `token` when `source` can be read. Of a context it reports only that
    /// the other end is gone.
    pub(super) fn add(&self, source: &impl AsFd, token: Token) -> io::Result<()> {
        let flags = match token {
            Token::Context(_) => EventFlags::empty(),
            _ => EventFlags::IN,
        };
        self.poll.watch(source, token.number(), flags)
    }

    /// The same of a connection, until it is dropped.
    pub(super) fn add_client(&self, client: &mut ClientSocket, token: Token) -> io::Result<()> {
        client.watch(&self.poll, token.number(), EventFlags::IN)
    }

    /// Whether packets of a connection are reported. Its end always is.
    pub(super) fn listen(&self, source: &impl AsFd, token: Token, on: bool) -> io::Result<()> {
        let flags = if on {
            EventFlags::IN
        } else {
            EventFlags::empty()
        };
        self.poll.listen(source, token.number(), flags)
    }

    pub(super) fn remove(&self, source: &impl AsFd) {
        self.poll.forget(source);
    }

    /// What can be read, after `most` at the latest.
    pub(super) fn wait(&self, most: Option<Duration>) -> io::Result<Vec<Token>> {
        let happened = self.poll.wait::<BATCH>(most)?;
        Ok(happened
            .iter()
            .filter_map(|one| Token::of(one.token))
            .collect())
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
