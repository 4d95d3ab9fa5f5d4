//! Connections: packets in, packets out, and the names of contexts on each.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use perfmon_abi::wire::{Errno, FrameError, MAX_PACKET, NO_CONTEXT, Refusal, Reply, Request};
use pmu_virt::perfmon::ContextId;

use super::State;
use super::answer::{Answer, RequestId};
use super::events::Token;
use crate::socket::{FileId, Packet, Peer, receive, send};

/// Connections taken in before others are served.
const MOST_AT_ONCE: usize = 64;
/// Refused connections that are kept until their peer has seen why.
pub(super) const MOST_REFUSED: usize = 128;
/// How long connections wait when there is no descriptor for one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// One connection.
#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    pub(super) peer: Peer,
    pub(super) handles: Handles,
    /// A request is under way; the next one is not read before its answer.
    waits: bool,
}

/// All of them, by a number that is never used again.
#[derive(Debug, Default)]
pub(super) struct Connections {
    open: BTreeMap<u64, Connection>,
    /// Refused ones, the oldest first. To close one whose request was not read
    /// would throw away the answer that says why.
    refused: BTreeMap<u64, OwnedFd>,
    next: u64,
}

impl Connections {
    /// A number that no connection has had.
    fn next_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn get(&self, id: u64) -> Option<&Connection> {
        self.open.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Connection> {
        self.open.get_mut(&id)
    }

    /// A context is gone: no handle leads to it.
    pub(super) fn forget(&mut self, context: ContextId) {
        for connection in self.open.values_mut() {
            connection.handles.forget(context);
        }
    }
}

/// The contexts that a connection has bound.
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

