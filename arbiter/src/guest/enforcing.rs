//! The minimal enforcing master: the paper's section III.B.2.

use super::arbiter::{Arbiter, LockRule};
use super::error::Result;
use super::{DeniedAccess, Discovery, PcrPort};
use crate::CounterId;

/// The rule of [`EnforcingMaster`]: a counter is open while both its registers are
/// reserved.
#[derive(Debug)]
pub struct Enforcing;

/// Separates the counters of firmware and kernel, and holds users in the kernel to
/// what they have reserved: legacy registers reach a counter only while both its
/// registers are reserved.
pub type EnforcingMaster<P> = Arbiter<P, Enforcing>;

impl<P: PcrPort> EnforcingMaster<P> {
    /// Reserves every counter for the kernel that is free on every CPU. All are locked
    /// at first.
    ///
    /// # Errors
    /// [`NotKernel`](super::ArbiterError::NotKernel) or
    /// [`NoRandom`](super::ArbiterError::NoRandom). A counter that somebody else has
    /// is no error.
    pub fn claim(port: P, machine: Discovery, denial: DeniedAccess) -> Result<Self> {
        Arbiter::new(port, machine, denial, Enforcing)
    }
}

impl LockRule for Enforcing {
    fn update_lock<P: PcrPort>(arbiter: &mut Arbiter<P, Self>, counter: CounterId) -> Result {
        arbiter.enforce(counter)
    }
}
