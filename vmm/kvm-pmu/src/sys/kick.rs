//! The kick: a signal that makes a vCPU's thread leave the guest.
//!
//! A signal that lands between the last check of a flag and `KVM_RUN` would be
//! lost; so the handler sets `kvm_run.immediate_exit` of the vCPU that its
//! thread runs, and `KVM_RUN` then returns at once (KVM API, `KVM_RUN`).
//!
//! The kernel sends the same signal for an overflow of a perf event, which the
//! handler notes for the `perf` backend of its thread.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

use vmm_sys_util::errno;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

thread_local! {
    /// `kvm_run.immediate_exit` of the vCPU that this thread runs, or null.
    ///
    /// Constant-initialised and without a destructor, so the signal handler
    /// may read it at any time.
    static IMMEDIATE_EXIT: Cell<*const AtomicU8> = const { Cell::new(ptr::null()) };
}

/// The signal that kicks a vCPU's thread.
#[must_use]
pub fn kick_signal() -> i32 {
    SIGRTMIN()
}

extern "C" fn on_kick(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the handler is installed with SA_SIGINFO, so the kernel hands it
    // a siginfo_t that is valid until it returns.
    pmu_virt::perf::note_overflow_signal(unsafe { (*info).si_code });
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: a non-null pointer was set by `bind_immediate_exit`, whose
        // guard keeps the mapping alive and resets the pointer before it goes;
        // both run on this very thread, so the handler cannot see a stale one.
        unsafe { (*flag).store(1, Ordering::Relaxed) };
    }
}

/// Installs the handler of the kick signal, for the whole process, and of
/// SIGIO, which the kernel sends in its place when a thread's queue is full.
///
/// # Errors
/// The error of `sigaction`.
pub fn install_kick_handler() -> errno::Result<()> {
    register_signal_handler(kick_signal(), on_kick)?;
    register_signal_handler(libc::SIGIO, on_kick)
}

/// Undoes [`bind_immediate_exit`] when dropped.
#[derive(Debug)]
pub struct ImmediateExitGuard(());

impl Drop for ImmediateExitGuard {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.set(ptr::null());
    }
}

/// Lets a kick of the calling thread set `flag` until the guard is dropped.
///
/// # Safety
/// `flag` must stay valid for writes of one byte until the guard is dropped,
/// and the guard must be dropped on the calling thread.
#[must_use]
pub unsafe fn bind_immediate_exit(flag: *const AtomicU8) -> ImmediateExitGuard {
    IMMEDIATE_EXIT.set(flag);
    ImmediateExitGuard(())
}

/// A thread that can be kicked.
#[derive(Debug, Clone, Copy)]
pub struct KickTarget {
    process: i32,
    thread: i32,
}

impl KickTarget {
    /// The calling thread.
    #[must_use]
    pub fn current() -> Self {
        // SAFETY: both calls have no arguments and cannot fail.
        unsafe {
            Self {
                process: libc::getpid(),
                thread: libc::gettid(),
            }
        }
    }

    /// Its thread id.
    #[must_use]
    pub fn thread(self) -> i32 {
        self.thread
    }

    /// Sends the kick signal. A thread that has ended is not an error.
    pub fn kick(self) {
        let _ = self.send(kick_signal());
    }

    /// Sends it `signal`.
    pub fn send(self, signal: i32) -> errno::Result<()> {
        // SAFETY: tgkill takes three integers; a thread id of another process
        // cannot be hit because the process id is checked by the kernel.
        let ret = unsafe { libc::syscall(libc::SYS_tgkill, self.process, self.thread, signal) };
        match ret {
            0 => Ok(()),
            _ => errno::errno_result(),
        }
    }
}
