//! Why the last call of a thread failed.

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_char;

use perfmon_abi::wire::{MAX_REASON, Subcode};

thread_local! {
    /// A C string: the byte behind the longest reason is never written.
    static TEXT: UnsafeCell<[u8; MAX_REASON + 1]> = const { UnsafeCell::new([0; MAX_REASON + 1]) };
    static SUBCODE: Cell<Subcode> = const { Cell::new(Subcode::None) };
}

/// Keeps what exactly was wrong, and a reason, cut to what fits.
pub(crate) fn set(subcode: Subcode, reason: &str) {
    SUBCODE.set(subcode);
    TEXT.with(|text| {
        // SAFETY: only this thread gets at its text, here and in `pointer`, and
        // no reference outlives either function. A signal handler that comes in
        // between writes another valid text.
        let text = unsafe { &mut *text.get() };
        let length = reason.len().min(MAX_REASON);
        text[..length].copy_from_slice(&reason.as_bytes()[..length]);
        text[length] = 0;
    });
}

/// What exactly was wrong.
pub(crate) fn subcode() -> Subcode {
    SUBCODE.get()
}

/// The reason as a C string, valid until the thread's next call.
pub(crate) fn pointer() -> *const c_char {
    TEXT.with(|text| text.get().cast_const().cast())
}
