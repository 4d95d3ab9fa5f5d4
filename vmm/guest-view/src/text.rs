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

/// `bytes` as text without control characters; spaces and letters of any script stay.
pub(crate) fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}
