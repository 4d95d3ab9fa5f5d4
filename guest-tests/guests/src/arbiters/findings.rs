//! What the guest found out, for the harness to read from its memory.

use core::sync::atomic::Ordering::Relaxed;

use arbiter::guest::{ArbiterError, Fault};

use super::sys::{self, FINDINGS};

/// Instead of a value: #GP.
const FAULT: u64 = u64::MAX;

/// Writes one finding down; text beyond 24 bytes is cut.
pub(crate) fn note(what: &str, value: u64) {
    let count = FINDINGS.count.load(Relaxed);
    let entry = usize::try_from(count).ok();
    let Some(entry) = entry.and_then(|count| FINDINGS.entries.get(count)) else {
        sys::exit(3);
    };
    let [text @ .., last] = entry;
    for (word, bytes) in text.iter().zip(what.as_bytes().chunks(8)) {
        let packed = bytes
            .iter()
            .rev()
            .fold(0, |word, byte| word << 8 | u64::from(*byte));
        word.store(packed, Relaxed);
    }
    last.store(value, Relaxed);
    FINDINGS.count.store(count + 1, Relaxed);
}

/// The value that stands for the result of a read.
pub(crate) fn seen(read: Result<u64, Fault>) -> u64 {
    read.unwrap_or(FAULT)
}

/// The value that stands for the result of a write.
pub(crate) fn done(written: Result<(), Fault>) -> u64 {
    seen(written.map(|()| 0))
}

/// Whether the second of two reads saw more.
pub(crate) fn grew(before: Result<u64, Fault>, after: Result<u64, Fault>) -> u64 {
    u64::from(matches!((before, after), (Ok(before), Ok(after)) if before < after))
}

/// The number that stands for an arbiter's answer.
pub(crate) fn code<T>(result: Result<T, ArbiterError>) -> u64 {
    match result {
        Ok(_) => 0,
        Err(ArbiterError::NotKernel) => 1,
        Err(ArbiterError::NoRandom) => 2,
        Err(ArbiterError::Unavailable(_)) => 3,
        Err(ArbiterError::InUse(_)) => 4,
        Err(ArbiterError::NoneFree) => 5,
        Err(ArbiterError::Lost { .. }) => 6,
        Err(ArbiterError::NotYours(_)) => 7,
    }
}
