//! The system call `perf_event_open`.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// The first published size of `perf_event_attr` (PERF_ATTR_SIZE_VER0), which every
/// kernel takes.
#[repr(C)]
struct Attr {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    bp_type: u32,
    bp_addr: u64,
}

const SIZE_VER0: u32 = 64;
const _: () = assert!(size_of::<Attr>() == SIZE_VER0 as usize);

const PERF_TYPE_HARDWARE: u32 = 0;
const PERF_COUNT_HW_CPU_CYCLES: u64 = 0;
/// `disabled`, `exclude_kernel` and `exclude_hv`: the least that any user may ask for.
const FLAGS: u64 = 1 << 0 | 1 << 5 | 1 << 6;
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 1 << 3;
const THIS_THREAD: libc::pid_t = 0;
const ANY_CPU: libc::c_int = -1;
const NO_GROUP: libc::c_int = -1;

/// Opens, and with the result's drop closes, a counter of this thread's cycles.
pub(super) fn open_hardware_cycles() -> io::Result<OwnedFd> {
    let attr = Attr {
        kind: PERF_TYPE_HARDWARE,
        size: SIZE_VER0,
        config: PERF_COUNT_HW_CPU_CYCLES,
        sample_period: 0,
        sample_type: 0,
        read_format: 0,
        flags: FLAGS,
        wakeup_events: 0,
        bp_type: 0,
        bp_addr: 0,
    };
    // SAFETY: `attr` is readable for the `size` bytes that it states, and the other
    // arguments are plain numbers of the types that the call takes.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attr,
            THIS_THREAD,
            ANY_CPU,
            NO_GROUP,
            PERF_FLAG_FD_CLOEXEC,
        )
    };
    match RawFd::try_from(fd) {
        // SAFETY: the call returned a new descriptor that nobody else has.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
