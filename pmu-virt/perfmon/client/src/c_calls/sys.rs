//! The calling thread without signals.

use std::ffi::c_int;
use std::mem::MaybeUninit;

const CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    /// pthread_setcancelstate(3), which the C library's bindings lack.
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// While it is there, this thread gets no signals and is not cancelled: a handler may make
/// calls, and must not find one half done.
#[derive(Debug)]
pub struct Undisturbed {
    mask: libc::sigset_t,
    cancellation: c_int,
}

impl Undisturbed {
    /// From now on.
    #[must_use]
    pub fn begin() -> Self {
        let mut all = MaybeUninit::<libc::sigset_t>::zeroed();
        let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
        let mut cancellation = 0;
        // SAFETY: all that is pointed to is valid for writes, and a set of zeros is one; the
        // calls do not fail with these arguments, and leave errno.
        let mask = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            pthread_setcancelstate(CANCEL_DISABLE, &raw mut cancellation);
            before.assume_init()
        };
        Undisturbed { mask, cancellation }
    }
}

impl Drop for Undisturbed {
    fn drop(&mut self) {
        let mut was = 0;
        let mask = &raw const self.mask;
        // SAFETY: as in `begin`; no old set is asked for.
        unsafe {
            pthread_setcancelstate(self.cancellation, &raw mut was);
            libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut());
        }
    }
}

/// Does `work`, [`Undisturbed`].
pub fn undisturbed<R>(work: impl FnOnce() -> R) -> R {
    let _undisturbed = Undisturbed::begin();
    work()
}
