//! What becomes of the library's own signal: `SIGEMT`, which the program gets for an overflow.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::Once;

use crate::failure;
use crate::lwp::Signal;
use crate::process;
use crate::signals::{OVERFLOW, SIGEMT, errno, set_errno};

/// `EMT_CPCOVF` of `libcpc.h`.
const EMT_CPCOVF: c_int = 1;

/// `siginfo_t` of `SIGEMT`: `si_addr` is where the kernel keeps it for other signals.
#[repr(C)]
struct Info {
    signal: c_int,
    errno: c_int,
    code: c_int,
    padding: c_int,
    address: u64,
    rest: [u64; 13],
}

const _: () = assert!(size_of::<Info>() == size_of::<libc::siginfo_t>());

/// What `siginfo_t` has of a descriptor's signal.
#[repr(C)]
struct PollInfo {
    signal: c_int,
    errno: c_int,
    code: c_int,
    padding: c_int,
    band: i64,
    descriptor: c_int,
}

/// The library's own signal has its handler.
pub(super) fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: all zeros is a valid sigaction. All signals are blocked in the handler, so that
        // one that it queues finds the program where it was interrupted, and not the library.
        // The handler has the signature that SA_SIGINFO asks for.
        unsafe {
            let action = action.assume_init_mut();
            action.sa_sigaction = on_overflow as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
            libc::sigfillset(&raw mut action.sa_mask);
            libc::sigaction(OVERFLOW, action, std::ptr::null_mut());
        }
    });
}

/// Handler of the library's own signal.
extern "C" fn on_overflow(_: c_int, info: *const PollInfo, context: *const libc::ucontext_t) {
    let before = errno();
    // SAFETY: the kernel passes both, and they are valid while the handler runs; the signal is
    // sent for descriptors alone, so that `si_fd` is there.
    let (descriptor, pc) = unsafe {
        let registers = &(*context).uc_mcontext.gregs;
        let pc = registers[libc::REG_RIP as usize].cast_unsigned();
        ((*info).descriptor, pc)
    };
    let signal = failure::unheard(|| process::overflow(descriptor));
    if let Some((signal, elsewhere)) = signal {
        send(signal, pc, elsewhere);
    }
    set_errno(before);
}

/// Sends `SIGEMT` to the calling thread. For another LWP it is dealt with at once, and calls
/// of its handler are about that one.
pub(super) fn send(signal: Signal, pc: u64, elsewhere: bool) {
    let info = Info {
        signal: SIGEMT,
        errno: 0,
        code: EMT_CPCOVF,
        padding: 0,
        address: signal.pc.unwrap_or(pc),
        rest: [0; 13],
    };
    let queue = || {
        // SAFETY: the kernel reads a siginfo_t at the pointer, which `Info` has the size of. A
        // thread may send itself any code.
        unsafe {
            libc::syscall(
                libc::SYS_rt_tgsigqueueinfo,
                libc::getpid(),
                libc::gettid(),
                SIGEMT,
                &raw const info,
            )
        };
    };
    if elsewhere {
        process::on_behalf_of(signal.lwp, || at_once(queue));
    } else {
        queue();
    }
}

/// Queues with `SIGEMT` let through, so that its handler runs before this returns.
fn at_once(queue: impl FnOnce()) {
    let mut mask = MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the sets are valid for writes, and zeros are empty ones.
    unsafe {
        libc::sigaddset(mask.as_mut_ptr(), SIGEMT);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, mask.as_ptr(), before.as_mut_ptr());
    }
    queue();
    // SAFETY: the set was filled in above; no old one is asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
}

/// What `pthread_create` passes on.
pub(super) type Start = extern "C-unwind" fn(*mut c_void) -> *mut c_void;
