//! The clock of `ce_hrt`.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the monotonic clock.
pub(crate) fn now() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}
