//! What a sampling format can answer (§3.5.14, §3.5.15), from a script.

/// Control bits, or a failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) notify: bool,
    pub(crate) reset: bool,
    pub(crate) block: bool,
    pub(crate) mask: bool,
    pub(crate) fail: bool,
}

impl Answer {
    pub(crate) fn of(byte: u8) -> Self {
        let bit = |n: u32| byte >> n & 1 == 1;
        Answer {
            notify: bit(0),
            reset: bit(1),
            block: bit(2),
            mask: bit(3),
            // Rarely: it ends the others' turn.
            fail: byte >> 4 == 15,
        }
    }

    /// The next of the script, which begins anew at its end.
    pub(crate) fn next(script: &[Answer], next: &mut usize) -> Self {
        let answer = script.get(*next % script.len().max(1)).copied();
        *next += 1;
        answer.unwrap_or_default()
    }
}
