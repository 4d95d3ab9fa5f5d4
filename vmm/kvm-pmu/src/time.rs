//! Time as the crate hands it out.

use std::time::Duration;

use crate::sys::rdtsc;

/// A point in time: a value of the host's time stamp counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tsc(pub u64);

impl Tsc {
    /// Now.
    #[must_use]
    #[inline]
    pub fn now() -> Self {
        Self(rdtsc())
    }
}

/// So much time in ticks of a TSC of `khz`.
pub(crate) fn ticks(time: Duration, khz: u32) -> u64 {
    let ticks = time.as_nanos().saturating_mul(khz.into()) / 1_000_000;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}
