//! A client's connection, and what comes on it. Nobody waits for its end, nor for that of the
//! descriptors that came with it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketType, recv, recvmsg, send, sendmsg, shutdown,
    sockopt::{set_socket_passcred, socket_type},
};

use crate::closer::Closer;
use crate::poll::Poll;
use crate::sys;

/// Most descriptors that are sent along with one packet.
const MOST_SENT: usize = 2;
/// Most descriptors taken in from one message. A message cannot have more (SCM_MAX_FD), so
/// the kernel never closes one on this thread.
const MOST_RECEIVED: usize = 253;

/// The server's end of a connection.
#[derive(Debug)]
pub struct ClientSocket {
    /// `None` while this is dropped.
    socket: Option<OwnedFd>,
    user: u32,
    /// It keeps packets apart.
    packets: bool,
    /// There may be descriptors in what was not read: the kernel closes them with the socket.
    may_carry: bool,
    poll: Option<Poll>,
    closer: Closer,
}

impl ClientSocket {
    /// A connection that was accepted, or another socket that others send on.
    pub fn new(socket: OwnedFd, closer: &Closer) -> Self {
        let peer = sys::peer_credentials(socket.as_fd());
        Self {
            user: peer.map_or(u32::MAX, |[_, user, _]| user),
            packets: socket_type(&socket) == Ok(SocketType::SEQPACKET),
            // It was refused from the first byte on if the listener did so at the `connect`.
            may_carry: sys::passes_rights(socket.as_fd()),
            socket: Some(socket),
            poll: None,
            closer: closer.clone(),
        }
    }

    /// The user that has connected; `u32::MAX`: the kernel does not tell.
    pub fn user(&self) -> u32 {
        self.user
    }

    /// Has `poll` report it, until this is dropped.
    ///
    /// # Errors
    /// That of `epoll_ctl`.
    pub fn watch(&mut self, poll: &Poll, token: u64, flags: EventFlags) -> io::Result<()> {
        poll.watch(&*self, token, flags)?;
        self.poll = Some(poll.clone());
        Ok(())
    }

    /// Has other things reported of it.
    pub fn listen(&self, token: u64, flags: EventFlags) {
        if let Some(poll) = &self.poll {
            // It was added, so this cannot fail.
            let _ = poll.listen(self, token, flags);
        }
    }

    /// Sends bytes, as many as the client takes in now. Never waits.
    ///
    /// # Errors
    /// The connection has failed.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut sent = 0;
        while sent < bytes.len() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(self, &bytes[sent..], flags) {
                Ok(count) => sent += count,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(sent)
    }

    /// Takes in what has come: of a stream as much as fits, up to the next descriptors; or a
    /// packet. Never waits. While too many descriptors wait to be closed, none are taken in: what
    /// comes with some stays with the kernel, as [`Received::cut`] tells.
    ///
    /// # Errors
    /// Nothing has come, or the connection has failed.
    pub fn receive(&self, mut buffer: &mut [u8]) -> io::Result<Received> {
        if self.may_carry && self.closer.takes_none(self.user) {
            let seen = peek(self, buffer)?;
            if seen.cut {
                return Ok(self.received(0, true));
            }
            if !self.packets {
                // Descriptors may have come behind what was seen.
                buffer = buffer.get_mut(..seen.bytes).unwrap_or_default();
            }
        }
        let mut space = [MaybeUninit::uninit();
            rustix::cmsg_space!(ScmRights(MOST_RECEIVED), ScmCredentials(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        // It tells how long a packet is; of a TCP connection it throws the bytes away.
        flags.set(RecvFlags::TRUNC, self.packets);
        let got = recvmsg(self, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
        let mut received = self.received(got.bytes, got.flags.contains(ReturnFlags::CTRUNC));
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                received.rights.files.extend(files);
            }
        }
        Ok(received)
    }

    fn received(&self, bytes: usize, cut: bool) -> Received {
        Received {
            bytes,
            cut,
            rights: Rights {
                files: Vec::new(),
                user: self.user,
                closer: self.closer.clone(),
            },
        }
    }

    /// The kernel takes no descriptors from the client any more, where it can refuse them
    /// (SO_PASSRIGHTS, Linux 6.16).
    pub fn refuse_rights(&self) {
        refuse_rights(self);
    }

    /// Whether so much that the client has left waits to be closed that it is not served.
    pub fn is_overdrawn(&self) -> bool {
        self.closer.is_full(self.user)
    }
}

impl AsFd for ClientSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // It is there until the value is dropped.
        self.socket.as_ref().expect("a socket").as_fd()
    }
}

