//! CPU time of a thread.

/// Nanoseconds for which the calling thread has been on a CPU since it began
/// (`clock_gettime(2)`, `CLOCK_THREAD_CPUTIME_ID`). A system call.
#[must_use]
pub fn thread_cpu_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is valid for writes of a timespec during the call.
    let ret = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    debug_assert_eq!(ret, 0, "Linux has had this clock since 2.6.12");
    let (seconds, ns) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000_000 + ns.unwrap_or(0)
}
