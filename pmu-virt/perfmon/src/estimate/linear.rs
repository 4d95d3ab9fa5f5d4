//! Scaling by time: what a stretch counts if its blind part is like the rest.

use pmu_model::Nanos;

/// The specification's estimate (perfmon2 §3.7.2): the count, times the whole
/// time over the time in which the event was counted, rounded to the nearest.
/// At most `u64::MAX`, at least `counted`.
///
/// `None` if nothing was counted at any time (`active` is 0): there is no
/// count to scale, and 0 would be one that nobody took. A whole time shorter
/// than the part counted is taken for that part.
///
/// ```
/// use perfmon::Nanos;
/// use perfmon::estimate::linear;
/// // Figure 3.32: event A was counted in 3 slices of 6, and so was event B.
/// assert_eq!(linear(16, Nanos(3), Nanos(6)), Some(32));
/// assert_eq!(linear(40, Nanos(3), Nanos(6)), Some(80));
/// assert_eq!(linear(0, Nanos(0), Nanos(6)), None);
/// ```
pub fn linear(counted: u64, active: Nanos, total: Nanos) -> Option<u64> {
    let rest = share(counted, active, total - active)?;
    Some(counted.saturating_add(rest))
}

/// What passes in `blind` at the rate of `counted` in `active`, rounded to the
/// nearest, at most `u64::MAX`; `None` without a rate.
pub(super) fn share(counted: u64, active: Nanos, blind: Nanos) -> Option<u64> {
    if active == Nanos(0) {
        return None;
    }
    let active = u128::from(active.0);
    // At most 2^128 - 2^65 + 1, and half of 2^64: no overflow.
    let product = u128::from(counted) * u128::from(blind.0) + active / 2;
    Some(u64::try_from(product / active).unwrap_or(u64::MAX))
}