impl Drop for ClientSocket {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else {
            return;
        };
        if let Some(poll) = &self.poll {
            poll.forget(&socket);
        }
        if self.may_carry {
            // The client learns of it at once, and nothing more comes.
            let _ = shutdown(&socket, Shutdown::Both);
            if !is_empty(&socket) {
                self.closer.close(socket, self.user);
            }
        }
    }
}

/// Sends a packet with at most two descriptors, or as much of a stream as there is room for.
/// Never waits.
///
/// # Errors
/// There is no room for it, or nobody reads any more.
pub fn send_packet(
    socket: BorrowedFd<'_>,
    packet: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_SENT))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(packet)], &mut control, flags)?;
    Ok(())
}

/// Whether nothing is left on a connection that was shut down, after what has no descriptors along
/// was taken away: then nobody waits for its close.
fn is_empty(socket: &OwnedFd) -> bool {
    let packets = match socket_type(socket) {
        Ok(SocketType::STREAM) => false,
        Ok(SocketType::SEQPACKET) => true,
        _ => return false,
    };
    let mut bytes = [0; 16 * 1024];
    // As much as the kernel keeps of one connection, about.
    for _ in 0..32 {
        match peek(socket, &mut bytes) {
            Ok(seen) if seen.cut => return false,
            // A packet without bytes looks like the end, and descriptors may be behind it.
            Ok(seen) if seen.bytes == 0 && !(packets && has_packet(socket)) => return true,
            Ok(seen) if recv(socket, &mut bytes[..seen.bytes], RecvFlags::DONTWAIT).is_ok() => {}
            // The client has not read all, which is told once.
            Err(Errno::CONNRESET) => {}
            _ => return false,
        }
    }
    false
}

/// What is first on a connection, and stays there.
struct Peeked {
    bytes: usize,
    /// Something comes along, for which there is no room here, and which is not closed.
    cut: bool,
}

fn peek(socket: &impl AsFd, bytes: &mut [u8]) -> rustix::io::Result<Peeked> {
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let mut none = RecvAncillaryBuffer::default();
    let seen = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut none, flags)?;
    Ok(Peeked {
        bytes: seen.bytes,
        cut: seen.flags.contains(ReturnFlags::CTRUNC),
    })
}

/// Whether there is a packet, also one without bytes: who has sent it would come along, if that
/// is asked for, and nothing comes along with the end.
fn has_packet(socket: &OwnedFd) -> bool {
    let seen = set_socket_passcred(socket, true).and_then(|()| peek(socket, &mut []));
    let _ = set_socket_passcred(socket, false);
    // What cannot be told may be one.
    seen.map_or(true, |seen| seen.cut)
}

/// The kernel takes no descriptors on this socket, nor on those that connect to it, where it can
/// refuse them (SO_PASSRIGHTS, Linux 6.16): whoever sends some gets EPERM.
pub fn refuse_rights(socket: &impl AsFd) {
    // An older kernel knows no such option.
    let _ = sys::refuse_rights(socket.as_fd());
}

/// What was taken in.
#[derive(Debug)]
pub struct Received {
    /// Bytes that came; of a packet that was longer than the buffer, all that it had. 0: the
    /// end of the connection, or an empty packet, which nothing tells from it.
    pub bytes: usize,
    /// More came along than there was room for, and the kernel has closed it; or it waits there
    /// until the connection is closed.
    pub cut: bool,
    /// Descriptors that came along.
    pub rights: Rights,
}

/// Descriptors that a client has sent. Whatever they are, dropping them does not wait.
#[derive(Debug)]
pub struct Rights {
    files: Vec<OwnedFd>,
    user: u32,
    closer: Closer,
}

impl Rights {
    /// Closes those at once that are not to be kept: such as cannot make this thread wait.
    pub fn keep(&mut self, mut is_kept: impl FnMut(BorrowedFd<'_>) -> bool) {
        self.files.retain(|file| is_kept(file.as_fd()));
    }
}

impl Deref for Rights {
    type Target = [OwnedFd];

