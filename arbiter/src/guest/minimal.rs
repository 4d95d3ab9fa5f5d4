//! The minimal master: the paper's section III.B.1.

use super::arbiter::{Arbiter, LockRule};
use super::error::Result;
use super::{DeniedAccess, Discovery, PcrPort};
use crate::CounterId;

/// The rule of [`MinimalMaster`]: no counter is ever locked.
#[derive(Debug)]
pub struct Minimal;

/// Separates the counters of firmware and kernel, and notes their users in the
/// kernel. It binds none of them: the access cookie of its counters is always
/// `PCR_DEFAULT_COOKIE`.
pub type MinimalMaster<P> = Arbiter<P, Minimal>;

impl<P: PcrPort> MinimalMaster<P> {
    /// Reserves every counter for the kernel that is free on every CPU.
    ///
    /// # Errors
    /// [`NotKernel`](super::ArbiterError::NotKernel) or
    /// [`NoRandom`](super::ArbiterError::NoRandom). A counter that somebody else has
    /// is no error.
    pub fn claim(port: P, machine: Discovery) -> Result<Self> {
        Arbiter::new(port, machine, DeniedAccess::Drop, Minimal)
    }
}

impl LockRule for Minimal {
    fn update_lock<P: PcrPort>(_: &mut Arbiter<P, Self>, _: CounterId) -> Result {
        Ok(())
    }
}
