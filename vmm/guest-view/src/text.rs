//! Text out of guest memory, which may be anything, for people's terminals.

/// `bytes` with everything replaced that is no visible ASCII character.
pub(crate) fn visible(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|byte| match byte {
            b'!'..=b'~' => char::from(*byte),
            _ => '?',
        })
        .collect()
}

/// `bytes` as text without control characters, nor such as change the order of what is around
/// them or are not seen; spaces and letters of any script stay.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let is_hidden = |c| matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    String::from_utf8_lossy(bytes)
        .chars()
        .map(|c| {
            if c.is_control() || is_hidden(c) {
                '?'
            } else {
                c
            }
        })
        .collect()
}