    fn deref(&self) -> &[OwnedFd] {
        &self.files
    }
}

impl Drop for Rights {
    fn drop(&mut self) {
        for file in self.files.drain(..) {
            self.closer.close(file, self.user);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::time::{Duration, Instant};

    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, socketpair,
    };

    use super::*;
    use crate::FLAGS;
    use crate::closer::tests::{lingering, soon};

    fn send(to: &OwnedFd, bytes: &[u8], file: &OwnedFd, count: usize) -> rustix::io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_RECEIVED))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = vec![file.as_fd(); count];
        assert!(count == 0 || control.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(
            to,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
    }

    fn pair(kind: SocketType, closer: &Closer) -> (OwnedFd, ClientSocket) {
        let (client, server) = socketpair(AddressFamily::UNIX, kind, FLAGS, None).unwrap();
        (client, ClientSocket::new(server, closer))
    }

    #[test]
    fn bytes_and_all_descriptors_arrive() {
        for kind in [SocketType::STREAM, SocketType::SEQPACKET] {
            let closer = Closer::new(1 << 20);
            let (client, server) = pair(kind, &closer);
            // What came before descriptors may be taken in with them.
            let mut buffer = [0; 3];
            let error = server.receive(&mut buffer).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            send(&client, b"one", &client, 0).unwrap();
            assert_eq!(send(&client, b"two", &client, MOST_RECEIVED), Ok(3));
            let one = server.receive(&mut buffer).unwrap();
            assert_eq!(
                (one.bytes, one.rights.len(), &buffer[..3]),
                (3, 0, &b"one"[..])
            );
            let two = server.receive(&mut buffer).unwrap();
            assert_eq!((two.bytes, two.cut, &buffer[..3]), (3, false, &b"two"[..]));
            assert_eq!(two.rights.len(), MOST_RECEIVED);
            drop(two);
            soon(|| closer.waiting(server.user()) == 0);
            drop(client);
            assert_eq!(server.receive(&mut buffer).unwrap().bytes, 0);
        }
    }

    #[test]
    fn bytes_of_tcp_arrive() {
        use std::io::Write;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = ClientSocket::new(listener.accept().unwrap().0.into(), &Closer::new(64));
        client.write_all(b"one").unwrap();
        let mut buffer = [0; 8];
        soon(|| server.receive(&mut buffer).is_ok_and(|got| got.bytes == 3));
        assert_eq!(&buffer[..3], b"one");
    }

    /// Neither those that were taken in nor those that nobody has read.
    #[test]
    fn nobody_waits_for_what_lingers() {
        for kind in [SocketType::STREAM, SocketType::SEQPACKET] {
            let closer = Closer::new(1 << 20);
            let began = Instant::now();
            let time = Duration::from_secs(3);
            let (slow, _peer) = lingering(time);
            let (other, _other) = lingering(time);
            let (client, server) = pair(kind, &closer);
            send(&client, b"one", &slow, 1).unwrap();
            send(&client, b"two", &other, MOST_RECEIVED).unwrap();
            drop((slow, other));
            drop(server.receive(&mut [0; 8]).unwrap());
            let user = server.user();
            drop(server);
            // It learns that it was left before they are closed.
            let gone = rustix::net::recv(&client, &mut [0; 1], RecvFlags::empty());
            assert!(matches!(gone, Ok((0, _)) | Err(_)), "{gone:?}");
            assert!(began.elapsed() < time, "{kind:?}: it waited");
            assert_eq!(closer.waiting(user), 2, "{kind:?}: they linger");
        }
    }

    /// Whether they are this user's or those of others together: what has connected before can
    /// fill no table, and who sends none is served.
    #[test]
    fn no_descriptors_are_taken_in_while_too_many_wait() {
        for kind in [SocketType::STREAM, SocketType::SEQPACKET] {
            let closer = Closer::new(80);
            let (client, server) = pair(kind, &closer);
            let mut peers = Vec::new();
            for other in 0..11 {
                let (slow, peer) = lingering(Duration::from_secs(2));
                // Nobody of them is full.
                closer.close(slow, server.user().wrapping_add(1 + other % 3));
                peers.push(peer);
            }
            assert!(!server.is_overdrawn());
            let mut buffer = [0; 8];
            let error = server.receive(&mut buffer).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            send(&client, b"one", &client, 0).unwrap();
            let one = server.receive(&mut buffer).unwrap();
            assert_eq!((one.bytes, one.cut, &buffer[..3]), (3, false, &b"one"[..]));
            send(&client, b"two", &client, MOST_RECEIVED).unwrap();
            let two = server.receive(&mut buffer).unwrap();
            assert_eq!((two.cut, two.rights.len()), (true, 0), "{kind:?}");
            assert_eq!(closer.waiting(server.user()), 0);
            // Once they are closed there is room again.
            drop(peers);
            soon(|| !closer.takes_none(server.user()));
            let two = server.receive(&mut buffer).unwrap();
            assert_eq!((two.bytes, two.cut), (3, false));
            // And then they are its own.
            drop(two);
            let mut peers = Vec::new();
            for _ in 0..11 {
                let (slow, peer) = lingering(Duration::from_secs(2));
                closer.close(slow, server.user());
                peers.push(peer);
            }
            send(&client, b"three", &client, 1).unwrap();
            let three = server.receive(&mut buffer).unwrap();
            assert_eq!((three.cut, three.rights.len()), (true, 0), "{kind:?}");
        }
    }

    /// Bytes alone are not waited for, in front of descriptors or not, nor are empty packets.
    #[test]
    fn a_connection_is_closed_at_once_unless_descriptors_are_left() {
        let closer = Closer::new(1 << 20);
        let (slow, _peer) = lingering(Duration::from_secs(3));
        let all: [&[(usize, usize)]; 7] = [
            &[],
            &[(1, 0)],
            &[(70_000, 0)],
            &[(1, 1)],
            &[(70_000, 0), (1, MOST_RECEIVED)],
            &[(0, 0), (3, 0), (0, 0)],
            &[(0, 0), (3, 0), (0, 0), (0, 1)],
        ];
        for kind in [SocketType::STREAM, SocketType::SEQPACKET] {
            for sent in all {
                let (client, server) = pair(kind, &closer);
                // Of a stream nothing without bytes arrives.
                let arrives = |bytes| kind == SocketType::SEQPACKET || bytes > 0;
                let sent = || sent.iter().filter(|(bytes, _)| arrives(*bytes));
                for (bytes, count) in sent() {
                    send(&client, &vec![b'x'; *bytes], &slow, *count).unwrap();
                }
                let user = server.user();
                let socket = server.as_fd().try_clone_to_owned().unwrap();
                rustix::net::shutdown(&socket, Shutdown::Both).unwrap();
                let right = sent().all(|(_, count)| *count == 0);
                assert_eq!(
                    is_empty(&socket),
                    right,
                    "{kind:?}: {:?}",
                    sent().collect::<Vec<_>>()
                );
                drop((socket, server));
                soon(|| closer.waiting(user) == 0);
            }
        }
    }

    /// However many connections end, none of them waits for those that linger.
    #[test]
    fn connections_end_while_all_threads_linger() {
        let closer = Closer::new(1 << 20);
        let mut peers = Vec::new();
        // Users enough that no thread is left for another.
        for user in 0..16 {
            for _ in 0..4 {
                let (slow, peer) = lingering(Duration::from_secs(3));
                closer.close(slow, 1_000_000 + user);
                peers.push(peer);
            }
        }
        for kind in [SocketType::STREAM, SocketType::SEQPACKET] {
            for is_read in [false, true] {
                let (client, server) = pair(kind, &closer);
                send(&client, b"one", &client, 0).unwrap();
                if is_read {
                    server.receive(&mut [0; 8]).unwrap();
                }
                // An answer that the client does not read.
                send_packet(server.as_fd(), b"two", &[]).unwrap();
                drop(client);
                let user = server.user();
                drop(server);
                assert_eq!(closer.waiting(user), 0, "{kind:?}, {is_read}");
            }
        }
    }

    #[test]
    fn what_is_refused_does_not_come() {
        let closer = Closer::new(1 << 20);
        let (client, server) = pair(SocketType::STREAM, &closer);
        if sys::refuse_rights(server.as_fd()).is_err() {
            println!("skipped: what_is_refused_does_not_come: needs Linux 6.16");
            return;
        }
        let refused = send(&client, b"x", &client, 1);
        assert_eq!(refused, Err(rustix::io::Errno::PERM));
        assert_eq!(send(&client, b"x", &client, 0), Ok(1));
    }
}
