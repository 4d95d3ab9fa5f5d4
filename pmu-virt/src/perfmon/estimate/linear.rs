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
/// use pmu_virt::perfmon::estimate::linear;
/// // Figure 3.32: event A was counted in 3 slices of 6, and so was event B.
/// assert_eq!(linear(16, 3, 6), Some(32));
/// assert_eq!(linear(40, 3, 6), Some(80));
/// assert_eq!(linear(0, 0, 6), None);
/// ```
pub fn linear(counted: u64, active_ns: u64, total_ns: u64) -> Option<u64> {
    let blind_ns = total_ns.saturating_sub(active_ns);
    let rest = share(counted.into(), active_ns.into(), blind_ns.into())?;
    Some(counted.saturating_add(saturated(rest)))
}

/// What passes in `blind_ns` at the rate of `counted` in `active_ns`, rounded
/// to the nearest; `None` without a rate.
pub(super) fn share(counted: u128, active_ns: u128, blind_ns: u128) -> Option<u128> {
    if active_ns == 0 {
        return None;
    }
    let whole = (counted / active_ns).saturating_mul(blind_ns);
    // The remainder is below `active_ns`: times 64 bits it fits for any time
    // that clocks tell, and 5,000 years of it do not fit for none.
    let rest = (counted % active_ns).saturating_mul(blind_ns);
    let rest = rest.saturating_add(active_ns / 2) / active_ns;
    Some(whole.saturating_add(rest))
}

pub(super) fn saturated(value: u128) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}
