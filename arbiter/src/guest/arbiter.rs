//! What the three arbiters share: the classic four calls, the counters that an
//! arbiter holds on every CPU, and who has reserved them or has one for itself.

use super::error::Result;
use super::full::{Full, Private};
use super::registers::{Register, Registers};
use super::rule::LockRule;
use super::{ArbiterError, DeniedAccess, Discovery, Key, PcrPort};
use crate::{CounterId, CounterSet, abi};

/// The two registers of a counter, which are reserved separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The counter.
    Perfctr,
    /// The event select of the counter. A fixed-function counter has its part of the
    /// control that all of them share instead.
    Evntsel,
}

/// An arbiter of the kernel's counters: the classic four calls of Linux. A counter
/// goes by the name of the legacy registers that reach it.
pub trait Master {
    /// The counters that the arbiter holds on every CPU.
    fn counters(&self) -> CounterSet;

    /// Reserves one register, unless somebody has reserved it already.
    ///
    /// # Errors
    /// [`InUse`](ArbiterError::InUse), [`Unavailable`](ArbiterError::Unavailable) or
    /// [`Lost`](ArbiterError::Lost).
    fn reserve(&mut self, part: Part, counter: CounterId) -> Result;

    /// Releases one register. This always succeeds, and does nothing if nobody has
    /// reserved the register.
    fn release(&mut self, part: Part, counter: CounterId);

    /// Starts the lease of a counter anew, if the host gives leases.
    ///
    /// # Errors
    /// [`Unavailable`](ArbiterError::Unavailable) or [`Lost`](ArbiterError::Lost).
    fn renew(&mut self, counter: CounterId) -> Result;

    /// Gives every counter back, whoever uses it. The arbiter holds none afterwards.
    fn finish(&mut self);

    /// Reserves a counter, as Linux's `reserve_perfctr_nmi` does.
    ///
    /// # Errors
    /// Those of [`Master::reserve`].
    fn reserve_perfctr(&mut self, counter: CounterId) -> Result {
        self.reserve(Part::Perfctr, counter)
    }

    /// Releases a counter, as Linux's `release_perfctr_nmi` does. This always succeeds.
    fn release_perfctr(&mut self, counter: CounterId) {
        self.release(Part::Perfctr, counter);
    }

    /// Reserves an event select, as Linux's `reserve_evntsel_nmi` does.
    ///
    /// # Errors
    /// Those of [`Master::reserve`].
    fn reserve_evntsel(&mut self, counter: CounterId) -> Result {
        self.reserve(Part::Evntsel, counter)
    }

    /// Releases an event select, as Linux's `release_evntsel_nmi` does. This always
    /// succeeds.
    fn release_evntsel(&mut self, counter: CounterId) {
        self.release(Part::Evntsel, counter);
    }
}

/// An arbiter. It is one of [`MinimalMaster`](super::MinimalMaster),
/// [`EnforcingMaster`](super::EnforcingMaster) and
/// [`FullMaster`](super::FullMaster).
#[derive(Debug)]
pub struct Arbiter<P, R> {
    registers: Registers<P>,
    /// The management cookie of all its counters, and the access cookie of the
    /// locked ones.
    secret: Key,
    /// The control word of an open counter.
    control: u64,
    /// The counters that the arbiter holds on every CPU.
    counters: CounterSet,
    /// The reserved registers, by [`Part`].
    owners: [CounterSet; 2],
    /// Counters that the classic calls find in use.
    private: CounterSet,
    rule: R,
}

impl<P: PcrPort, R: LockRule> Arbiter<P, R> {
    /// Reserves every counter for the kernel that is free on every CPU, and locks the
    /// firmware out of it. Accesses of who may not fail as `denial` says.
    ///
    /// # Errors
    /// [`NotKernel`](ArbiterError::NotKernel) or [`NoRandom`](ArbiterError::NoRandom). A
    /// counter that somebody else has is no error.
    pub fn claim(port: P, machine: Discovery, denial: DeniedAccess) -> Result<Self> {
        let mut registers = Registers::new(port, machine);
        // A firmware that clears its own mode bits could never manage again.
        if !registers.in_kernel() {
            return Err(ArbiterError::NotKernel);
        }
        let mut arbiter = Arbiter {
            secret: registers.fresh_key()?,
            registers,
            control: denial.control(),
            counters: CounterSet::EMPTY,
            owners: [CounterSet::EMPTY; 2],
            private: CounterSet::EMPTY,
            rule: R::default(),
        };
        // Samplers are left to their drivers.
        for counter in machine.counters().counters().iter() {
            // Trying the lock without a look would clear what legacy software counts
            // on the CPUs before the one that refuses. A counter that is lost in
            // between is not among the arbiter's.
            let free = arbiter.registers.is_free(counter);
            if free && arbiter.lock(counter) && arbiter.open(counter).is_ok() {
                arbiter.counters.insert(counter);
                let _ = arbiter.update_lock(counter);
            }
        }
        Ok(arbiter)
    }

