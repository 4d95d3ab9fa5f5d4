//! Time as the crate hands it out.

use pmu_virt::Tsc;

use crate::sys::rdtsc;

/// The present instant.
#[must_use]
#[inline]
pub fn now() -> Tsc {
    Tsc(rdtsc())
}
