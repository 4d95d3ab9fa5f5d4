//! Connections: packets in, packets out, and each connection's handles of contexts.
//!
//! What a client does to its connection ends here: too many connections, packets
//! that are none, answers that nobody reads.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use perfmon_abi::wire::last;
use perfmon_abi::wire::{Errno, MAX_PACKET, NO_CONTEXT, Refusal, Reply};
use pmu_virt::perfmon::ContextId;

use super::answer::{Answer, ConnectionId, RequestId};
use super::events::{Events, Token};
use super::handed::Handed;
use crate::memory_file::MemoryFile;
use umpire_service::{Accepted, ClientSocket, Listener, Peer, Received, send_packet};

/// Connections accepted before others are served.
const MOST_AT_ONCE: usize = 64;
/// Refused connections that are kept until their peer has seen why.
pub(super) const MOST_REFUSED: usize = 128;
/// Most bytes of counts that a user has after the VM's end, and that all have.
const MOST_LAST_OF_USER: usize = 8 << 20;
const MOST_LAST: usize = 64 << 20;
/// How long connections wait when there is no descriptor for one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where a packet is taken in.
pub(super) type PacketBuffer = Box<[u8; MAX_PACKET]>;

/// One connection.
#[derive(Debug)]
pub(super) struct Connection {
    socket: ClientSocket,
    pub(super) peer: Peer,
    pub(super) handles: Handles,
    /// A request is under way. The next one is not read before its answer.
    waits: bool,
    /// The next one has come already. Only the connection's end is reported.
    muted: bool,
}

/// All connections.
#[derive(Debug)]
pub(super) struct Connections {
    listener: Listener,
    events: Arc<Events>,
    /// How many may be open.
    most: usize,
    open: BTreeMap<ConnectionId, Connection>,
    /// Refused connections, the oldest first. To close one whose request was not
    /// read would throw away the answer that says why.
    refused: BTreeMap<ConnectionId, ClientSocket>,
    last: u64,
    handed: Handed,
    accept_paused_until: Option<Instant>,
    /// Connections that have ended since somebody asked.
    ended: Vec<ConnectionId>,
}

impl Connections {
    /// Those that come to `listener`; `most` at a time.
    ///
    /// # Errors
    /// The listener cannot be waited for.
    pub(super) fn new(listener: Listener, events: Arc<Events>, most: usize) -> io::Result<Self> {
        events.add(&listener, Token::Listener)?;
        Ok(Self {
            listener,
            events,
            most,
            open: BTreeMap::new(),
            refused: BTreeMap::new(),
            last: 0,
            handed: Handed::default(),
            accept_paused_until: None,
            ended: Vec::new(),
        })
    }

    /// A number that no connection has had.
    fn next_id(&mut self) -> ConnectionId {
        self.last += 1;
        ConnectionId(self.last)
    }

    pub(super) fn get(&self, id: ConnectionId) -> Option<&Connection> {
        self.open.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        self.open.get_mut(&id)
    }

    /// A context is gone: no handle leads to it.
    pub(super) fn forget(&mut self, context: ContextId) {
        for connection in self.open.values_mut() {
            connection.handles.forget(context);
        }
    }

    /// The connections that have ended since the last call.
    pub(super) fn take_ended(&mut self) -> Vec<ConnectionId> {
        std::mem::take(&mut self.ended)
    }

