//! The fully enforcing master: the paper's section III.B.3.

use super::Key;
use super::rule::LockRule;
use crate::CounterId;

/// A counter that one user in the kernel has for itself. The alias registers at
/// [`Discovery::position`](super::Discovery::position) of the CPU reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Private {
    /// The legacy name of the counter.
    pub counter: CounterId,
    /// The access cookie of the counter, the same on every CPU.
    pub key: Key,
}

/// The rule of [`FullMaster`](super::FullMaster), with the access cookies of private
/// counters by their bits in a set.
#[derive(Debug)]
pub struct Full([Key; 64]);

impl Full {
    /// The access cookie of a private counter.
    pub(super) fn key(&mut self, counter: CounterId) -> &mut Key {
        // A counter without a bit is in no set, and never private.
        &mut self.0[counter.global_bit().unwrap_or(0) as usize]
    }
}

impl Default for Full {
    fn default() -> Self {
        Full([Key::DEFAULT; 64])
    }
}

impl LockRule for Full {
    const LOCKS: bool = true;
}
