//! System calls for which rustix has no safe function: who a peer is, the fill of a
//! socket's queue, and a mapping that is shared with a tool.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};

use rustix::ioctl::{Getter, Opcode, ioctl};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

/// `SO_PEERGROUPS` (socket.h): the supplementary groups of a peer.
const SO_PEERGROUPS: c_int = 59;
/// `NGROUPS_MAX` (limits.h): a process has no more groups than that.
const MOST_GROUPS: usize = 65_536;
/// `SIOCOUTQ` (sockios.h).
const SIOCOUTQ: Opcode = 0x5411;

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
                groups.resize(2 * groups.len(), 0);
            }
            Err(error) => return Err(error),
        }
    }
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

/// Bytes that were sent and not read yet, with what the kernel adds to them.
pub(crate) fn unread(socket: BorrowedFd<'_>) -> io::Result<usize> {
    // SAFETY: SIOCOUTQ writes one int.
    let bytes = unsafe { ioctl(socket, Getter::<SIOCOUTQ, c_int>::new()) }?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// A shared mapping of a whole file, readable and writable.
#[derive(Debug)]
pub(crate) struct Mapping {
    at: NonNull<c_void>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone, and memory has no thread.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `file`; not 0.
    pub(crate) fn new(file: &OwnedFd, len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap(null_mut(), len, protection, MapFlags::SHARED, file, 0) }?;
        let at = NonNull::new(at).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { at, len })
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has `len` bytes until this value is dropped. Nobody
        // else writes them: the file is sealed against writers before any other
        // process gets it, and readers elsewhere do not matter to this process.
        // The file cannot shrink, as it is sealed against that too.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr().cast(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this address and length, and no
        // reference to it outlives this value.
        let _ = unsafe { munmap(self.at.as_ptr(), self.len) };
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