    /// Accepts connections. Those above the limit get to know why they are refused.
    pub(super) fn accept(&mut self) {
        for _ in 0..MOST_AT_ONCE {
            let socket = match self.listener.accept() {
                Accepted::Client(socket) => socket,
                Accepted::Nobody => return,
                Accepted::Gone => continue,
                Accepted::Full(error) => {
                    log::debug!("a connection was not accepted: {error}");
                    self.events.remove(&self.listener);
                    self.accept_paused_until = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            };
            if let Err(refusal) = self.admit(socket) {
                log::debug!("a connection was refused: {refusal}");
            }
        }
    }

    pub(super) fn accept_paused_until(&self) -> Option<Instant> {
        self.accept_paused_until
    }

    /// Accepts connections again once the pause is over.
    pub(super) fn resume_accept(&mut self, now: Instant) {
        if self.accept_paused_until.is_none_or(|until| now < until) {
            return;
        }
        self.accept_paused_until = match self.events.add(&self.listener, Token::Listener) {
            Ok(()) => None,
            Err(_) => Some(now + ACCEPT_PAUSE),
        };
    }

    fn admit(&mut self, mut socket: ClientSocket) -> Result<(), Refusal> {
        let none = |error: io::Error| Refusal::new(Errno::EMFILE, error.to_string());
        if socket.is_overdrawn() {
            let user = socket.user();
            let reason = format!("descriptors that user {user} has sent are still being closed");
            return self.refuse(socket, reason);
        }
        if self.open.len() >= self.most {
            let reason = format!(
                "{} connections are open, and no more are served (--control-connections)",
                self.most
            );
            return self.refuse(socket, reason);
        }
        let peer = Peer::of(&socket).map_err(none)?;
        let id = self.next_id();
        self.events
            .add_client(&mut socket, Token::Connection(id))
            .map_err(none)?;
        log::debug!("process {} of user {} connects", peer.pid, peer.uid);
        let connection = Connection {
            socket,
            peer,
            handles: Handles::default(),
            waits: false,
            muted: false,
        };
        self.open.insert(id, connection);
        Ok(())
    }

    fn refuse(&mut self, socket: ClientSocket, reason: String) -> Result<(), Refusal> {
        let refusal = Refusal::new(Errno::EAGAIN, reason);
        send_refusal(&socket, &refusal);
        self.keep_refused(socket)
            .map_err(|error| Refusal::new(Errno::EMFILE, error.to_string()))?;
        Err(refusal)
    }

    /// Keeps a refused connection until it has sent its request, or is the oldest
    /// of too many.
    fn keep_refused(&mut self, mut socket: ClientSocket) -> io::Result<()> {
        let id = self.next_id();
        self.events.add_client(&mut socket, Token::Connection(id))?;
        socket.refuse_rights();
        self.refused.insert(id, socket);
        if self.refused.len() > MOST_REFUSED {
            self.refused.pop_first();
        }
        Ok(())
    }

    /// The connection has a packet, or has ended. The packet, if it is a request
    /// that is to be looked at.
    pub(super) fn receive(
        &mut self,
        id: ConnectionId,
        buffer: &mut PacketBuffer,
    ) -> Option<Received> {
        if let Some(socket) = self.refused.remove(&id) {
            // With the packet unread, its peer would lose the answer.
            let _ = socket.receive(&mut buffer[..]);
            return None;
        }
        let connection = self.open.get_mut(&id)?;
        if connection.waits {
            // The next request, or the end.
            if connection.muted {
                self.hang_up(id);
            } else {
                self.mute(id, true);
            }
            return None;
        }
        match connection.socket.receive(&mut buffer[..]) {
            // An empty packet counts as the end, since nothing tells the two apart.
            Ok(packet) if packet.bytes == 0 => self.hang_up(id),
            Ok(packet) => {
                connection.waits = true;
                return Some(packet);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                log::debug!("a connection failed: {error}");
                self.hang_up(id);
            }
        }
        None
    }

    /// Whether so many descriptors that its user has sent wait to be closed that the
    /// connection is not served if it sends more.
    pub(super) fn is_overdrawn(&self, id: ConnectionId) -> bool {
        let connection = self.open.get(&id);
        connection.is_some_and(|connection| connection.socket.is_overdrawn())
    }

    /// Ends a connection whose packet is no request; the client gets to know why.
    pub(super) fn turn_away(&mut self, id: ConnectionId, refusal: &Refusal) {
        if let Some(connection) = self.open.get(&id) {
            send_refusal(&connection.socket, refusal);
        }
        self.hang_up(id);
    }

    /// Sends an answer; the next request may come. A client that does not read its
    /// answers loses its connection.
    pub(super) fn reply(&mut self, request: RequestId, answer: &Answer) {
        let id = request.connection;
        let Some(connection) = self.open.get_mut(&id) else {
            return;
        };
        connection.waits = false;
        let reader = answer.file.as_ref().map(|file| file.reader());
        let (packet, file) = match reader.transpose() {
            Ok(file) => (request.packet(answer), file),
            Err(error) => {
                let errno = error.raw_os_error().and_then(Errno::from_number);
                let reason = format!("the VMM cannot open the answer's file by /proc: {error}");
                let refusal = Refusal::new(errno.unwrap_or(Errno::EIO), reason).into();
                (request.packet(&refusal), None)
            }
        };
        let fds = [&answer.fd, &file].map(|fd| fd.as_ref().map(AsFd::as_fd));
        let fds: Vec<_> = fds.into_iter().flatten().collect();
        if let Some(file) = answer.file.as_ref().filter(|_| answer.is_files_last_use) {
            self.handed.add(connection.peer.uid, file);
        }
        if let Err(error) = send_packet(connection.socket.as_fd(), &packet, &fds) {
            log::debug!("a connection is closed, as its answer cannot be sent: {error}");
            self.hang_up(id);
        } else if connection.muted {
            self.mute(id, false);
        }
    }

    /// Leaves each connection what `counts` has of the contexts that it has bound: the VM has
    /// ended, and its tools read on (3.3.6). What is left stays for as long as a client likes,
    /// so users have limited room, and those with little are served first.
    pub(super) fn leave(&self, mut counts: impl FnMut(ContextId) -> Option<Vec<u8>>) {
        let mut connections: Vec<&Connection> = self.open.values().collect();
        connections.sort_by_key(|connection| connection.handles.contexts.len());
        let mut room = LastRoom::default();
        for connection in connections {
            let user = connection.peer.uid;
            let mut of_it: Vec<(u32, Vec<u8>)> = Vec::new();
            let mut bytes = 0;
            for (&handle, &id) in &connection.handles.contexts {
                let Some(counts) = counts(id) else { continue };
                bytes += counts.len();
                if !room.has(user, bytes) {
                    break;
                }
                of_it.push((handle, counts));
            }
            if bytes == 0 {
                continue;
            }
            if !room.take(user, bytes) {
                log::warn!(
                    "a tool of user {user} cannot read its counts after the VM's end: its user \
                     has {MOST_LAST_OF_USER} bytes for them, and all have {MOST_LAST}"
                );
                continue;
            }
            let left = MemoryFile::of("umpire-last-counts", &last::encode_all(&of_it))
                .and_then(|file| file.reader())
                .and_then(|file| {
                    send_packet(connection.socket.as_fd(), &last::PACKET, &[file.as_fd()])
                });
            if let Err(error) = left {
                log::warn!("a tool cannot read its counts after the VM's end: {error}");
            }
        }
    }

    /// Has only the end of a connection reported, or its packets again.
    fn mute(&mut self, id: ConnectionId, muted: bool) {
        let Some(connection) = self.open.get_mut(&id) else {
            return;
        };
        connection.muted = muted;
        let token = Token::Connection(id);
        if let Err(error) = self.events.listen(&connection.socket, token, !muted) {
            log::debug!("a connection is closed: epoll failed: {error}");
            self.hang_up(id);
        }
    }

    /// Ends a connection.
    pub(super) fn hang_up(&mut self, id: ConnectionId) {
        if self.open.remove(&id).is_some() {
            self.ended.push(id);
        }
    }
}

/// How many bytes of last counts are left.
#[derive(Debug, Default)]
struct LastRoom {
    of_users: BTreeMap<u32, usize>,
    of_all: usize,
}

impl LastRoom {
    fn has(&self, user: u32, bytes: usize) -> bool {
        let own = self.of_users.get(&user).copied().unwrap_or(0);
        own + bytes <= MOST_LAST_OF_USER && self.of_all + bytes <= MOST_LAST
    }

