//! What becomes of the library's own signal: `SIGEMT`, which the program gets for an overflow.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::Once;

use errno::{errno, set_errno};
use umpire_perfmon::c_calls::{self, undisturbed};

use crate::lwp::Signal;
use crate::process;
use crate::signals::{OVERFLOW, SIGEMT, unblock};

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

thread_local! {
    /// A handler of `SIGEMT` runs, that is about one of many LWPs.
    static HANDLING: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread is to hear of overflows, whatever it blocks; but not before the handler
/// of the last one has ended.
pub(super) fn listen() {
    if !HANDLING.get() {
        unblock(OVERFLOW);
    }
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
    let (descriptor, pc, waits) = unsafe {
        let registers = &(*context).uc_mcontext.gregs;
        let pc = registers[libc::REG_RIP as usize].cast_unsigned();
        let waits = libc::sigismember(&raw const (*context).uc_sigmask, SIGEMT) == 1;
        ((*info).descriptor, pc, waits)
    };
    let signal = c_calls::unheard(|| undisturbed(|| process::overflow(descriptor)));
    match signal {
        // Where the program lets none through it looks for the number of the LWP itself.
        Some((signal, true)) if !waits => at_once(signal, pc),
        Some((signal, _)) => send(signal, pc),
        None => {}
    }
    set_errno(before);
}

/// Sends `SIGEMT` to the calling thread, and its handler runs before this returns, about the
/// LWP of the signal: no other `SIGEMT` waits, and other signals are blocked.
fn at_once(signal: Signal, pc: u64) {
    let before = HANDLING.replace(true);
    process::on_behalf_of(signal.lwp, || {
        unblock(SIGEMT);
        send(signal, pc);
    });
    HANDLING.set(before);
}

/// Sends `SIGEMT` to the calling thread.
pub(super) fn send(signal: Signal, pc: u64) {
    let info = Info {
        signal: SIGEMT,
        errno: c_int::try_from(signal.lwp).unwrap_or(c_int::MAX),
        code: EMT_CPCOVF,
        padding: 0,
        address: signal.pc.unwrap_or(pc),
        rest: [0; 13],
    };
    // SAFETY: the kernel reads a siginfo_t at the pointer, which `Info` has the size of. A thread
    // may send itself any code.
    unsafe {
        libc::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            libc::getpid(),
            libc::gettid(),
            SIGEMT,
            &raw const info,
        )
    };
}

/// What `pthread_create` passes on.
pub(super) type Start = extern "C-unwind" fn(*mut c_void) -> *mut c_void;