    /// Tries to set the lock on every CPU. A failure leaves it on none.
    fn lock(&mut self, counter: CounterId) -> bool {
        let secret = self.secret;
        let lock = |registers: &mut Registers<P>, cpu| registers.reserve_on(cpu, counter, secret);
        let locked = self.registers.on_each(lock);
        if let Err(cpu) = locked {
            self.give_back(counter, cpu);
        }
        locked.is_ok()
    }

    /// Updates the lock of a counter after somebody has reserved or released one of its
    /// registers: opens a counter of which both are reserved, and locks any other. This is
    /// `pcr_update_lock` of the paper's figure 2, on every CPU.
    fn update_lock(&mut self, counter: CounterId) -> Result {
        if !R::LOCKS {
            Ok(())
        } else if self.owners.iter().all(|owners| owners.contains(counter)) {
            self.open(counter)
        } else {
            // FIXED_CTR_CTRL takes no cookie: it would start a locked counter.
            self.set(counter, self.secret, !abi::CONTROL_FIXED_CTRL)
        }
    }

    fn open(&mut self, counter: CounterId) -> Result {
        self.set(counter, Key::DEFAULT, u64::MAX)
    }

    /// Sets the access cookie, and which bits of the control word stay set.
    fn set(&mut self, counter: CounterId, access: Key, mask: u64) -> Result {
        self.manage(counter, (abi::MSR_CONTROL, self.control & mask))?;
        self.manage(counter, (abi::MSR_ACCESS_KEY, access.register()))
    }

    /// Writes a register on every CPU. If a CPU no longer takes the cookie the counter
    /// is lost, and the arbiter gives it back on the others.
    fn manage(&mut self, counter: CounterId, register: Register) -> Result {
        let secret = self.secret;
        let write = |on: &mut Registers<P>, cpu| on.write_on(cpu, counter, register, secret);
        let written = self.registers.on_each(write);
        written.map_err(|cpu| {
            self.give_back(counter, self.registers.cpus());
            ArbiterError::Lost { counter, cpu }
        })
    }

    /// Gives a counter back on the CPUs below `end`.
    fn give_back(&mut self, counter: CounterId, end: u32) {
        self.counters.remove(counter);
        for cpu in 0..end {
            self.registers.give_back_on(cpu, counter, self.secret);
        }
    }
}

impl<P: PcrPort> Arbiter<P, Full> {
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
        self.update_lock(counter)?;
        self.registers.clear(counter, self.secret);
        Ok(())
    }
}

impl<P: PcrPort, R: LockRule> Master for Arbiter<P, R> {
    fn counters(&self) -> CounterSet {
        self.counters
    }

    fn reserve(&mut self, part: Part, counter: CounterId) -> Result {
        let owners = &mut self.owners[part as usize];
        if !self.counters.contains(counter) {
            return Err(ArbiterError::Unavailable(counter));
        }
        if (*owners | self.private).contains(counter) {
            return Err(ArbiterError::InUse(counter));
        }
        owners.insert(counter);
        self.update_lock(counter)
    }

    fn release(&mut self, part: Part, counter: CounterId) {
        self.owners[part as usize].remove(counter);
        // A release always succeeds, and a counter that is lost needs no lock.
        if (self.counters & !self.private).contains(counter) {
            let _ = self.update_lock(counter);
        }
    }

    fn renew(&mut self, counter: CounterId) -> Result {
        if self.counters.contains(counter) {
            self.manage(counter, (abi::MSR_MANAGEMENT_KEY, self.secret.register()))
        } else {
            Err(ArbiterError::Unavailable(counter))
        }
    }

    fn finish(&mut self) {
        for counter in self.counters.iter() {
            self.give_back(counter, self.registers.cpus());
        }
        self.owners = [CounterSet::EMPTY; 2];
        self.private = CounterSet::EMPTY;
    }
}
