//! The control socket's name.

use std::ffi::CStr;

use rustix::net::SocketAddrUnix;

/// The address that `UMPIRE_PERFMON` names, or why there is none. Does not
/// allocate.
pub(crate) fn socket() -> Result<SocketAddrUnix, &'static str> {
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
                .map_err(|_| "UMPIRE_PERFMON is too long for a socket");
        }
    }
    Err("UMPIRE_PERFMON names no control socket (umpire run --control)")
}
