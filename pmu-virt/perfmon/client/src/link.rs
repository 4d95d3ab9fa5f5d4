//! One connection to a VMM's control socket.
//!
//! An exchange neither allocates nor locks: the C library makes it in signal
//! handlers.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use perfmon_abi::wire::last::PACKET;
use perfmon_abi::wire::{Errno, FrameError, MAX_PACKET, NO_CONTEXT, Refusal, Reply, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fstat;
use rustix::io::Errno as OsErrno;
use rustix::net::UCred;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
    sendmsg, socket_with,
};

/// Packets and errors that can be left on a connection.
const MOST_LEFT: usize = 8;

/// Room for a packet. A request's argument lies behind its header, at
/// [`ARGUMENT`]; the reply takes the request's place.
pub type Packet = [u8; MAX_PACKET];
/// Where a request's argument begins in a [`Packet`].
pub const ARGUMENT: usize = Request::HEADER;

/// An exchange failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkError {
    /// The socket could not be reached.
    Connect(OsErrno),
    /// The request did not leave.
    NotSent(OsErrno),
    /// The VMM closed the connection; it may have done the command.
    Closed,
    /// No reply within the time limit; it may still do the command.
    Timeout,
    /// Any other error of the system.
    System(OsErrno),
    /// The packet is no frame of this protocol.
    Frame(FrameError),
    /// The reply is to another request.
    OutOfStep,
}

impl From<LinkError> for Refusal {
    fn from(error: LinkError) -> Self {
        let known = |os: OsErrno, other| Errno::from_number(os.raw_os_error()).unwrap_or(other);
        let (errno, reason) = match error {
            LinkError::Connect(OsErrno::ACCESS | OsErrno::PERM) => (
                Errno::EPERM,
                "the control socket does not let this user in (its mode and group decide)",
            ),
            LinkError::Connect(OsErrno::MFILE) => (Errno::EMFILE, Errno::EMFILE.text()),
            LinkError::Connect(OsErrno::NOENT) => {
                (Errno::ENOSYS, "there is no such control socket")
            }
            LinkError::Connect(_) => (Errno::ENOSYS, "nobody serves the control socket"),
            LinkError::Closed | LinkError::NotSent(OsErrno::PIPE) => {
                (Errno::ECONNRESET, "the VMM closed the connection")
            }
            LinkError::NotSent(os) | LinkError::System(os) => {
                let errno = known(os, Errno::EIO);
                (errno, errno.text())
            }
            LinkError::Timeout => (Errno::ETIMEDOUT, "the VMM did not answer in time"),
            LinkError::Frame(FrameError::Version(_)) => (
                Errno::EPROTO,
                "the VMM speaks another version of the protocol",
            ),
            LinkError::Frame(_) => (Errno::EPROTO, "what came is no frame of this protocol"),
            LinkError::OutOfStep => (Errno::EPROTO, "the reply was to another request"),
        };
        Refusal::new(errno, reason)
    }
}

/// What is asked for. The argument lies in the packet already.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Number of the command.
    pub command: u16,
    /// Handle of the context.
    pub context: u32,
    /// Elements of the argument.
    pub nargs: i32,
    /// Bytes of the argument.
    pub length: usize,
    /// A descriptor that goes with it.
    pub descriptor: Option<BorrowedFd<'a>>,
}

impl Question<'_> {
    /// A command without context or argument.
    #[must_use]
    pub fn plain(command: u16) -> Self {
        Question {
            command,
            context: NO_CONTEXT,
            nargs: 0,
            length: 0,
            descriptor: None,
        }
    }
}

/// A reply, and the descriptors that came with it. They are closed on exec.
#[derive(Debug)]
pub struct Answer<'a> {
    pub reply: Reply<'a>,
    /// Its descriptors, in their order.
    pub descriptors: [Option<OwnedFd>; 2],
}

/// A connection.
#[derive(Debug)]
pub struct Link {
    /// Is there until the end.
    socket: Option<OwnedFd>,
    inode: u64,
    last: u32,
    broken: bool,
    /// What the VMM has left, where it came in place of a reply.
    left: Option<OwnedFd>,
}

/// The number of a socket, which tells whether a descriptor still is it; `None`
/// if the descriptor is not open.
#[must_use]
pub fn inode(descriptor: BorrowedFd<'_>) -> Option<u64> {
    fstat(descriptor).ok().map(|stat| stat.st_ino)
}

