//! The bytes of connections: calls that come in, replies that go out.

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::io;

use umpire_service::ClientSocket;
use varlink::sansio::serialize_reply;
use varlink::{Reply, Request};

use crate::peer::Client;
use crate::room::OF_CONNECTION;
use crate::service::ConnectionId;

/// Taken in at once.
const CHUNK: usize = 16 * 1024;
/// What is answered before its turn is no longer.
const SHORT: usize = 1024;
/// Most calls that one connection has answered before others have their turn.
pub(crate) const MOST_CALLS: usize = 16;

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: ClientSocket,
    client: Client,
    calls: Calls,
    unsent: VecDeque<Vec<u8>>,
    /// How much of the first was sent.
    sent: usize,
    /// The memory of all of them.
    unread: usize,
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The client has gone.
    Closed,
    /// It sent what is no call, or one that is too long.
    Malformed,
    /// It sent descriptors.
    Descriptors,
    /// It does not read its replies.
    Unread,
    /// There is no room for what it has sent, or not read.
    Crowded,
    /// Others without a tenant connect, and its user has most connections of them.
    Outnumbered,
}

impl End {
    pub(crate) fn words(self) -> &'static str {
        match self {
            End::Closed => "it has gone",
            End::Malformed => "it sent what is no varlink call, and was left",
            End::Descriptors => "it sent descriptors, which no call takes, and was left",
            End::Unread => "it does not read its replies, and was left",
            End::Crowded => {
                "it had most of what its user, users without a tenant, or all may have waiting, \
                 and was left"
            }
            End::Outnumbered => {
                "users without a tenant have as many connections as they may, its user most, and \
                 it was left for another's"
            }
        }
    }
}

impl Connection {
    pub(crate) fn new(socket: ClientSocket, client: Client) -> Self {
        Connection {
            socket,
            client,
            calls: Calls::default(),
            unsent: VecDeque::new(),
            sent: 0,
            unread: 0,
        }
    }

    /// What is watched for more.
    pub(crate) fn socket(&self) -> &ClientSocket {
        &self.socket
    }

    /// Who has connected.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Other rules may be about others of its groups.
    pub(crate) fn look_at_groups(&mut self, named: impl Iterator<Item = u32>) {
        self.client.look_at_groups(&self.socket, named);
    }

    /// Takes in what has come: up to a whole call, and what came right behind it.
    pub(crate) fn fill(&mut self) -> Result<(), End> {
        let mut chunk = [0; CHUNK];
        while !self.calls.has_one() {
            let room = self.calls.room().min(CHUNK);
            if room == 0 {
                return Err(End::Malformed);
            }
            match self.socket.receive(&mut chunk[..room]) {
                Ok(got) if !got.rights.is_empty() || got.cut => return Err(End::Descriptors),
                Ok(got) if got.bytes == 0 => return Err(End::Closed),
                Ok(got) => {
                    self.calls.add(&chunk[..got.bytes]);
                    if got.bytes < room {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(End::Closed),
            }
        }
        Ok(())
    }

    /// The next call that has come in whole.
    pub(crate) fn next(&mut self) -> Result<Option<Request<'static>>, End> {
        self.calls.next()
    }

    /// Whether a call has come in, whole.
    pub(crate) fn has_call(&self) -> bool {
        self.calls.has_one()
    }

    /// The method of that call, if it is a short one.
    pub(crate) fn next_method(&self) -> Option<Cow<'_, str>> {
        #[derive(serde::Deserialize)]
        struct Named<'a> {
            #[serde(borrow)]
            method: Cow<'a, str>,
        }
        let call = self.calls.first().filter(|call| call.len() <= SHORT)?;
        let named = serde_json::from_slice::<Named<'_>>(call).ok();
        named.map(|named| named.method)
    }

    /// The memory that it has for what it has sent and not read.
    pub(crate) fn held(&self) -> usize {
        self.calls.received.capacity() + self.unread
    }

    /// Sends a reply, as far as the client takes it in.
    pub(crate) fn reply(&mut self, reply: &Reply) -> Result<(), End> {
        let mut bytes = serialize_reply(reply).map_err(|_| End::Malformed)?;
        if self.unsent.is_empty() {
            let sent = self.send(&bytes)?;
            if sent == bytes.len() {
                return Ok(());
            }
            bytes.drain(..sent);
        } else if self.held() + bytes.len() > OF_CONNECTION {
            // Only one reply that waits alone may be as long as it likes.
            return Err(End::Unread);
        }
        bytes.shrink_to_fit();
        self.unread += bytes.capacity();
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
            self.sent += self.send(&first[self.sent..])?;
            if self.sent < first.len() {
                return Ok(true);
            }
            self.unread -= first.capacity();
            self.unsent.pop_front();
            self.sent = 0;
        }
        self.unsent = VecDeque::new();
        Ok(false)
    }

    /// How many of `bytes` the client takes in now.
    fn send(&self, bytes: &[u8]) -> Result<usize, End> {
        self.socket.send(bytes).map_err(|_| End::Closed)
    }
}

