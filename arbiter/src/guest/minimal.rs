//! The minimal master: the paper's section III.B.1.

use super::error::Result;
use super::pool::Pool;
use super::{ArbiterError, Discovery, Master, Part, PcrPort};
use crate::{CounterId, CounterSet};

/// Separates the counters of firmware and kernel, and keeps count of their users
/// in the kernel. It binds none of them: the access cookie of its counters is
/// `PCR_DEFAULT_COOKIE` throughout.
#[derive(Debug)]
pub struct MinimalMaster<P> {
    /// What it holds.
    pub(super) pool: Pool<P>,
    /// Reserved registers, by [`Part`].
    owners: [CounterSet; 2],
}

impl<P: PcrPort> MinimalMaster<P> {
    /// Reserves every counter that nobody else has on any CPU, for the kernel.
    ///
    /// # Errors
    /// [`ArbiterError::NotKernel`] or [`ArbiterError::NoRandom`]. That counters
    /// are not to be had is no error.
    pub fn claim(port: P, machine: Discovery) -> Result<Self> {
        Ok(MinimalMaster {
            pool: Pool::claim(port, machine)?,
            owners: [CounterSet::EMPTY; 2],
        })
    }

    /// Whether both registers of a counter are reserved, or one, or none.
    pub(super) fn reserved(&self, counter: CounterId) -> usize {
        let owners = self.owners.iter();
        owners.filter(|owners| owners.contains(counter)).count()
    }
}

impl<P: PcrPort> Master for MinimalMaster<P> {
    fn counters(&self) -> CounterSet {
        self.pool.counters
    }

    fn reserve(&mut self, part: Part, counter: CounterId) -> Result {
        let owners = &mut self.owners[part as usize];
        if !self.pool.counters.contains(counter) {
            return Err(ArbiterError::Unavailable(counter));
        }
        if owners.contains(counter) {
            return Err(ArbiterError::InUse(counter));
        }
        owners.insert(counter);
        Ok(())
    }

    fn release(&mut self, part: Part, counter: CounterId) {
        self.owners[part as usize].remove(counter);
    }

    fn renew(&mut self, counter: CounterId) -> Result {
        match self.pool.counters.contains(counter) {
            true => self.pool.renew(counter),
            false => Err(ArbiterError::Unavailable(counter)),
        }
    }

    fn finish(&mut self) {
        for counter in self.counters().iter() {
            self.pool.give_back(counter, 0..self.pool.port.cpus());
        }
        self.owners = [CounterSet::EMPTY; 2];
    }
}
