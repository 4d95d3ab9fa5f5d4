//! System calls for which rustix has no safe function: who a peer is, whether descriptors may
//! come, and which name a socket has.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// `SO_PEERGROUPS` (socket.h): the supplementary groups of a peer.
const SO_PEERGROUPS: c_int = 59;
/// `SO_PEERPIDFD` (socket.h), since Linux 6.5.
const SO_PEERPIDFD: c_int = 77;
/// `SO_PASSRIGHTS` (socket.h), since Linux 6.16.
const SO_PASSRIGHTS: c_int = 83;
/// `SIOCUNIXFILE` (un.h).
const SIOCUNIXFILE: libc::Ioctl = 0x89e0;
/// `NGROUPS_MAX` (limits.h): a process has no more groups than that.
const MOST_GROUPS: usize = 65_536;

/// Process, user and group of the peer of a Unix socket, as of its `connect`. The
/// process is 0 if this one's PID namespace does not have it. That is why
/// `rustix::net::sockopt::socket_peercred` does not fit: its process is never 0.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<[u32; 3]> {
    let mut credentials = [0, u32::MAX, u32::MAX];
    match option(socket, libc::SO_PEERCRED, &mut credentials)? {
        3 => Ok(credentials),
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// The supplementary groups that the peer of a Unix socket had when it
/// connected.
pub(crate) fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups: Vec<u32> = vec![0; 32];
    loop {
        match option(socket, SO_PEERGROUPS, &mut groups) {
            Ok(count) => {
                groups.truncate(count);
                return Ok(groups);
            }
            Err(error)
                if error.raw_os_error() == Some(libc::ERANGE) && groups.len() < MOST_GROUPS =>
            {
                groups.resize(8 * groups.len(), 0);
            }
            Err(error) => return Err(error),
        }
    }
}

/// A descriptor of the process that connected, by which a later process with the same
/// number is told from it.
pub(crate) fn peer_pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut fd = [u32::MAX];
    option(socket, SO_PEERPIDFD, &mut fd)?;
    let fd = RawFd::try_from(fd[0]).map_err(|_| io::ErrorKind::Unsupported)?;
    // SAFETY: the kernel has just made the descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Reads an option of a socket that consists of words of 32 bits. How many there
/// are.
fn option(socket: BorrowedFd<'_>, name: c_int, value: &mut [u32]) -> io::Result<usize> {
    let bytes = size_of_val(value);
    let mut bytes = libc::socklen_t::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
    // SAFETY: the kernel writes at most `bytes` bytes, which is the size of the
    // slice's memory, and every pattern of bits is a `u32`.
    let ret = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            value.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    match ret {
        0 => Ok(usize::try_from(bytes).unwrap_or(0) / size_of::<u32>()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the kernel takes descriptors that are sent to this socket, as it always did before
/// Linux 6.16.
pub(crate) fn passes_rights(socket: BorrowedFd<'_>) -> bool {
    let mut passes = [1];
    option(socket, SO_PASSRIGHTS, &mut passes).is_err() || passes[0] != 0
}

/// Has the kernel refuse descriptors that are sent to this socket, or to one that connects to
/// it from now on.
pub(crate) fn refuse_rights(socket: BorrowedFd<'_>) -> io::Result<()> {
    let off: c_int = 0;
    let bytes = libc::socklen_t::try_from(size_of_val(&off));
    let bytes = bytes.map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the kernel reads `bytes` bytes, which is the size of `off`.
    let ret = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const off).cast(),
            bytes,
        )
    };
    match ret {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A descriptor (`O_PATH`) of the name that a Unix socket is bound to, whoever has renamed it
/// or put something else in its place. Needs CAP_NET_ADMIN.
pub(crate) fn bound_name(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: SIOCUNIXFILE takes no argument, and returns a new descriptor.
    let fd = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCUNIXFILE) };
    match fd {
        0.. => {
            // SAFETY: the kernel has just made the descriptor, and nobody else knows it.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        }
        _ => Err(io::Error::last_os_error()),
    }
}
