//! Memory without a name that can be mapped twice, and the protection of its pages.

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;

#[cfg(any(test, feature = "vm-memory"))]
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// Bytes of a page of the host's.
pub(super) const PAGE_SIZE: usize = 0x1000;

/// Memory of `size` bytes, as a file that nobody else sees.
pub(crate) fn unnamed_file(size: u64) -> io::Result<File> {
    let create = |flags| {
        // SAFETY: the name is a string that ends in 0; the call has no other memory.
        let fd = unsafe { libc::memfd_create(c"guest memory".as_ptr(), libc::MFD_CLOEXEC | flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(fd)
    };
    // Kernels before 6.3 know no files that are never executed.
    let fd = match create(libc::MFD_NOEXEC_SEAL) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => create(0)?,
        made => made?,
    };
    // SAFETY: the descriptor is new, so nobody else owns it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(size)?;
    Ok(file)
}

#[cfg(any(test, feature = "vm-memory"))]
/// Makes the page at guest-physical address `page` of `memory` read-only, or
/// `writable` again.
pub(crate) fn protect_page(memory: &GuestMemoryMmap, page: u64, writable: bool) -> io::Result<()> {
    let outside = |_| io::Error::from_raw_os_error(libc::EFAULT);
    let whole = memory.check_range(GuestAddress(page), PAGE_SIZE);
    let address = memory
        .get_host_address(GuestAddress(page))
        .map_err(outside)?;
    if !whole || address.addr() % PAGE_SIZE != 0 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
    // SAFETY: the page was just found to lie in one of `memory`'s mappings, which
    // stays mapped and readable; accesses of guest memory go through vm-memory's
    // volatile accessors, no reference to it exists.
    match unsafe { libc::mprotect(address.cast(), PAGE_SIZE, protection) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
