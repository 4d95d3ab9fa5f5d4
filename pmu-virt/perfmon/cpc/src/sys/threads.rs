//! `pthread_create`, so that threads inherit as they start.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use umpire_perfmon::c_calls::undisturbed;

use super::signals::{self, Start};
use crate::event::Event;
use crate::process;

/// The function of the C library.
type Create =
    extern "C" fn(*mut libc::pthread_t, *const libc::pthread_attr_t, Start, *mut c_void) -> c_int;

/// What a thread begins with.
struct Begin {
    start: Start,
    argument: *mut c_void,
    legacy: (Event, i32),
}

fn next() -> Option<Create> {
    static NEXT: OnceLock<Option<Create>> = OnceLock::new();
    *NEXT.get_or_init(|| {
        // SAFETY: the name is a C string.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr()) };
        // SAFETY: the function of this name has this signature; NULL is none.
        unsafe { std::mem::transmute::<*mut c_void, Option<Create>>(found) }
    })
}

/// Nobody waits for somebody else who looks for the function of the C library.
pub(super) fn prepare() {
    next();
}

/// POSIX's, and the thread inherits what its creator has bound with `CPC_BIND_LWP_INHERIT`.
#[cfg(not(test))]
#[unsafe(no_mangle)]
extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    create(thread, attributes, start, argument)
}

#[cfg_attr(test, expect(dead_code, reason = "a test's threads are those of libc"))]
fn create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    let Some(next) = next() else {
        return libc::EAGAIN;
    };
    let Some(legacy) = process::legacy() else {
        return next(thread, attributes, start, argument);
    };
    let begin = Begin {
        start,
        argument,
        legacy,
    };
    let begin = undisturbed(|| Box::into_raw(Box::new(begin)));
    let result = next(thread, attributes, begin_thread, begin.cast());
    if result != 0 {
        // SAFETY: no thread has started, so that nobody else has the box.
        undisturbed(|| drop(unsafe { Box::from_raw(begin) }));
    }
    result
}

/// Nothing here is to be dropped while the thread's own function runs: `pthread_exit` unwinds.
extern "C-unwind" fn begin_thread(begin: *mut c_void) -> *mut c_void {
    let Begin {
        start,
        argument,
        legacy,
    } = {
        // SAFETY: `create` has made it of a box, for this thread alone.
        undisturbed(|| *unsafe { Box::from_raw(begin.cast::<Begin>()) })
    };
    if let Some(signal) = undisturbed(|| process::inherit(legacy)) {
        signals::send(signal, start as usize as u64);
        signals::listen();
    }
    start(argument)
}
