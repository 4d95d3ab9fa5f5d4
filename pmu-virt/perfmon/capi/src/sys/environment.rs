//! The control socket's name.

use std::ffi::CStr;

use perfmon_abi::wire::Errno;
use rustix::net::SocketAddrUnix;

use crate::failure::{Failure, failure};

/// The address that `UMPIRE_PERFMON` names. Does not allocate.
pub(crate) fn socket() -> Result<SocketAddrUnix, Failure> {
    // SAFETY: the name is a C string. C programs may change their environment;
    // that they must not do so while another thread reads it is getenv's rule,
    // and perfmon.h's documentation passes it on.
    let value = unsafe { libc::getenv(c"UMPIRE_PERFMON".as_ptr()) };
    if !value.is_null() {
        // SAFETY: getenv returns a C string, which stays until the environment
        // is changed.
        let path = unsafe { CStr::from_ptr(value) };
        if !path.is_empty() {
            return SocketAddrUnix::new(path)
                .map_err(|_| failure(Errno::ENOSYS, "UMPIRE_PERFMON is too long for a socket"));
        }
    }
    let reason = "UMPIRE_PERFMON names no control socket (umpire run --control)";
    Err(failure(Errno::ENOSYS, reason))
}
