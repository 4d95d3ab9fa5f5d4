//! A signal that is always pending and always blocked.
//!
//! `KVM_RUN` with such a signal let through (`KVM_SET_SIGNAL_MASK`) never enters
//! the guest and never sleeps: it looks once whether something has woken a
//! halted vCPU, and returns with EINTR.

use std::mem::MaybeUninit;

use vmm_sys_util::errno;
use vmm_sys_util::signal::{SIGRTMIN, block_signal};

use super::KickTarget;

/// Signals that `KVM_RUN` keeps blocked, as the kernel has it: bit N - 1 is signal N.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignalMask(pub u64);

/// Signals that the kernel knows.
const SIGNALS: i32 = 64;

/// The one that is pending; it has no handler and is never delivered.
fn pending_signal() -> i32 {
    SIGRTMIN() + 1
}

/// Makes the signal pending on the calling thread, for good, and gives the mask
/// that lets it, and what is not blocked now, through.
///
/// # Errors
/// EAGAIN when the process may queue no more signals (`ulimit -i`), or the error
/// of `pthread_sigmask`.
pub fn hold_pending_signal() -> errno::Result<SignalMask> {
    let wanted = pending_signal();
    // That it is blocked already is no error here.
    let _ = block_signal(wanted);
    let blocked = blocked_signals()?;
    let bit = 1 << (wanted - 1);
    if blocked & bit == 0 {
        return Err(errno::Error::new(libc::EINVAL));
    }
    KickTarget::current().send(wanted)?;
    Ok(SignalMask(blocked & !bit))
}

/// The calling thread's blocked signals.
fn blocked_signals() -> errno::Result<u64> {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: no new set is given, and the old one is written to valid memory.
    let ret = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr()) };
    if ret != 0 {
        return Err(errno::Error::new(ret));
    }
    // SAFETY: it was zeroed, which is valid for an array of integers, and then written.
    let set = unsafe { set.assume_init() };
    // SAFETY: the set is initialised; a number that is no signal gives -1.
    let is_member = |signal: &i32| unsafe { libc::sigismember(&raw const set, *signal) == 1 };
    let members = (1..=SIGNALS).filter(is_member);
    Ok(members.fold(0, |bits, signal| bits | 1 << (signal - 1)))
}
