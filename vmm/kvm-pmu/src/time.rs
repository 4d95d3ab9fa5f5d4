//! Time as the crate hands it out.

use std::time::Duration;

use pmu_virt::{Ticks, Tsc};

use crate::sys::rdtsc;

/// The present instant.
#[must_use]
#[inline]
pub fn now() -> Tsc {
    Tsc(rdtsc())
}

/// So much time in ticks of a TSC of `khz`.
pub(crate) fn ticks(time: Duration, khz: u32) -> Ticks {
    let ticks = time.as_nanos().saturating_mul(khz.into()) / 1_000_000;
    Ticks(u64::try_from(ticks).unwrap_or(u64::MAX))
}
