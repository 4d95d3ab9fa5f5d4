//! The handler of SIGINT, SIGTERM and SIGHUP.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, Ordering};

use vmm_sys_util::errno;
use vmm_sys_util::eventfd::EventFd;

/// A duplicate of the event that the handler writes; never closed, so that a
/// late signal cannot hit another file.
static EVENT: AtomicI32 = AtomicI32::new(-1);

/// Lets [`on_stop_signal`] write `event`.
pub(super) fn announce_signals_on(event: &EventFd) -> errno::Result<()> {
    // SAFETY: dup takes an open descriptor and gives a new one or -1.
    let copy = unsafe { libc::dup(event.as_raw_fd()) };
    if copy < 0 {
        return errno::errno_result();
    }
    let before = EVENT.swap(copy, Ordering::AcqRel);
    if before >= 0 {
        // SAFETY: the descriptor was this module's own and is used no more; a
        // handler that has just read it writes to a closed descriptor at worst.
        unsafe { libc::close(before) };
    }
    Ok(())
}

/// Writes the event; nothing else is safe in a signal handler.
pub(super) extern "C" fn on_stop_signal(
    _: libc::c_int,
    _: *mut libc::siginfo_t,
    _: *mut libc::c_void,
) {
    let one = 1u64.to_ne_bytes();
    let fd = EVENT.load(Ordering::Acquire);
    if fd >= 0 {
        // SAFETY: write is async-signal-safe and reads 8 bytes of a local array.
        unsafe { libc::write(fd, one.as_ptr().cast(), one.len()) };
    }
}
