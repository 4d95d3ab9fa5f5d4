//! SIGINT, SIGTERM and SIGHUP as something to wait for.

use vmm_sys_util::errno;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::signal::register_signal_handler;

use super::sys;

/// Makes SIGINT, SIGTERM and SIGHUP readable on the returned event, for the whole
/// process. A terminal that goes away ends the run in good order, too: an audit
/// file gets its last line.
///
/// # Errors
/// No event descriptor is left, or `sigaction` failed.
pub(crate) fn stop_requests() -> errno::Result<EventFd> {
    let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
        .map_err(|error| errno::Error::new(error.raw_os_error().unwrap_or(libc::EMFILE)))?;
    sys::announce_signals_on(&event)?;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        register_signal_handler(signal, sys::on_stop_signal)?;
    }
    Ok(event)
}
