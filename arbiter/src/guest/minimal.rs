//! The minimal master: the paper's section III.B.1.

use super::arbiter::{Arbiter, LockRule};
use super::error::Result;
use super::{DeniedAccess, Discovery, PcrPort};
use crate::CounterId;

/// Binds nobody in the kernel.
#[derive(Debug)]
pub struct Minimal;

/// Separates the counters of firmware and kernel, and keeps count of their users
/// in the kernel. It binds none of them: the access cookie of its counters is
/// `PCR_DEFAULT_COOKIE` throughout.
pub type MinimalMaster<P> = Arbiter<P, Minimal>;

impl<P: PcrPort> MinimalMaster<P> {
    /// Reserves every counter that nobody else has on any CPU, for the kernel.
    ///
    /// # Errors
    /// [`NotKernel`](super::ArbiterError::NotKernel) or
    /// [`NoRandom`](super::ArbiterError::NoRandom). That counters are not to be
    /// had is no error.
    pub fn claim(port: P, machine: Discovery) -> Result<Self> {
        Arbiter::new(port, machine, DeniedAccess::Drop, Minimal)
    }
}

impl LockRule for Minimal {
    fn update_lock<P: PcrPort>(_: &mut Arbiter<P, Self>, _: CounterId) -> Result {
        Ok(())
    }
}