    /// The handle of a context; the one that it has, if it has one.
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

impl State {
    /// Takes connections in; those above the limit get to know why not.
    pub(super) fn accept(&mut self) {
        for _ in 0..MOST_AT_ONCE {
            let socket = match self.listener.accept() {
                Ok(socket) => socket,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // It is gone already.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    // No descriptor is left. The listener would tell of the
                    // connection again at once, and go on doing so.
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

    /// Takes connections in again, once it is time.
    pub(super) fn resume_accept(&mut self, now: Instant) {
        if self.accept_paused_until.is_none_or(|until| now < until) {
            return;
        }
        self.accept_paused_until = match self.events.add(&self.listener, Token::Listener) {
            Ok(()) => None,
            Err(_) => Some(now + ACCEPT_PAUSE),
        };
    }

    fn admit(&mut self, socket: OwnedFd) -> Result<(), Refusal> {
        let none = |error: io::Error| Refusal::new(Errno::EMFILE, error.to_string());
        if self.connections.open.len() >= self.limits.connections {
            let reason = format!(
                "{} connections are open, and no more are served (--control-connections)",
                self.limits.connections
            );
            let refusal = Refusal::new(Errno::EAGAIN, reason);
            turn_away(&socket, &refusal);
            self.keep_refused(socket).map_err(none)?;
            return Err(refusal);
        }
        let peer = Peer::of(&socket).map_err(none)?;
        let id = self.connections.next_id();
        self.events
            .add(&socket, Token::Connection(id))
            .map_err(none)?;
        log::debug!("process {} of user {} connects", peer.pid, peer.uid);
        let connection = Connection {
            socket,
            peer,
            handles: Handles::default(),
            waits: false,
        };
        self.connections.open.insert(id, connection);
        Ok(())
    }

    /// Until it has sent its request, or is the oldest of too many.
    fn keep_refused(&mut self, socket: OwnedFd) -> io::Result<()> {
        let id = self.connections.next_id();
        self.events.add(&socket, Token::Connection(id))?;
        self.connections.refused.insert(id, socket);
        if self.connections.refused.len() > MOST_REFUSED
            && let Some((_, oldest)) = self.connections.refused.pop_first()
        {
            self.events.remove(&oldest);
            self.closer.close(oldest);
        }
        Ok(())
    }

    /// A connection has a packet, or has ended.
    pub(super) fn packet(&mut self, id: u64) {
        if let Some(socket) = self.connections.refused.remove(&id) {
            // With the packet unread, its peer would lose the answer.
            let mut buffer = self.packet.take().unwrap_or_else(new_buffer);
            if let Ok(Some(packet)) = receive(socket.as_fd(), &mut buffer) {
                packet.fds.into_iter().for_each(|fd| self.closer.close(fd));
            }
            self.packet = Some(buffer);
            self.events.remove(&socket);
            self.closer.close(socket);
            return;
        }
        let Some(connection) = self.connections.open.get(&id) else {
            return;
        };
        if connection.waits {
            // NoQuantities but its end is told while a request is under way.
            self.hang_up(id);
            return;
        }
        // It comes back below: only one packet is looked at at a time.
        let mut buffer = self.packet.take().unwrap_or_else(new_buffer);
        let got = receive(connection.socket.as_fd(), &mut buffer);
        match got {
            Ok(Some(packet)) => self.request(id, &buffer, packet),
            Ok(None) => self.hang_up(id),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                log::debug!("a connection failed: {error}");
                self.hang_up(id);
            }
        }
        self.packet = Some(buffer);
    }

    fn request(&mut self, id: u64, buffer: &[u8; MAX_PACKET], packet: Packet) {
        if !packet.fds.is_empty() && self.closer.is_full() {
            log::debug!("a connection is closed, as too many descriptors wait to be closed");
            self.discard(packet.fds);
            self.hang_up(id);
            return;
        }
        let decoded = match buffer.get(..packet.bytes) {
            Some(bytes) => Request::decode(bytes),
            None => Err(FrameError::Long(packet.bytes)),
        };
        let request = match decoded {
            Ok(request) => request,
            Err(error) => {
                // Whoever sends this does not speak the protocol.
                log::debug!("a connection is closed: {error}");
                let refusal = Refusal::new(Errno::EPROTO, error.to_string());
                if let Some(connection) = self.connections.get(id) {
                    turn_away(&connection.socket, &refusal);
                }
                self.discard(packet.fds);
                self.hang_up(id);
                return;
            }
        };
        let asked = RequestId::new(id, &request);
        if let Some(answer) = self.command(asked, &request, packet) {
            self.reply(asked, &answer);
        } else {
            self.listen(id, false);
        }
    }

    /// Closes what came with a packet. That of a context is closed at once: nobody
    /// is to find it open whose client has closed it. Whatever else it is, this
    /// thread does not wait for its end.
    pub(super) fn discard(&mut self, fds: Vec<OwnedFd>) {
        for fd in fds {
            let file = FileId::of(fd.as_fd()).ok();
            if file.and_then(|file| self.contexts.of_file(file)).is_none() {
                self.closer.close(fd);
            }
        }
    }

    /// Sends an answer that had to be waited for.
    pub(super) fn late_reply(&mut self, asked: RequestId, answer: &Answer) {
        self.listen(asked.connection, true);
        self.reply(asked, answer);
    }

    /// A client that does not read its answers has them no more.
    fn reply(&mut self, asked: RequestId, answer: &Answer) {
        let Some(connection) = self.connections.get(asked.connection) else {
            return;
        };
        let packet = asked.packet(answer);
        if let Err(error) = send(connection.socket.as_fd(), &packet, &answer.descriptors()) {
            log::debug!("a connection is closed, as its answer cannot be sent: {error}");
            self.hang_up(asked.connection);
        }
    }

    fn listen(&mut self, id: u64, on: bool) {
        let Some(connection) = self.connections.open.get_mut(&id) else {
            return;
        };
        connection.waits = !on;
        let told = self
            .events
            .listen(&connection.socket, Token::Connection(id), on);
        if let Err(error) = told {
            log::debug!("a connection is closed: epoll failed: {error}");
            self.hang_up(id);
        }
    }

    fn hang_up(&mut self, id: u64) {
        if let Some(connection) = self.connections.open.remove(&id) {
            self.events.remove(&connection.socket);
            self.closer.close(connection.socket);
            // Nobody waits for what it has asked for.
            self.lists.forget(id);
            self.contexts.forget(id);
        }
    }
}

fn new_buffer() -> Box<[u8; MAX_PACKET]> {
    Box::new([0; MAX_PACKET])
}

/// Says why to somebody whose request cannot be told, or who has made none.
fn turn_away(socket: &OwnedFd, refusal: &Refusal) {
    let reply = Reply {
        command: 0,
        id: 0,
        context: NO_CONTEXT,
        errno: refusal.errno.number(),
        payload: &[],
        reason: &refusal.reason,
    };
    if let Ok(packet) = reply.encode() {
        // If there is no room, nobody reads.
        let _ = send(socket.as_fd(), &packet, &[]);
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
