//! What the servers of this repository share: sockets of the file system that local clients
//! connect to, how a server gets one and who is at the other end, what it waits for, and how it
//! receives and sends without a wait for any client.
#![deny(unsafe_code)]

mod client;
mod closer;
mod namespace;
mod place;
mod poll;
mod sys;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, fchmod};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use thiserror::Error;

pub use client::{ClientSocket, Received, Rights, refuse_rights, send_packet};
pub use closer::Closer;
use place::{Name, Place};
pub use poll::{Happened, Poll};

/// Most connections that wait to be accepted.
/// So many may wait to be accepted, and one more.
pub const BACKLOG: u16 = 128;

/// Of each socket here: it never makes its thread wait, and children do not get it.
pub const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Who may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// Permission bits of the socket.
    pub mode: u32,
    /// Its group; `None`: that of the server.
    pub group: Option<u32>,
}

/// What comes on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bytes (`SOCK_STREAM`).
    Stream,
    /// Packets that are kept apart (`SOCK_SEQPACKET`).
    Packets,
    /// The same, with descriptors along. Of others the kernel refuses them, where it can.
    PacketsWithRights,
}

impl Kind {
    fn socket(self) -> SocketType {
        match self {
            Kind::Stream => SocketType::STREAM,
            Kind::Packets | Kind::PacketsWithRights => SocketType::SEQPACKET,
        }
    }
}

/// How messages call a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wording {
    /// The option that has its path: `--control`.
    pub option: &'static str,
    /// What serves it: `VMM`.
    pub server: &'static str,
}

/// A socket could not be made.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Another process serves the socket.
    #[error(
        "{} {}: another {server} serves this socket; choose another path or stop that {server}",
        .wording.option, .path.display(), server = .wording.server
    )]
    Live {
        /// How it is called.
        wording: Wording,
        /// The path of the socket.
        path: PathBuf,
    },
    /// Something that is no socket has this name.
    #[error(
        "{} {}: there is something that is no socket; choose another path",
        .wording.option, .path.display()
    )]
    NoSocket {
        /// How it is called.
        wording: Wording,
        /// The path of the socket.
        path: PathBuf,
    },
    /// The path is too long for a socket.
    #[error(
        "{} {}: a socket's path has at most 107 bytes; choose a shorter one",
        .wording.option, .path.display()
    )]
    Path {
        /// How it is called.
        wording: Wording,
        /// The path of the socket.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("{} {}: {what} failed: {error}", .wording.option, .path.display())]
    Io {
        /// How it is called.
        wording: Wording,
        /// The path of the socket.
        path: PathBuf,
        /// The name of the call, and the option that it is about.
        what: String,
        error: io::Error,
    },
}

/// The listening socket. Its name in the file system is removed with it.
#[derive(Debug)]
pub struct Listener {
    /// On those that nobody has accepted there may be descriptors, too.
    socket: ClientSocket,
    closer: Closer,
    place: Place,
    name: Name,
}

impl Listener {
    /// Listens at `path`. A socket that an earlier server has left there is replaced. What
    /// clients leave behind is closed by `closer`.
    ///
    /// # Errors
    /// Somebody serves it, something else has the name, or a system call failed.
    pub fn new(
        path: &Path,
        kind: Kind,
        access: &Access,
        wording: Wording,
        closer: &Closer,
    ) -> Result<Self, SocketError> {
        let failed = |what: &str| failure(path, wording, what.to_owned());
        let address = SocketAddrUnix::new(path).map_err(|_| SocketError::Path {
            wording,
            path: path.to_owned(),
        })?;
        let place = Place::of(path).map_err(failed("bind"))?;
        clear(path, &place, kind.socket(), &address, wording)?;
        let socket = open(kind.socket()).map_err(failed("socket"))?;
        // The name gets the mode of the socket, so nobody can connect before it has its own
        // below, which no umask restricts.
        fchmod(&socket, Mode::from_raw_mode(access.mode & 0o600))
            .map_err(io::Error::from)
            .map_err(failed("fchmod"))?;
        bind(&socket, &address)
            .map_err(io::Error::from)
            .map_err(failed("bind"))?;
        let bound = place.bound(socket.as_fd()).map_err(failed("bind"))?;
        if kind != Kind::PacketsWithRights {
            refuse_rights(&socket);
        }
        let listener = Self {
            socket: ClientSocket::new(socket, closer),
            closer: closer.clone(),
            place,
            name: bound.name,
        };
        bound
            .set_group(access)
            .map_err(failed(&format!("chown ({}-group)", wording.option)))?;
        bound
            .set_mode(access)
            .map_err(failed(&format!("chmod ({}-mode)", wording.option)))?;
        listen(&listener.socket, BACKLOG.into())
            .map_err(io::Error::from)
            .map_err(failed("listen"))?;
        // Before `listen` the socket looked as if nobody served it, and a second server
        // that starts may have replaced it. From now on none does.
        if listener.has_name() {
            Ok(listener)
        } else {
            Err(SocketError::Live {
                wording,
                path: path.to_owned(),
            })
        }
    }

