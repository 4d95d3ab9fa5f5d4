//! A wait that a kick ends.

use std::mem::MaybeUninit;
use std::time::Duration;

use vmm_sys_util::errno;

use super::kick_signal;

/// Waits for `time`, or until a kick of the calling thread. `wanted` is asked once
/// kicks cannot go unnoticed any more; if it says no, there is no wait.
///
/// # Errors
/// The error of `pthread_sigmask`, or of `ppoll` if that was no signal.
pub fn nap(time: Duration, wanted: impl FnOnce() -> bool) -> errno::Result<()> {
    let before = change_mask(libc::SIG_BLOCK, &kicks())?;
    let mut failed = None;
    if wanted() {
        let spec = libc::timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(time.subsec_nanos()),
        };
        // SAFETY: no descriptors; the time and the mask are valid for the call.
        // It ends by the time, or by a signal whose handler has then run; both
        // are as good.
        let polled =
            unsafe { libc::ppoll(std::ptr::null_mut(), 0, &raw const spec, &raw const before) };
        let error = errno::Error::last();
        failed = (polled < 0 && error.errno() != libc::EINTR).then_some(error);
    }
    change_mask(libc::SIG_SETMASK, &before)?;
    failed.map_or(Ok(()), Err)
}

/// The kick signal, and the one that the kernel sends in its place when a thread's
/// queue is full.
fn kicks() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the set is valid memory; both signal numbers are in range.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), kick_signal());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGIO);
        set.assume_init()
    }
}

/// Changes the calling thread's mask, and gives the one of before.
fn change_mask(how: libc::c_int, set: &libc::sigset_t) -> errno::Result<libc::sigset_t> {
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: both sets are valid for the call.
    match unsafe { libc::pthread_sigmask(how, set, before.as_mut_ptr()) } {
        // SAFETY: it was zeroed, which is valid for an array of integers, and
        // then written.
        0 => Ok(unsafe { before.assume_init() }),
        error => Err(errno::Error::new(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;
    use crate::sys::{KickTarget, install_kick_handler};

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn it_ends_by_itself_or_is_not_begun() {
        let began = Instant::now();
        nap(Duration::from_millis(5), || true).unwrap();
        assert!(began.elapsed() >= Duration::from_millis(5));
        nap(LONG, || false).unwrap();
        assert!(began.elapsed() < LONG);
    }

    #[test]
    fn a_kick_ends_it_even_before_it_began() {
        install_kick_handler().unwrap();
        let (send, receive) = channel();
        let sleeper = std::thread::spawn(move || {
            let target = KickTarget::current();
            // The kick comes while it is blocked, before the wait.
            nap(LONG, || {
                target.kick();
                true
            })
            .unwrap();
            send.send(target).unwrap();
            nap(LONG, || true).unwrap();
        });
        let target: KickTarget = receive.recv().unwrap();
        let began = Instant::now();
        while !sleeper.is_finished() {
            target.kick();
            std::thread::sleep(Duration::from_millis(1));
        }
        sleeper.join().unwrap();
        assert!(began.elapsed() < LONG);
    }
}
