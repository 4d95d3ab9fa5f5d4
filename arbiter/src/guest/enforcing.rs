//! The minimal enforcing master: the paper's section III.B.2.

use super::rule::LockRule;

/// The rule of [`EnforcingMaster`](super::EnforcingMaster): a counter is open while both its registers are
/// reserved.
#[derive(Debug, Default)]
pub struct Enforcing;

impl LockRule for Enforcing {
    const LOCKS: bool = true;
}
