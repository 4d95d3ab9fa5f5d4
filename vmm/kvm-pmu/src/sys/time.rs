//! Time: the time stamp counter, the CPU time of a thread, and a timer that kicks
//! the thread which made it.

use std::mem::MaybeUninit;
use std::time::Duration;

use super::{KickTarget, kick_signal};
use crate::error::Errno;

/// A one-shot `CLOCK_MONOTONIC` timer that sends the kick signal to the thread
/// that created it (`timer_create(2)`, `SIGEV_THREAD_ID`).
#[derive(Debug)]
pub struct KickTimer {
    id: libc::timer_t,
}

// SAFETY: a timer id is a handle of the process, valid on every thread.
unsafe impl Send for KickTimer {}

impl KickTimer {
    /// A disarmed timer that will kick the calling thread.
    ///
    /// # Errors
    /// The error of `timer_create`: EAGAIN when the process is out of timers
    /// (`ulimit -i`).
    pub fn for_this_thread() -> Result<Self, Errno> {
        let mut id = MaybeUninit::<libc::timer_t>::uninit();
        // SAFETY: an all-zero sigevent is valid: integers and a null union.
        let mut event: libc::sigevent = unsafe { MaybeUninit::zeroed().assume_init() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = kick_signal();
        event.sigev_notify_thread_id = KickTarget::current().thread();
        // SAFETY: both pointers are valid for the call, and the kernel writes
        // the id before it returns 0.
        let ret =
            unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, id.as_mut_ptr()) };
        if ret != 0 {
            return Err(Errno::last());
        }
        // SAFETY: timer_create returned 0, so it wrote the id.
        let id = unsafe { id.assume_init() };
        Ok(Self { id })
    }

    /// Fires once after `delay`; a delay of zero fires after a nanosecond,
    /// because zero would disarm the timer.
    pub fn arm(&self, delay: Duration) {
        self.set(delay.max(Duration::from_nanos(1)));
    }

    /// Takes back an `arm`.
    pub fn disarm(&self) {
        self.set(Duration::ZERO);
    }

    #[inline(never)]
    fn set(&self, delay: Duration) {
        let spec = libc::itimerspec {
            it_interval: libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: libc::timespec {
                tv_sec: i64::try_from(delay.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(delay.subsec_nanos()),
            },
        };
        // SAFETY: the id is ours until drop; `spec` is valid for the call and
        // the old value is not asked for.
        let ret = unsafe { libc::timer_settime(self.id, 0, &raw const spec, std::ptr::null_mut()) };
        debug_assert_eq!(ret, 0, "a valid timer and a normalised time");
    }
}

impl Drop for KickTimer {
    fn drop(&mut self) {
        // SAFETY: the id came from timer_create and is deleted once.
        unsafe { libc::timer_delete(self.id) };
    }
}

/// The host's time stamp counter, in ticks (SDM vol. 2, RDTSC).
///
/// RDTSC is not serialising; the few instructions by which it can move are far
/// below the cost of entering a guest.
#[must_use]
#[inline]
pub(crate) fn rdtsc() -> u64 {
    // SAFETY: RDTSC has no operands in memory; every x86-64 CPU has it, and
    // Linux sets CR4.TSD only for a thread that asked for it (PR_SET_TSC),
    // which no thread of this program does.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// For how long the calling thread has been on a CPU since it began
/// (`clock_gettime(2)`, `CLOCK_THREAD_CPUTIME_ID`). A system call.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is valid for writes of a timespec during the call.
    let ret = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    debug_assert_eq!(ret, 0, "Linux has had this clock since 2.6.12");
    let (seconds, ns) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or(0), ns.unwrap_or(0))
}
