//! Sockets that keep packets apart (`SOCK_SEQPACKET`), with descriptors along.

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use perfmon_abi::wire::MAX_PACKET;
use rustix::fs::{Gid, Mode, fchmod, fstat};
use rustix::net::sockopt::{socket_cookie, socket_domain, socket_type};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg, shutdown, socket_with,
    socketpair,
};
use thiserror::Error;

use crate::config::Access;
use crate::sys;

/// Most connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Most descriptors taken in from one packet. A packet cannot have more (SCM_MAX_FD), so
/// the kernel never closes one on this thread.
const MOST_RECEIVED: usize = 253;
/// Most descriptors sent along with one packet.
const MOST_SENT: usize = 2;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// The control socket could not be made.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Another process serves the socket.
    #[error(
        "--control {}: another VMM serves this socket; choose another path or stop that VMM",
        .0.display()
    )]
    Live(PathBuf),
    /// Something that is no socket has this name.
    #[error(
        "--control {}: there is something that is no socket; choose another path",
        .0.display()
    )]
    NoSocket(PathBuf),
    /// The path is too long for a socket.
    #[error("--control {}: a socket's path has at most 107 bytes; choose a shorter one", .0.display())]
    Path(PathBuf),
    /// A system call failed.
    #[error("--control {}: {what} failed: {error}", .path.display())]
    Io {
        /// The path of the socket.
        path: PathBuf,
        /// The name of the call.
        what: &'static str,
        /// Why.
        error: io::Error,
    },
}

/// The listening socket. Its name in the file system is removed with it.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of its name.
    name: (u64, u64),
}

impl Listener {
    /// Listens at `path`. A socket that an earlier VMM has left there is replaced.
    pub(crate) fn new(path: &Path, access: &Access) -> Result<Self, SocketError> {
        let failed = |what| {
            move |error: io::Error| SocketError::Io {
                path: path.to_owned(),
                what,
                error,
            }
        };
        let address = SocketAddrUnix::new(path).map_err(|_| SocketError::Path(path.to_owned()))?;
        clear(path, &address)?;
        let socket = open().map_err(failed("socket"))?;
        // The name gets the mode of the socket, so nobody can connect before the chmod
        // below, which no umask restricts.
        fchmod(&socket, Mode::from_raw_mode(access.mode & 0o600))
            .map_err(io::Error::from)
            .map_err(failed("fchmod"))?;
        bind(&socket, &address)
            .map_err(io::Error::from)
            .map_err(failed("bind"))?;
        let listener = Self {
            socket,
            path: path.to_owned(),
            name: name_of(path).map_err(failed("stat"))?,
        };
        if let Some(group) = access.group {
            rustix::fs::chown(path, None, Some(Gid::from_raw(group)))
                .map_err(io::Error::from)
                .map_err(failed("chown (--control-group)"))?;
        }
        fs::set_permissions(path, fs::Permissions::from_mode(access.mode))
            .map_err(failed("chmod (--control-mode)"))?;
        listen(&listener.socket, BACKLOG)
            .map_err(io::Error::from)
            .map_err(failed("listen"))?;
        // Before `listen` the socket looked as if nobody served it, and a second VMM
        // that starts may have replaced it. From now on none does.
        if listener.has_name() {
            Ok(listener)
        } else {
            Err(SocketError::Live(path.to_owned()))
        }
    }

    /// Whether the name still leads to this socket.
    fn has_name(&self) -> bool {
        name_of(&self.path).is_ok_and(|name| name == self.name)
    }

