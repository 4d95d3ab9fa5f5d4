//! What keys mean. They come as bytes of a terminal in raw mode.
//!
//! The reader of events that comes with the terminal library goes on for ever where the
//! terminal has gone, and waits for the rest of a key that has none.

/// A key that means something here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyPress {
    /// A character, as typed.
    Char(char),
    /// Up, or Shift-Tab.
    Before,
    /// Down, or Tab.
    Next,
    Enter,
    Escape,
    Backspace,
    /// Ctrl-C; a terminal in raw mode sends no signal.
    Interrupt,
    /// Ctrl-Z.
    Suspend,
    /// Ctrl-L: everything is drawn anew.
    Redraw,
}

/// The keys in what a terminal sent at once; what means nothing is passed over.
pub(super) fn keys(bytes: &[u8]) -> Vec<KeyPress> {
    let mut keys = Vec::new();
    let mut rest = bytes;
    while let Some((&first, behind)) = rest.split_first() {
        rest = behind;
        match first {
            0x1b => {
                let (key, length) = escaped(behind);
                keys.extend(key);
                rest = &behind[length..];
            }
            0x03 => keys.push(KeyPress::Interrupt),
            0x0c => keys.push(KeyPress::Redraw),
            0x1a => keys.push(KeyPress::Suspend),
            b'\t' => keys.push(KeyPress::Next),
            b'\r' | b'\n' => keys.push(KeyPress::Enter),
            0x08 | 0x7f => keys.push(KeyPress::Backspace),
            b' '..=b'~' => keys.push(KeyPress::Char(char::from(first))),
            _ => {}
        }
    }
    keys
}

/// The key whose bytes come behind an escape, and how many they are.
fn escaped(bytes: &[u8]) -> (Option<KeyPress>, usize) {
    match bytes {
        [] => (Some(KeyPress::Escape), 0),
        [b'[' | b'O', rest @ ..] => {
            // Parameters, then a letter (ECMA-48, 5.4).
            let end = rest.iter().position(|byte| (b'@'..=b'~').contains(byte));
            let Some(end) = end else {
                return (None, bytes.len());
            };
            let key = match rest[end] {
                b'A' | b'Z' => Some(KeyPress::Before),
                b'B' => Some(KeyPress::Next),
                _ => None,
            };
            (key, end + 2)
        }
        // Escape, and a key by itself or with Alt.
        _ => (Some(KeyPress::Escape), 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_keys() {
        let check =
            |bytes: &[u8], expected: &[KeyPress]| assert_eq!(keys(bytes), expected, "{bytes:?}");
        check(b"", &[]);
        check(b"q?", &[KeyPress::Char('q'), KeyPress::Char('?')]);
        check(
            b"\x1b[A\x1b[B\x1bOA",
            &[KeyPress::Before, KeyPress::Next, KeyPress::Before],
        );
        check(b"\t\x1b[Z", &[KeyPress::Next, KeyPress::Before]);
        check(b"\x1b", &[KeyPress::Escape]);
        check(b"\x1bx", &[KeyPress::Escape, KeyPress::Char('x')]);
        check(b"\x1b[5~j", &[KeyPress::Char('j')]);
        check(b"\x1b[1;5", &[]);
        check(
            b"\x03\x1a\x0c\r\x7f",
            &[
                KeyPress::Interrupt,
                KeyPress::Suspend,
                KeyPress::Redraw,
                KeyPress::Enter,
                KeyPress::Backspace,
            ],
        );
        check("\u{e4}".as_bytes(), &[]);
    }
}
