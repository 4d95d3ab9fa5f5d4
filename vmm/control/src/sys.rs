//! What rustix has no safe call for: who a peer is, which socket it is, the fill of a
//! socket's queue, and a mapping that is shared with a tool.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// Bytes of a page.
pub(super) const PAGE: usize = 4096;

/// `SO_PEERGROUPS` (socket.h): the supplementary groups of a peer.
const SO_PEERGROUPS: libc::c_int = 59;
/// `SO_COOKIE` (socket.h): a number of 64 bits that is never used again.
const SO_COOKIE: libc::c_int = 57;

/// The supplementary groups that the peer of a Unix socket had when it
/// connected.
pub(super) fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups: Vec<u32> = vec![0; 32];
    loop {
        let mut bytes = libc::socklen_t::try_from(size_of_val(groups.as_slice()))
            .map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: the kernel writes at most `bytes` bytes, which is the size of
        // the vector's memory, and then the size that it has or needs.
        let ret = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let count = usize::try_from(bytes).unwrap_or(0) / size_of::<u32>();
        match ret {
            0 => {
                groups.truncate(count);
                return Ok(groups);
            }
            _ => {
                let error = io::Error::last_os_error();
                if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
                    return Err(error);
                }
                groups.resize(count, 0);
            }
        }
    }
}

/// Process, user and group of the peer of a Unix socket, as of its `connect`. A
/// process that this one's PID namespace does not have is 0.
pub(super) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: libc::uid_t::MAX,
        gid: libc::gid_t::MAX,
    };
    // SAFETY: three integers, of which every value is one.
    let got = unsafe { option(socket, libc::SO_PEERCRED, &mut peer) }?;
    match got == size_of::<libc::ucred>() {
        true => Ok(peer),
        false => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// The socket's number, which no other socket of the host ever has; an error if
/// the descriptor is none of a Unix socket that keeps packets apart. Asks the
/// kernel alone, never a file system, so it does not wait.
pub(super) fn packet_socket(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let (mut domain, mut kind): (libc::c_int, libc::c_int) = (0, 0);
    let mut cookie = 0_u64;
    // SAFETY: an integer, of which every value is one.
    unsafe { option(fd, libc::SO_DOMAIN, &mut domain) }?;
    // SAFETY: as before.
    unsafe { option(fd, libc::SO_TYPE, &mut kind) }?;
    if (domain, kind) != (libc::AF_UNIX, libc::SOCK_SEQPACKET) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: as before.
    let got = unsafe { option(fd, SO_COOKIE, &mut cookie) }?;
    match got == size_of::<u64>() && cookie != 0 {
        true => Ok(cookie),
        false => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// Reads an option of a socket into `value`, and says how many bytes it has.
///
/// # Safety
/// Every pattern of bits is a value of `T`.
unsafe fn option<T>(socket: BorrowedFd<'_>, name: libc::c_int, value: &mut T) -> io::Result<usize> {
    let mut bytes =
        libc::socklen_t::try_from(size_of::<T>()).map_err(|_| io::ErrorKind::OutOfMemory)?;
    // SAFETY: the kernel writes at most `bytes` bytes, which is the size of the
    // value, and the caller says that it may write any.
    let ret = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            std::ptr::from_mut(value).cast(),
            &raw mut bytes,
        )
    };
    match ret {
        0 => Ok(usize::try_from(bytes).unwrap_or(0)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Bytes that were sent and not read yet, with what the kernel adds to them.
pub(super) fn unread(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ (the number of TIOCOUTQ) writes one int.
    let ret = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    match ret {
        0 => Ok(usize::try_from(bytes).unwrap_or(0)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A shared mapping of a whole file, readable and writable.
#[derive(Debug)]
pub(super) struct Mapping {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone; memory has no thread.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `file`; not 0.
    pub(super) fn new(file: &OwnedFd, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_fd().as_raw_fd(),
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(at.cast())
            .map(|at| Self { at, len })
            .ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has `len` bytes until this value is dropped. Nobody
        // else writes them: the file is sealed against writers before any other
        // process gets it, and readers elsewhere do not matter to this process.
        // The file cannot shrink, as it is sealed against that too.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this address and length, and no
        // reference to it outlives this value.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    #[test]
    fn a_mapping_is_the_file() {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 2 * PAGE as u64).unwrap();
        let mut one = Mapping::new(&file, 2 * PAGE).unwrap();
        let mut other = Mapping::new(&file, 2 * PAGE).unwrap();
        one.bytes()[PAGE] = 7;
        assert_eq!((other.bytes()[PAGE], other.bytes().len()), (7, 2 * PAGE));
    }
}
