//! The fully enforcing master: the paper's section III.B.3.

use super::arbiter::{Arbiter, LockRule};
use super::error::Result;
use super::{ArbiterError, DeniedAccess, Discovery, Key, PcrPort};
use crate::{CounterId, CounterSet, abi};

/// A counter that one user in the kernel has for itself. The alias registers at
/// [`Discovery::position`] of the CPU reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Private {
    /// The legacy name of the counter.
    pub counter: CounterId,
    /// The access cookie of the counter, the same on every CPU.
    pub key: Key,
}

/// The rule of [`FullMaster`], with the access cookies of private counters by their
/// bits in a set.
#[derive(Debug)]
pub struct Full([Key; 64]);

/// Enforces reservations as [`EnforcingMaster`](super::EnforcingMaster) does, and
/// hands out counters privately. The classic calls find those in use.
pub type FullMaster<P> = Arbiter<P, Full>;

impl<P: PcrPort> FullMaster<P> {
    /// Reserves every counter for the kernel that is free on every CPU. All are locked
    /// at first.
    ///
    /// # Errors
    /// [`NotKernel`](ArbiterError::NotKernel) or [`NoRandom`](ArbiterError::NoRandom).
    /// A counter that somebody else has is no error.
    pub fn claim(port: P, machine: Discovery, denial: DeniedAccess) -> Result<Self> {
        Arbiter::new(port, machine, denial, Full([Key::DEFAULT; 64]))
    }

    /// Gives the caller the first counter of `wanted` that nobody uses, stopped
    /// and cleared, with a fresh access cookie.
    ///
    /// # Errors
    /// [`ArbiterError::NoneFree`], [`ArbiterError::NoRandom`], or
    /// [`ArbiterError::Lost`].
    pub fn acquire(&mut self, wanted: CounterSet) -> Result<Private> {
        let used = self.owners[0] | self.owners[1] | self.private;
        let mut unused = (self.counters & wanted & !used).iter();
        let counter = unused.next().ok_or(ArbiterError::NoneFree)?;
        let key = self.registers.fresh_key()?;
        self.registers.clear(counter, self.secret);
        // The shared controls do not reach a private counter: it counts as its own select
        // says, and shows its overflow in `OVERFLOW`.
        self.set(counter, key, !abi::CONTROL_SHARED)?;
        self.private.insert(counter);
        *self.rule.key(counter) = key;
        Ok(Private { counter, key })
    }

    /// Takes a private counter back: locks, stops and clears it.
    ///
    /// # Errors
    /// [`ArbiterError::NotYours`], or [`ArbiterError::Lost`].
    pub fn give_up(&mut self, held: Private) -> Result {
        let Private { counter, key } = held;
        if !self.private.contains(counter) || *self.rule.key(counter) != key {
            return Err(ArbiterError::NotYours(counter));
        }
        self.private.remove(counter);
        self.enforce(counter)?;
        self.registers.clear(counter, self.secret);
        Ok(())
    }
}

impl Full {
    fn key(&mut self, counter: CounterId) -> &mut Key {
        // A counter without a bit is in no set, and never private.
        &mut self.0[counter.global_bit().unwrap_or(0) as usize]
    }
}

impl LockRule for Full {
    fn update_lock<P: PcrPort>(arbiter: &mut Arbiter<P, Self>, counter: CounterId) -> Result {
        arbiter.enforce(counter)
    }
}