impl Link {
    /// Connects. Sending and the reply may each take `timeout`.
    ///
    /// # Errors
    /// [`LinkError::Connect`].
    pub fn connect(address: &SocketAddrUnix, timeout: Duration) -> Result<Self, LinkError> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(LinkError::Connect)?;
        for which in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, which, Some(timeout)).map_err(LinkError::Connect)?;
        }
        connect(&socket, address).map_err(LinkError::Connect)?;
        let inode = inode(socket.as_fd()).ok_or(LinkError::Connect(OsErrno::BADF))?;
        Ok(Link {
            socket: Some(socket),
            inode,
            last: 0,
            broken: false,
            left: None,
        })
    }

    /// The process that serves it, as this process's own namespaces number it and its user.
    ///
    /// # Errors
    /// Nobody is connected, or the kernel refuses.
    pub fn server(&self) -> std::io::Result<UCred> {
        let socket = self.socket().ok_or(OsErrno::NOTCONN)?;
        Ok(rustix::net::sockopt::socket_peercred(socket)?)
    }

    /// The socket, unless somebody closed it; the number may be another file's
    /// by now.
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        let socket = self.socket.as_ref()?.as_fd();
        (inode(socket) == Some(self.inode)).then_some(socket)
    }

    /// Descriptor and number of its socket.
    #[must_use]
    pub fn identity(&self) -> (RawFd, u64) {
        let number = self.socket.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        (number, self.inode)
    }

    /// Whether another exchange may work: nothing went wrong so far, and the VMM
    /// has not closed the connection.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        let Some(socket) = self.socket().filter(|_| !self.broken) else {
            return false;
        };
        let mut polled = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
        let polling = poll(&mut polled, Some(&Timespec::default()));
        polling.is_ok() && polled[0].revents().is_empty()
    }

    /// What the VM has left on a connection that it has closed as it ended: a file for
    /// [`LastCounts`](crate::LastCounts).
    #[must_use]
    pub fn last_words(mut self) -> Option<OwnedFd> {
        if self.left.is_some() {
            return self.left.take();
        }
        let socket = self.socket()?;
        // A reply that nobody has waited for may be in front, and one error.
        for _ in 0..MOST_LEFT {
            let mut bytes = [0; PACKET.len()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC | RecvFlags::TRUNC;
            let received = recvmsg(
                socket,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut control,
                flags,
            );
            match received {
                Ok(received) if received.bytes == 0 => return None,
                Ok(received) if received.bytes == bytes.len() && bytes == PACKET => {
                    return control.drain().find_map(|message| match message {
                        RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
                        _ => None,
                    });
                }
                Err(OsErrno::AGAIN) => return None,
                Ok(_) | Err(_) => {}
            }
        }
        None
    }

    /// Asks, and waits for the reply. After any error but
    /// [`LinkError::NotSent`] it is not known whether the command was done.
    ///
    /// # Errors
    /// See [`LinkError`]. The connection is of no use after any of them. That
    /// the VMM refuses the command is a reply, not an error.
    pub fn exchange<'p>(
        &mut self,
        question: Question<'_>,
        packet: &'p mut Packet,
    ) -> Result<Answer<'p>, LinkError> {
        let broken = std::mem::replace(&mut self.broken, true);
        self.last = self.last.wrapping_add(1).max(1);
        let socket = self.socket().filter(|_| !broken);
        let socket = socket.ok_or(LinkError::NotSent(OsErrno::NOTCONN))?;
        send(socket, self.last, question, packet)?;
        let (length, descriptors) = receive(socket, packet)?;
        if packet[..length] == PACKET {
            // It ended as the request was under way.
            [self.left, _] = descriptors;
            return Err(LinkError::Closed);
        }
        let reply = Reply::decode(&packet[..length]).map_err(LinkError::Frame)?;
        // A reply to no request refuses the connection itself.
        let refused = reply.id == 0 && reply.errno != 0;
        if !refused && (reply.id != self.last || reply.command != question.command) {
            return Err(LinkError::OutOfStep);
        }
        self.broken = refused;
        Ok(Answer { reply, descriptors })
    }
}

fn send(
    socket: BorrowedFd<'_>,
    id: u32,
    question: Question<'_>,
    packet: &mut Packet,
) -> Result<(), LinkError> {
    let (header, argument) = packet.split_at_mut(ARGUMENT);
    let request = Request {
        command: question.command,
        id,
        context: question.context,
        nargs: question.nargs,
        payload: &argument[..question.length],
    };
    header.copy_from_slice(&request.header());
    let bytes = &packet[..ARGUMENT + question.length];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptor = question.descriptor.as_slice();
    if !descriptor.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptor));
    }
    let iov = [IoSlice::new(bytes)];
    loop {
        match sendmsg(socket, &iov, &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(OsErrno::INTR) => {}
            Err(OsErrno::AGAIN) => return Err(LinkError::Timeout),
            Err(error) => return Err(LinkError::NotSent(error)),
        }
    }
}

fn receive(
    socket: BorrowedFd<'_>,
    packet: &mut Packet,
) -> Result<(usize, [Option<OwnedFd>; 2]), LinkError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut iov = [IoSliceMut::new(packet)];
        match recvmsg(socket, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => break received,
            Err(OsErrno::INTR) => {}
            Err(OsErrno::AGAIN) => return Err(LinkError::Timeout),
            Err(OsErrno::CONNRESET) => return Err(LinkError::Closed),
            Err(error) => return Err(LinkError::System(error)),
        }
    };
    if received.bytes == 0 {
        return Err(LinkError::Closed);
    }
    let mut descriptors = [None, None];
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    for (place, descriptor) in descriptors.iter_mut().zip(rights.flatten()) {
        *place = Some(descriptor);
    }
    Ok((received.bytes, descriptors))
}
impl Drop for Link {
    /// Closes the socket, but not the file of somebody else that has its number.
    fn drop(&mut self) {
        if self.socket().is_none() {
            std::mem::forget(self.socket.take());
        }
    }
}