    fn take(&mut self, user: u32, bytes: usize) -> bool {
        let has = self.has(user, bytes);
        if has {
            *self.of_users.entry(user).or_default() += bytes;
            self.of_all += bytes;
        }
        has
    }
}

/// Tells somebody why who has made no request that could be answered.
fn send_refusal(socket: &ClientSocket, refusal: &Refusal) {
    let reply = Reply {
        command: 0,
        id: 0,
        context: NO_CONTEXT,
        errno: refusal.errno.number(),
        subcode: refusal.subcode,
        payload: &[],
        reason: &refusal.reason,
    };
    if let Ok(packet) = reply.encode() {
        // If there is no room, nobody reads.
        let _ = send_packet(socket.as_fd(), &packet, &[]);
    }
}

/// The contexts that a connection has bound: a handle names a context on this
/// connection only.
#[derive(Debug, Default)]
pub(super) struct Handles {
    contexts: BTreeMap<u32, ContextId>,
    numbers: BTreeMap<ContextId, u32>,
    last: u32,
}

impl Handles {
    /// The context behind a handle.
    pub(super) fn get(&self, handle: u32) -> Result<ContextId, Refusal> {
        self.contexts.get(&handle).copied().ok_or_else(|| {
            let reason = match handle {
                NO_CONTEXT => "the command is for a context, and none was named".to_owned(),
                handle => format!("handle {handle} is that of no context; bind it first"),
            };
            Refusal::new(Errno::EBADF, reason)
        })
    }

    /// The handle of a context. A context has one handle on a connection.
    pub(super) fn bind(&mut self, context: ContextId) -> u32 {
        if let Some(&handle) = self.numbers.get(&context) {
            return handle;
        }
        // Numbers come again after four billion, unless they are in use.
        loop {
            self.last = self.last.wrapping_add(1);
            if self.last != NO_CONTEXT && !self.contexts.contains_key(&self.last) {
                break;
            }
        }
        self.contexts.insert(self.last, context);
        self.numbers.insert(context, self.last);
        self.last
    }

    pub(super) fn unbind(&mut self, handle: u32) -> Result<(), Refusal> {
        let context = self.get(handle)?;
        self.forget(context);
        Ok(())
    }

    fn forget(&mut self, context: ContextId) {
        if let Some(handle) = self.numbers.remove(&context) {
            self.contexts.remove(&handle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_kept_until_they_are_given_back() {
        let mut handles = Handles::default();
        let errno = |result: Result<ContextId, Refusal>| result.map_err(|refusal| refusal.errno);
        assert_eq!(errno(handles.get(NO_CONTEXT)), Err(Errno::EBADF));
        let one = handles.bind(ContextId(7));
        let other = handles.bind(ContextId(8));
        assert_ne!(one, other);
        assert_eq!(handles.bind(ContextId(7)), one);
        assert_eq!(errno(handles.get(one)), Ok(ContextId(7)));
        handles.unbind(one).unwrap();
        assert_eq!(errno(handles.get(one)), Err(Errno::EBADF));
        assert_eq!(handles.unbind(one).unwrap_err().errno, Errno::EBADF);
        handles.forget(ContextId(8));
        assert_eq!(errno(handles.get(other)), Err(Errno::EBADF));
    }
}
