//! The sockets that contexts are.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::fstat;
use rustix::net::sockopt::{socket_cookie, socket_domain, socket_type};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};

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
    use umpire_service::{ClientSocket, Closer, FLAGS, send_packet};

    use super::*;

    #[test]
    fn packets_and_descriptors_arrive() {
        let kind = SocketType::SEQPACKET;
        let (client, server) = socketpair(AddressFamily::UNIX, kind, FLAGS, None).unwrap();
        let server = ClientSocket::new(server, &Closer::new(1 << 20));
        let mut buffer = [0; 16];
        send_packet(client.as_fd(), b"one", &[server.as_fd()]).unwrap();
        send_packet(client.as_fd(), b"other", &[]).unwrap();
        let one = server.receive(&mut buffer).unwrap();
        assert_eq!((one.bytes, one.rights.len(), one.cut), (3, 1, false));
        assert_eq!(&buffer[..3], b"one");
        let same = FileId::of(one.rights[0].as_fd()).unwrap();
        assert_eq!(same, FileId::of(server.as_fd()).unwrap());
        assert_ne!(same, FileId::of(client.as_fd()).unwrap());
        let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None).unwrap();
        FileId::of(stream.as_fd()).unwrap_err();
        FileId::of(fs::File::open("/dev/null").unwrap().as_fd()).unwrap_err();
        let other = server.receive(&mut buffer).unwrap();
        assert_eq!((other.bytes, other.rights.len()), (5, 0));
        drop(client);
        assert_eq!(server.receive(&mut buffer).unwrap().bytes, 0);
    }

    #[test]
    fn nothing_can_be_written_to_a_context() {
        let (ours, theirs) = context_pair().unwrap();
        let error = send_packet(theirs.as_fd(), b"x", &[]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPIPE));
        send_packet(ours.as_fd(), b"x", &[]).unwrap();
    }
}
