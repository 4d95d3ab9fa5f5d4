//! The bytes of connections: calls that come in, replies that go out.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{RecvFlags, SendFlags, recv, send};
use varlink::sansio::{ParseResult, parse_message, serialize_reply};
use varlink::{Reply, Request};

use crate::peer::Client;
use crate::service::ConnectionId;

/// A message is no longer than this.
const MOST_MESSAGE: usize = 256 * 1024;
/// A client that does not read its replies is left when so much waits for it.
const MOST_UNREAD: usize = 4 * 1024 * 1024;
/// Most calls that one connection has answered before others have their turn.
pub(crate) const MOST_CALLS: usize = 16;

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    pub(crate) client: Client,
    received: Vec<u8>,
    /// Up to here there is no end of a message.
    scanned: usize,
    unsent: VecDeque<Vec<u8>>,
    /// How much of the first was sent.
    sent: usize,
    unread: usize,
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The client has gone.
    Closed,
    /// It sent what is no call, or one that is too long.
    Malformed,
    /// It does not read its replies.
    Unread,
}

impl End {
    pub(crate) fn words(self) -> &'static str {
        match self {
            End::Closed => "it has gone",
            End::Malformed => "it sent what is no varlink call, and was left",
            End::Unread => "it does not read its replies, and was left",
        }
    }
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd, client: Client) -> Self {
        Connection {
            socket,
            client,
            received: Vec::new(),
            scanned: 0,
            unsent: VecDeque::new(),
            sent: 0,
            unread: 0,
        }
    }

    /// Takes in what has come, as much as fits.
    pub(crate) fn fill(&mut self) -> Result<(), End> {
        let mut chunk = [0u8; 16 * 1024];
        while self.received.len() <= MOST_MESSAGE {
            match recv(&self.socket, &mut chunk, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(End::Closed),
                Ok((_, count)) => {
                    self.received.extend_from_slice(&chunk[..count]);
                    if count < chunk.len() {
                        break;
                    }
                }
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Err(End::Closed),
            }
        }
        Ok(())
    }

    /// The next call that has come in whole.
    pub(crate) fn next(&mut self) -> Result<Option<Request<'static>>, End> {
        if !self.received[self.scanned..].contains(&0) {
            self.scanned = self.received.len();
            return if self.received.len() > MOST_MESSAGE {
                Err(End::Malformed)
            } else {
                Ok(None)
            };
        }
        let ParseResult::Complete { message, consumed } = parse_message(&self.received) else {
            return Err(End::Malformed);
        };
        self.received.drain(..consumed);
        self.scanned = 0;
        serde_json::from_slice::<OwnedRequest>(&message)
            .map(|request| Some(request.into()))
            .map_err(|_| End::Malformed)
    }

    /// Whether what has come in can still become a call.
    pub(crate) fn next_if_malformed(&self) -> Result<(), End> {
        if self.received.len() > MOST_MESSAGE && !self.has_call() {
            return Err(End::Malformed);
        }
        Ok(())
    }

    /// Whether no more is taken in before a call is answered.
    pub(crate) fn is_full(&self) -> bool {
        self.received.len() > MOST_MESSAGE
    }

    /// Whether a call has come in, whole.
    pub(crate) fn has_call(&self) -> bool {
        self.received.contains(&0)
    }

    /// Sends a reply, as far as the client takes it in.
    pub(crate) fn reply(&mut self, reply: &Reply) -> Result<(), End> {
        let bytes = serialize_reply(reply).map_err(|_| End::Malformed)?;
        // One reply is sent however long it is.
        if self.unread > MOST_UNREAD {
            return Err(End::Unread);
        }
        self.unread += bytes.len();
        self.unsent.push_back(bytes);
        Ok(())
    }

    /// Whether replies wait to be sent.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends what waits. Returns whether something still does.
    pub(crate) fn flush(&mut self) -> Result<bool, End> {
        while let Some(first) = self.unsent.front() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(&self.socket, &first[self.sent..], flags) {
                Ok(count) => {
                    self.sent += count;
                    self.unread -= count;
                    if self.sent == first.len() {
                        self.unsent.pop_front();
                        self.sent = 0;
                    }
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(true),
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Err(End::Closed),
            }
        }
        Ok(false)
    }
}

/// A call whose strings are its own.
#[derive(serde::Deserialize)]
struct OwnedRequest {
    method: String,
    parameters: Option<serde_json::Value>,
    more: Option<bool>,
    oneway: Option<bool>,
    upgrade: Option<bool>,
}

impl From<OwnedRequest> for Request<'static> {
    fn from(owned: OwnedRequest) -> Self {
        let mut request = Request::create(owned.method, owned.parameters);
        request.more = owned.more;
        request.oneway = owned.oneway;
        request.upgrade = owned.upgrade;
        request
    }
}

/// How many calls users may still make in this moment: a bucket for each that fills
/// evenly and holds a tenth of a second.
#[derive(Debug)]
pub(crate) struct Rates {
    per_second: u64,
    /// For each user: nanoseconds of its budget that are used up, as of a time.
    used: BTreeMap<u32, (u64, u64)>,
}

impl Rates {
    pub(crate) fn new(per_second: u32) -> Self {
        Rates {
            per_second: u64::from(per_second.max(1)),
            used: BTreeMap::new(),
        }
    }

    /// Counts a call that was made as so many more.
    pub(crate) fn charge(&mut self, user: u32, calls: u64, now: u64) {
        let cost = calls * (1_000_000_000 / self.per_second);
        let (used, _) = self.used.get(&user).copied().unwrap_or((0, now));
        self.used.insert(user, (used.saturating_add(cost), now));
    }

    /// Whether `user` may make a call at `now`. If not, when.
    pub(crate) fn take(&mut self, user: u32, now: u64) -> Result<(), u64> {
        const BURST: u64 = 100_000_000;
        let cost = 1_000_000_000 / self.per_second;
        let (used, at) = self.used.get(&user).copied().unwrap_or((0, now));
        let used = used.saturating_sub(now.saturating_sub(at));
        if used + cost > BURST.max(cost) {
            self.used.insert(user, (used, now));
            return Err(now + used + cost - BURST.max(cost));
        }
        self.used.insert(user, (used + cost, now));
        Ok(())
    }
}

/// The connections by number.
pub(crate) type Table = BTreeMap<ConnectionId, Connection>;

/// Whether something did not work that says nothing about the service.
pub(crate) fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_its_calls_evenly() {
        let mut rates = Rates::new(10);
        assert_eq!(rates.take(1, 0), Ok(()));
        assert_eq!(rates.take(1, 0), Err(100_000_000));
        assert_eq!(rates.take(2, 0), Ok(()));
        assert_eq!(rates.take(1, 100_000_000), Ok(()));
        let mut rates = Rates::new(1000);
        let burst = (0..1000).filter(|_| rates.take(7, 5).is_ok()).count();
        assert_eq!(burst, 100);
    }
}