    /// Whether the name still leads to this socket.
    pub fn has_name(&self) -> bool {
        self.place.has(self.name)
    }

    /// A connection that waits to be accepted. Never waits itself.
    pub fn accept(&self) -> Accepted {
        accept(&self.socket, &self.closer)
    }
}

/// What comes of a look who wants to connect.
#[derive(Debug)]
pub enum Accepted {
    /// Somebody has connected.
    Client(ClientSocket),
    /// Nobody waits.
    Nobody,
    /// Who waited is gone, or a signal has come: somebody else may wait.
    Gone,
    /// Somebody waits, and cannot be accepted for want of descriptors. The socket would report
    /// that again at once, and go on doing so.
    Full(io::Error),
}

/// Accepts a connection at a socket that somebody else has made. Never waits.
pub fn accept(listener: &impl AsFd, closer: &Closer) -> Accepted {
    let accepted = closer.has_room(listener.as_fd());
    let accepted = accepted.and_then(|()| Ok(accept_with(listener, FLAGS)?));
    match accepted {
        Ok(socket) => Accepted::Client(ClientSocket::new(socket, closer)),
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock => Accepted::Nobody,
            io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => Accepted::Gone,
            _ => Accepted::Full(error),
        },
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
            let _ = self.place.remove();
        }
    }
}

fn failure(path: &Path, wording: Wording, what: String) -> impl FnOnce(io::Error) -> SocketError {
    move |error| SocketError::Io {
        wording,
        path: path.to_owned(),
        what,
        error,
    }
}

fn open(kind: SocketType) -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, kind, FLAGS, None)?)
}

/// Removes a socket that nobody serves from `path`.
fn clear(
    path: &Path,
    place: &Place,
    kind: SocketType,
    address: &SocketAddrUnix,
    wording: Wording,
) -> Result<(), SocketError> {
    let failed = |what: &str| failure(path, wording, what.to_owned());
    let live = || SocketError::Live {
        wording,
        path: path.to_owned(),
    };
    let before = match place.look() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("stat")(error)),
        Ok((_, false)) => {
            return Err(SocketError::NoSocket {
                wording,
                path: path.to_owned(),
            });
        }
        Ok((there, true)) => there,
    };
    let probe = open(kind).map_err(failed("socket"))?;
    match connect(&probe, address) {
        Err(rustix::io::Errno::CONNREFUSED) => match place.look() {
            Ok((name, _)) if name == before => place.remove().map_err(failed("unlink")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            // Another server was quicker.
            _ => Err(live()),
        },
        // The queue is full, or the socket is of another kind: somebody serves it.
        _ => Err(live()),
    }
}

/// The process at the other end, as of its `connect`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// 0 stands for a process of another PID namespace.
    pub pid: u32,
    /// Its user; [`Peer::UNMAPPED`] if this process's user namespace has no number for it.
    pub uid: u32,
    /// Its groups, without those that have no number here.
    pub groups: Vec<u32>,
}

impl Peer {
    /// No user: the kernel's own number for that, `(uid_t) -1`. It calls all users that a
    /// namespace does not know by one number, that of `nobody`, and these must not pass for
    /// `nobody`, or for each other.
    pub const UNMAPPED: u32 = u32::MAX;

    /// Who has connected to `socket`.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn of(socket: &impl AsFd) -> io::Result<Self> {
        let [pid, uid, gid] = sys::peer_credentials(socket.as_fd())?;
        let mut groups = sys::peer_groups(socket.as_fd())?;
        groups.push(gid);
        let shared = namespace::shared_numbers();
        if shared.group.is_some() {
            groups.retain(|group| Some(*group) != shared.group);
        }
        let uid = if Some(uid) == shared.user {
            Self::UNMAPPED
        } else {
            uid
        };
        Ok(Self { pid, uid, groups })
    }

    /// A descriptor of the process that has connected: whoever has its number later is
    /// another. The kernel has them since Linux 6.5.
    ///
    /// # Errors
    /// The kernel has none, or the process is gone.
    pub fn pidfd(socket: &impl AsFd) -> io::Result<OwnedFd> {
        sys::peer_pidfd(socket.as_fd())
    }

    /// A user in no group.
    pub fn of_user(uid: u32) -> Self {
        Self {
            uid,
            ..Self::default()
        }
    }

    /// Whether it is in a group.
    pub fn is_in(&self, group: u32) -> bool {
        self.groups.contains(&group)
    }
}

