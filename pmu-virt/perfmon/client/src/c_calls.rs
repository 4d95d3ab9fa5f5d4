//! What libraries for C do around their calls: each thread knows why its last one failed, and
//! a signal handler does not come in between.
//!
//! Nothing here allocates or locks: calls come from signal handlers too.

#[allow(unsafe_code)]
mod sys;

use std::cell::Cell;
use std::ffi::c_char;
use std::fmt::{self, Write};

use perfmon_abi::wire::{MAX_REASON, Subcode};

pub use sys::{Undisturbed, undisturbed};

/// A line, and the 0 behind it.
const ROOM: usize = MAX_REASON + 1;

thread_local! {
    /// A C string at any time: the last byte is never written. A signal handler that fails
    /// while it is written leaves another such text.
    static LINE: [Cell<u8>; ROOM] = const { [const { Cell::new(0) }; ROOM] };
    static SUBCODE: Cell<Subcode> = const { Cell::new(Subcode::None) };
}

/// A line that is being written.
struct Line<'a> {
    bytes: &'a [Cell<u8>; ROOM],
    length: usize,
}

impl Write for Line<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut end = text.len().min(MAX_REASON - self.length);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        for (to, from) in self.bytes[self.length..]
            .iter()
            .zip(&text.as_bytes()[..end])
        {
            to.set(*from);
        }
        self.length += end;
        self.bytes[self.length].set(0);
        Ok(())
    }
}

/// Keeps why the thread's call failed, and what exactly was wrong. A line longer than
/// [`MAX_REASON`] bytes is cut.
pub fn keep(subcode: Subcode, reason: fmt::Arguments<'_>) {
    LINE.with(|bytes| {
        bytes[0].set(0);
        // It always succeeds; what does not fit is left out.
        let _ = Line { bytes, length: 0 }.write_fmt(reason);
    });
    SUBCODE.set(subcode);
}

/// A call begins: nothing is wrong yet.
pub fn forget() {
    keep(Subcode::None, format_args!(""));
}

/// Does `work`, and the thread's last call is what it was before.
pub fn unheard<R>(work: impl FnOnce() -> R) -> R {
    let line = LINE.with(|bytes| bytes.each_ref().map(Cell::get));
    let subcode = SUBCODE.get();
    let result = work();
    LINE.with(|bytes| {
        for (to, from) in bytes.iter().zip(line) {
            to.set(from);
        }
    });
    SUBCODE.set(subcode);
    result
}

/// What exactly was wrong with the thread's last call.
#[must_use]
pub fn subcode() -> Subcode {
    SUBCODE.get()
}

/// Why the thread's last call failed, as a C string: valid as long as the thread, changed by
/// its next call.
#[must_use]
pub fn line() -> *const c_char {
    LINE.with(|bytes| bytes.as_ptr().cast())
}

/// The same as a text.
#[must_use]
pub fn text() -> String {
    let bytes = LINE.with(|bytes| bytes.each_ref().map(Cell::get));
    let line = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(line).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_cut_at_a_character() {
        let long = "ä".repeat(MAX_REASON);
        keep(Subcode::InvalidEvent, format_args!("x{long}"));
        let kept = text();
        assert_eq!(subcode(), Subcode::InvalidEvent);
        assert!(kept.len() < MAX_REASON && kept.starts_with("xä") && kept.ends_with('ä'));
        unheard(forget);
        assert_eq!((text(), subcode()), (kept, Subcode::InvalidEvent));
        forget();
        assert_eq!((text().as_str(), subcode()), ("", Subcode::None));
    }
}
