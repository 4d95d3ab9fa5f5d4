//! Scaling by time: what a stretch counts if its blind part is like the rest.

/// The specification's estimate (perfmon2 §3.7.2): the count, times the whole
/// time over the time in which the event was counted, rounded to the nearest.
/// At most `u64::MAX`, at least `counted`.
///
/// `None` if nothing was counted at any time (`active_ns` is 0): there is no
/// count to scale, and 0 would be one that nobody took. A whole time shorter
/// than the part counted is taken for that part.
///
/// ```
/// use perfmon::estimate::linear;
/// // Figure 3.32: event A was counted in 3 slices of 6, and so was event B.
/// assert_eq!(linear(16, 3, 6), Some(32));
/// assert_eq!(linear(40, 3, 6), Some(80));
/// assert_eq!(linear(0, 0, 6), None);
/// ```
pub fn linear(counted: u64, active_ns: u64, total_ns: u64) -> Option<u64> {
    let blind_ns = total_ns.saturating_sub(active_ns);
    let rest = share(counted, active_ns, blind_ns)?;
    Some(counted.saturating_add(rest))
}

/// What passes in `blind_ns` at the rate of `counted` in `active_ns`, rounded
/// to the nearest, at most `u64::MAX`; `None` without a rate.
pub(super) fn share(counted: u64, active_ns: u64, blind_ns: u64) -> Option<u64> {
    if active_ns == 0 {
        return None;
    }
    let active = u128::from(active_ns);
    // At most 2^128 - 2^65 + 1, and half of 2^64: no overflow.
    let product = u128::from(counted) * u128::from(blind_ns) + active / 2;
    Some(u64::try_from(product / active).unwrap_or(u64::MAX))
}
