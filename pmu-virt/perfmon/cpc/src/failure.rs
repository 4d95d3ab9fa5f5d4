//! Why a call failed: `errno`, a sub-code and a line for people. Nothing here allocates: calls
//! come from signal handlers too.

use std::cell::{Cell, RefCell};
use std::fmt::{self, Write};

/// What exactly was wrong; `CPC_*` of `libcpc.h`.
pub(crate) use perfmon_abi::wire::Subcode;

/// Most bytes of a line.
const ROOM: usize = 512;

/// A call failed. The line is kept for the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) errno: i32,
    pub(crate) subcode: Subcode,
}

/// A line of bounded length. What does not fit is left out. Its bytes come first.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Line {
    bytes: [u8; ROOM + 1],
    length: usize,
}

thread_local! {
    static LINE: RefCell<Line> = const { RefCell::new(Line { bytes: [0; ROOM + 1], length: 0 }) };
    static SUBCODE: Cell<Subcode> = const { Cell::new(Subcode::None) };
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut end = text.len().min(ROOM - self.length);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.bytes[self.length..][..end].copy_from_slice(&text.as_bytes()[..end]);
        self.length += end;
        self.bytes[self.length] = 0;
        Ok(())
    }
}

/// A failure for this reason.
pub(crate) fn fail(errno: i32, subcode: Subcode, reason: fmt::Arguments<'_>) -> Failure {
    LINE.with_borrow_mut(|line| {
        line.length = 0;
        // It always succeeds; what does not fit is left out.
        let _ = line.write_fmt(reason);
    });
    SUBCODE.set(subcode);
    Failure { errno, subcode }
}

/// A call begins: nothing is wrong yet.
pub(crate) fn forget() {
    LINE.with_borrow_mut(|line| {
        line.length = 0;
        line.bytes[0] = 0;
    });
    SUBCODE.set(Subcode::None);
}

/// Does `work`, and the thread's last call is what it was before.
pub(crate) fn unheard<R>(work: impl FnOnce() -> R) -> R {
    let before = (LINE.with_borrow(|line| *line), SUBCODE.get());
    let result = work();
    LINE.with_borrow_mut(|line| *line = before.0);
    SUBCODE.set(before.1);
    result
}

/// The sub-code of the thread's last call.
pub(crate) fn subcode() -> Subcode {
    SUBCODE.get()
}

/// Where the line of the thread's last call is, with a 0 behind it: valid as long as the
/// thread, changed by its next call.
pub(crate) fn line() -> *const u8 {
    // No borrow: a signal handler may be about to make calls.
    LINE.with(RefCell::as_ptr).cast_const().cast()
}

/// The line of the thread's last call.
#[cfg(test)]
pub(crate) fn text() -> String {
    LINE.with_borrow(|line| String::from_utf8_lossy(&line.bytes[..line.length]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_cut_at_a_character() {
        let long = "ä".repeat(ROOM);
        let failure = fail(22, Subcode::InvalidEvent, format_args!("x{long}"));
        assert_eq!((failure.errno, subcode()), (22, Subcode::InvalidEvent));
        let kept = text();
        assert!(kept.len() < ROOM && kept.starts_with("xä") && kept.ends_with('ä'));
        forget();
        assert_eq!((text().as_str(), subcode()), ("", Subcode::None));
    }
}
