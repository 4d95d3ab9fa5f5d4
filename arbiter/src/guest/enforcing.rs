//! The minimal enforcing master: the paper's section III.B.2.

use super::arbiter::{Arbiter, LockRule};
use super::error::Result;
use super::{DeniedAccess, Discovery, PcrPort};
use crate::CounterId;

/// Holds the kernel to its reservations.
#[derive(Debug)]
pub struct Enforcing;

/// Also holds users in the kernel to what they have reserved: legacy registers
/// reach a counter while both its registers are reserved, not before or after.
pub type EnforcingMaster<P> = Arbiter<P, Enforcing>;

impl<P: PcrPort> EnforcingMaster<P> {
    /// As [`MinimalMaster::claim`](super::MinimalMaster::claim); then nobody has
    /// access.
    ///
    /// # Errors
    /// As there.
    pub fn claim(port: P, machine: Discovery, denial: DeniedAccess) -> Result<Self> {
        Arbiter::new(port, machine, denial, Enforcing)
    }
}

impl LockRule for Enforcing {
    fn update_lock<P: PcrPort>(arbiter: &mut Arbiter<P, Self>, counter: CounterId) -> Result {
        arbiter.enforce(counter)
    }
}
