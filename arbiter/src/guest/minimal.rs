//! The minimal master: the paper's section III.B.1.

use super::rule::LockRule;

/// The rule of [`MinimalMaster`](super::MinimalMaster): no counter is ever locked.
#[derive(Debug, Default)]
pub struct Minimal;

impl LockRule for Minimal {
    const LOCKS: bool = false;
}