/// The bytes of calls, each with a 0 behind it, as they come in.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    received: Vec<u8>,
    /// How many of them are whole.
    whole: usize,
}

impl Calls {
    /// How many more bytes may come before a call is whole.
    pub(crate) fn room(&self) -> usize {
        OF_CONNECTION.saturating_sub(self.received.len())
    }

    /// Adds what has come.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        // No more memory than there are bytes: that is what is counted.
        self.received.reserve_exact(bytes.len());
        self.received.extend_from_slice(bytes);
        self.whole += bytes.iter().filter(|byte| **byte == 0).count();
    }

    fn has_one(&self) -> bool {
        self.whole > 0
    }

    fn first(&self) -> Option<&[u8]> {
        self.received
            .split(|byte| *byte == 0)
            .next()
            .filter(|_| self.has_one())
    }

    /// The next call that has come in whole.
    ///
    /// # Errors
    /// What came is no call.
    pub(crate) fn next(&mut self) -> Result<Option<Request<'static>>, End> {
        let Some(call) = self.first() else {
            return Ok(None);
        };
        let length = call.len();
        // JSON is text, also where nobody looks at it.
        let text = std::str::from_utf8(call).ok();
        let request = text.and_then(|text| serde_json::from_str::<OwnedRequest>(text).ok());
        self.received.drain(..=length);
        if self.received.capacity() > 2 * self.received.len() + CHUNK || self.received.is_empty() {
            self.received.shrink_to_fit();
        }
        self.whole -= 1;
        let request = request.ok_or(End::Malformed)?;
        Ok(Some(request.into()))
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

    /// How much of its calls a user has used up, in nanoseconds.
    pub(crate) fn used(&self, user: u32, now: u64) -> u64 {
        let (used, at) = self.used.get(&user).copied().unwrap_or((0, now));
        used.saturating_sub(now.saturating_sub(at))
    }

    /// Whether `user` may make a call at `now`. If not, when.
    pub(crate) fn take(&mut self, user: u32, now: u64) -> Result<(), u64> {
        const BURST: u64 = 100_000_000;
        let cost = 1_000_000_000 / self.per_second;
        let used = self.used(user, now);
        if used + cost > BURST.max(cost) {
            self.used.insert(user, (used, now));
            return Err(now + used + cost - BURST.max(cost));
        }
        self.used.insert(user, (used + cost, now));
        Ok(())
    }
}

/// What is said of those who are left: a line for each user in a second, however often it comes
/// back.
#[derive(Debug, Default)]
pub(crate) struct Complaints {
    /// For each user: when the next line may be, and how many there were since.
    users: BTreeMap<u32, (u64, u64)>,
}

impl Complaints {
    /// Whether there may be a line of `user`; if so, how many before it there were not.
    pub(crate) fn take(&mut self, user: u32, now: u64) -> Option<u64> {
        let (next, more) = self.users.entry(user).or_default();
        if now < *next {
            *more += 1;
            return None;
        }
        *next = now.saturating_add(1_000_000_000);
        Some(std::mem::take(more))
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
