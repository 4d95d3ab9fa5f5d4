//! The fully enforcing master: the paper's section III.B.3.

use super::error::Result;
use super::{ArbiterError, Denial, Discovery, EnforcingMaster, Key, Master, Part, PcrPort};
use crate::{CounterId, CounterSet, abi};

/// Shared controls, which do not reach a private counter: it counts as its own
/// select says, and tells its overflow by `OVERFLOW`.
const SHARED: u64 = abi::CONTROL_GLOBAL_CTRL
    | abi::CONTROL_FREEZE
    | abi::CONTROL_OVF_CLEAR
    | abi::CONTROL_FIXED_CTRL;

/// A counter that one user in the kernel has for itself. It is reached by the
/// alias registers at [`Discovery::position`] of the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Private {
    /// Its legacy name.
    pub counter: CounterId,
    /// Its access cookie, the same on every CPU.
    pub key: Key,
}

/// Also hands out counters privately. The classic calls find them in use.
#[derive(Debug)]
pub struct FullMaster<P> {
    base: EnforcingMaster<P>,
    private: CounterSet,
    /// Access cookies of private counters, by the bits of the set.
    keys: [Key; 64],
}

impl<P: PcrPort> FullMaster<P> {
    /// As [`EnforcingMaster::claim`].
    ///
    /// # Errors
    /// As there.
    pub fn claim(port: P, machine: Discovery, denial: Denial) -> Result<Self> {
        Ok(FullMaster {
            base: EnforcingMaster::claim(port, machine, denial)?,
            private: CounterSet::EMPTY,
            keys: [Key::DEFAULT; 64],
        })
    }

    /// Gives the caller the first counter of `wanted` that nobody uses, stopped
    /// and cleared, with a fresh access cookie.
    ///
    /// # Errors
    /// [`ArbiterError::NoneFree`], [`ArbiterError::NoRandom`], or
    /// [`ArbiterError::Lost`].
    pub fn acquire(&mut self, wanted: CounterSet) -> Result<Private> {
        let mut unused = (self.counters() & wanted & !self.private).iter();
        let counter = unused.find(|counter| self.base.base.reserved(*counter) == 0);
        let counter = counter.ok_or(ArbiterError::NoneFree)?;
        let pool = &mut self.base.base.pool;
        let key = pool.fresh_key()?;
        pool.clear(counter);
        pool.set(counter, key, self.base.control & !SHARED)?;
        self.private.insert(counter);
        *self.key(counter) = key;
        Ok(Private { counter, key })
    }

    /// Takes a private counter back; locks, stops and clears it.
    ///
    /// # Errors
    /// [`ArbiterError::NotYours`], or [`ArbiterError::Lost`].
    pub fn give_up(&mut self, held: Private) -> Result {
        let Private { counter, key } = held;
        if !self.private.contains(counter) || *self.key(counter) != key {
            return Err(ArbiterError::NotYours(counter));
        }
        self.private.remove(counter);
        self.base.update_lock(counter)?;
        self.base.base.pool.clear(counter);
        Ok(())
    }

    fn key(&mut self, counter: CounterId) -> &mut Key {
        // A counter without a bit is in no set, and never private.
        &mut self.keys[counter.global_bit().unwrap_or(0) as usize]
    }
}

impl<P: PcrPort> Master for FullMaster<P> {
    fn counters(&self) -> CounterSet {
        self.base.counters()
    }

    fn reserve(&mut self, part: Part, counter: CounterId) -> Result {
        match self.private.contains(counter) {
            true => Err(ArbiterError::InUse(counter)),
            false => self.base.reserve(part, counter),
        }
    }

    fn release(&mut self, part: Part, counter: CounterId) {
        if !self.private.contains(counter) {
            self.base.release(part, counter);
        }
    }

    fn renew(&mut self, counter: CounterId) -> Result {
        self.base.renew(counter)
    }

    fn finish(&mut self) {
        self.base.finish();
        self.private = CounterSet::EMPTY;
    }
}
