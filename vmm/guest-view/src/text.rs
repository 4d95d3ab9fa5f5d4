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

/// Whether a terminal does something else with `c` than showing it: a control character, or one
/// that changes the order of what is around it or is not seen.
#[must_use]
pub fn is_hidden(c: char) -> bool {
    let is_bidirectional = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
    c.is_control() || is_bidirectional
}

/// `bytes` as text with `?` for what [`is_hidden`]; spaces and letters of any script stay.
#[must_use]
pub fn printable(bytes: &[u8]) -> String {
    let shown = |c| if is_hidden(c) { '?' } else { c };
    String::from_utf8_lossy(bytes).chars().map(shown).collect()
}