/// The user and the group by whose number the kernel calls all those that this process's user
/// namespace does not know. `None`: it knows all.
pub fn unmapped_numbers() -> (Option<u32>, Option<u32>) {
    let shared = namespace::shared_numbers();
    (shared.user, shared.group)
}

/// Raises the soft limit of open files to the hard one: each client takes descriptors, and
/// what it asks for takes more. Returns the limit as it is now.
pub fn raise_open_files() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        log::debug!("the limit of open files stays as it is: {error}");
    }
    // `None` stands for no limit.
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};

    use super::*;

    const ACCESS: Access = Access {
        mode: 0o640,
        group: None,
    };
    const WORDING: Wording = Wording {
        option: "--control",
        server: "VMM",
    };

    fn listener(path: &Path) -> Result<Listener, SocketError> {
        Listener::new(path, Kind::Packets, &ACCESS, WORDING, &Closer::new(1 << 20))
    }

    fn dial(path: &Path) -> rustix::io::Result<OwnedFd> {
        let socket = open(SocketType::SEQPACKET).unwrap();
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let first = listener(&path).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        let error = listener(&path).unwrap_err();
        assert!(matches!(error, SocketError::Live { .. }), "{error}");
        // The first VMM ends without having removed the name.
        let kept = folder.path().join("kept");
        fs::hard_link(&path, &kept).unwrap();
        drop(first);
        assert!(!path.exists());
        let second = listener(&kept).unwrap();
        dial(&kept).unwrap();
        drop(second);
        fs::write(&path, "").unwrap();
        let error = listener(&path).unwrap_err();
        assert!(matches!(error, SocketError::NoSocket { .. }), "{error}");
        let long = folder.path().join("x".repeat(120));
        let error = listener(&long).unwrap_err();
        assert!(matches!(error, SocketError::Path { .. }), "{error}");
    }

    #[test]
    fn the_name_of_another_vmm_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let first = listener(&path).unwrap();
        assert!(first.has_name());
        fs::rename(&path, folder.path().join("aside")).unwrap();
        assert!(!first.has_name());
        let second = listener(&path).unwrap();
        drop(first);
        assert!(second.has_name(), "it went with the first one");
        dial(&path).unwrap();
    }

    /// Whoever owns the folder may swap the name at any time: nothing else gets the mode.
    #[test]
    fn the_mode_is_that_of_the_socket_whatever_has_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let [path, victim, aside] =
            ["control", "victim", "aside"].map(|name| folder.path().join(name));
        fs::write(&victim, "").unwrap();
        fs::set_permissions(&victim, fs::Permissions::from_mode(0o600)).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let relaxed = std::sync::atomic::Ordering::Relaxed;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(relaxed) {
                    let is_socket = fs::symlink_metadata(&path)
                        .is_ok_and(|there| there.file_type().is_socket());
                    if is_socket && fs::rename(&path, &aside).is_ok() {
                        // The next listener may be quicker.
                        let _ = std::os::unix::fs::symlink(&victim, &path);
                    }
                }
            });
            for _ in 0..2000 {
                drop(listener(&path));
                let _ = fs::remove_file(&path);
            }
            stop.store(true, relaxed);
        });
        let mode = fs::metadata(&victim).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "it got the mode of a socket");
    }

    #[test]
    fn a_peer_has_its_user_and_groups() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let listener = listener(&path).unwrap();
        let _client = dial(&path).unwrap();
        let Accepted::Client(server) = listener.accept() else {
            panic!("somebody has connected");
        };
        assert!(matches!(listener.accept(), Accepted::Nobody));
        let peer = Peer::of(&server).unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
        assert!(peer.is_in(rustix::process::getegid().as_raw()));
        if let Ok(pidfd) = Peer::pidfd(&server) {
            let info = format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd());
            let info = fs::read_to_string(info).unwrap();
            assert!(info.contains(&format!("Pid:\t{}", peer.pid)), "{info}");
        }
    }
}
