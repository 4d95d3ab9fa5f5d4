//! The system call `perf_event_open`.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use perf_event_open_sys::bindings as abi;
use perf_event_open_sys::perf_event_open;

const THIS_THREAD: libc::pid_t = 0;
const ANY_CPU: libc::c_int = -1;
const NO_GROUP: libc::c_int = -1;

/// Opens, and with the result's drop closes, a counter of this thread's cycles.
pub(super) fn open_hardware_cycles() -> io::Result<OwnedFd> {
    let mut attr = abi::perf_event_attr::default();
    attr.type_ = abi::PERF_TYPE_HARDWARE;
    attr.config = abi::PERF_COUNT_HW_CPU_CYCLES.into();
    // The first published size, which every kernel takes.
    attr.size = abi::PERF_ATTR_SIZE_VER0;
    // The least that any user may ask for.
    attr.set_disabled(1);
    attr.set_exclude_kernel(1);
    attr.set_exclude_hv(1);
    // SAFETY: `attr` is readable for the `size` bytes that it states, and the other
    // arguments are plain numbers of the types that the call takes.
    let fd = unsafe {
        perf_event_open(
            &raw mut attr,
            THIS_THREAD,
            ANY_CPU,
            NO_GROUP,
            abi::PERF_FLAG_FD_CLOEXEC.into(),
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call returned a new descriptor that nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