    /// A connection that waits to be accepted. Never waits itself.
    pub(crate) fn accept(&self) -> io::Result<OwnedFd> {
        Ok(accept_with(&self.socket, FLAGS)?)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another process may have removed the name, or serve there now.
        if self.has_name() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Device and inode of a name.
fn name_of(path: &Path) -> io::Result<(u64, u64)> {
    let there = fs::symlink_metadata(path)?;
    Ok((there.dev(), there.ino()))
}

fn open() -> io::Result<OwnedFd> {
    let kind = SocketType::SEQPACKET;
    Ok(socket_with(AddressFamily::UNIX, kind, FLAGS, None)?)
}

/// Removes a socket that nobody serves from `path`.
fn clear(path: &Path, address: &SocketAddrUnix) -> Result<(), SocketError> {
    let failed = |what| {
        move |error: io::Error| SocketError::Io {
            path: path.to_owned(),
            what,
            error,
        }
    };
    let before = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("stat")(error)),
        Ok(there) if !there.file_type().is_socket() => {
            return Err(SocketError::NoSocket(path.to_owned()));
        }
        Ok(there) => (there.dev(), there.ino()),
    };
    let probe = open().map_err(failed("socket"))?;
    match connect(&probe, address) {
        Err(rustix::io::Errno::CONNREFUSED) => match name_of(path) {
            Ok(name) if name == before => fs::remove_file(path).map_err(failed("unlink")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            // Another VMM was quicker.
            _ => Err(SocketError::Live(path.to_owned())),
        },
        // The queue is full, or the socket is of another kind: somebody serves it.
        _ => Err(SocketError::Live(path.to_owned())),
    }
}

/// The process at the other end, as of its `connect`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Peer {
    /// 0 stands for a process of another PID namespace.
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) groups: Vec<u32>,
}

impl Peer {
    pub(crate) fn of(socket: &OwnedFd) -> io::Result<Self> {
        let [pid, uid, gid] = sys::peer_credentials(socket.as_fd())?;
        let mut groups = sys::peer_groups(socket.as_fd())?;
        groups.push(gid);
        Ok(Self { pid, uid, groups })
    }

    /// A user in no group.
    #[cfg(test)]
    pub(crate) fn of_user(uid: u32) -> Self {
        Self {
            uid,
            ..Self::default()
        }
    }

    pub(crate) fn is_in(&self, group: u32) -> bool {
        self.groups.contains(&group)
    }
}

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
    use super::*;

    const ACCESS: Access = Access {
        mode: 0o640,
        group: None,
    };

    fn dial(path: &Path) -> rustix::io::Result<OwnedFd> {
        let socket = open().unwrap();
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let first = Listener::new(&path, &ACCESS).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        let error = Listener::new(&path, &ACCESS).unwrap_err();
        assert!(matches!(error, SocketError::Live(_)), "{error}");
        // The first VMM ends without having removed the name.
        let kept = folder.path().join("kept");
        fs::hard_link(&path, &kept).unwrap();
        drop(first);
        assert!(!path.exists());
        let second = Listener::new(&kept, &ACCESS).unwrap();
        dial(&kept).unwrap();
        drop(second);
        fs::write(&path, "").unwrap();
        let error = Listener::new(&path, &ACCESS).unwrap_err();
        assert!(matches!(error, SocketError::NoSocket(_)), "{error}");
        let long = folder.path().join("x".repeat(120));
        let error = Listener::new(&long, &ACCESS).unwrap_err();
        assert!(matches!(error, SocketError::Path(_)), "{error}");
    }

    #[test]
    fn the_name_of_another_vmm_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let first = Listener::new(&path, &ACCESS).unwrap();
        assert!(first.has_name());
        fs::rename(&path, folder.path().join("aside")).unwrap();
        assert!(!first.has_name());
        let second = Listener::new(&path, &ACCESS).unwrap();
        drop(first);
        assert!(second.has_name(), "it went with the first one");
        dial(&path).unwrap();
    }

    #[test]
    fn packets_and_descriptors_arrive() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = Listener::new(&path, &ACCESS).unwrap();
        let client = dial(&path).unwrap();
        let server = listener.accept().unwrap();
        assert!(listener.accept().is_err());
        let peer = Peer::of(&server).unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert!(peer.is_in(rustix::process::getegid().as_raw()));
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
