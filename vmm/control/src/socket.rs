//! Packets on sockets that keep them apart (`SOCK_SEQPACKET`), with descriptors along.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use perfmon_abi::wire::MAX_PACKET;
use rustix::fs::fstat;
use rustix::net::sockopt::{socket_cookie, socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
    recvmsg, sendmsg, shutdown, socketpair,
};

/// Most descriptors taken in from one packet. A packet cannot have more (SCM_MAX_FD), so
/// the kernel never closes one on this thread.
const MOST_RECEIVED: usize = 253;
/// Most descriptors sent along with one packet.
const MOST_SENT: usize = 2;

/// A packet that was taken in.
#[derive(Debug)]
pub(crate) struct Packet {
    /// Bytes that it had: more than fit into the buffer, if it was cut.
    pub(crate) bytes: usize,
    /// Descriptors that came with it.
    pub(crate) fds: Vec<OwnedFd>,
    /// More descriptors came, and the kernel has closed them.
    pub(crate) more_fds: bool,
}

/// Takes a packet in; `None` at the end of the connection. An empty packet counts as
/// the end, since nothing tells the two apart.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8; MAX_PACKET],
) -> io::Result<Option<Packet>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_RECEIVED))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC | RecvFlags::TRUNC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok((got.bytes > 0).then_some(Packet {
        bytes: got.bytes,
        fds,
        more_fds: got.flags.contains(ReturnFlags::CTRUNC),
    }))
}

/// Sends a packet with at most two descriptors; never waits.
pub(crate) fn send(
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

/// The two ends of a context: the server's, to which nothing can be written,
/// and the tool's.
pub(crate) fn context_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let kind = SocketType::SEQPACKET;
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
    shutdown(&ours, Shutdown::Read)?;
    Ok((ours, theirs))
}

/// Which socket a descriptor is of. Inodes of sockets have 32 bits, so a patient
/// client can have one used again. Cookies are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    cookie: u64,
    device: u64,
    inode: u64,
}

impl FileId {
    /// Never waits. An error: the descriptor is not that of a socket like those of
    /// contexts.
    pub(crate) fn of(fd: BorrowedFd<'_>) -> io::Result<Self> {
        // First the socket's own options: only of a socket does `fstat` ask no file
        // system, which might make this thread wait.
        let kind = (socket_domain(fd)?, socket_type(fd)?);
        if kind != (AddressFamily::UNIX, SocketType::SEQPACKET) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let cookie = socket_cookie(fd)?;
        if cookie == 0 {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let stat = fstat(fd)?;
        Ok(Self {
            cookie,
            device: stat.st_dev,
            inode: stat.st_ino,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsFd;

    use rustix::net::socket_with;
    use umpire_socket::FLAGS;

    use super::*;

    #[test]
    fn packets_and_descriptors_arrive() {
        let kind = SocketType::SEQPACKET;
        let (client, server) = socketpair(AddressFamily::UNIX, kind, FLAGS, None).unwrap();
        let mut buffer = Box::new([0; MAX_PACKET]);
        send(client.as_fd(), b"one", &[server.as_fd()]).unwrap();
        send(client.as_fd(), b"other", &[]).unwrap();
        let one = receive(server.as_fd(), &mut buffer).unwrap().unwrap();
        assert_eq!((one.bytes, one.fds.len(), one.more_fds), (3, 1, false));
        assert_eq!(&buffer[..3], b"one");
        let same = FileId::of(one.fds[0].as_fd()).unwrap();
        assert_eq!(same, FileId::of(server.as_fd()).unwrap());
        assert_ne!(same, FileId::of(client.as_fd()).unwrap());
        let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None).unwrap();
        FileId::of(stream.as_fd()).unwrap_err();
        FileId::of(fs::File::open("/dev/null").unwrap().as_fd()).unwrap_err();
        let other = receive(server.as_fd(), &mut buffer).unwrap().unwrap();
        assert_eq!((other.bytes, other.fds.len()), (5, 0));
        drop(client);
        assert!(receive(server.as_fd(), &mut buffer).unwrap().is_none());
    }

    #[test]
    fn nothing_can_be_written_to_a_context() {
        let (ours, theirs) = context_pair().unwrap();
        let error = send(theirs.as_fd(), b"x", &[]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPIPE));
        send(ours.as_fd(), b"x", &[]).unwrap();
    }
}
