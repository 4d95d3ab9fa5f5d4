//! What the three arbiters share: the counters that they hold on every CPU, who
//! has reserved them, and the calls.

use super::error::Result;
use super::registers::{Register, Registers};
use super::{ArbiterError, DeniedAccess, Discovery, Key, PcrPort};
use crate::{CounterId, CounterSet, abi};

/// The two registers of a counter that are reserved apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The counter.
    Perfctr,
    /// Its event select; of a fixed-function counter its part of the control
    /// that all of them share.
    Evntsel,
}

/// An arbiter of the kernel's counters. They are named as legacy registers name
/// them.
pub trait Master {
    /// The counters that it holds on every CPU.
    fn counters(&self) -> CounterSet;

    /// Reserves one register, unless it has been already.
    ///
    /// # Errors
    /// `InUse`, `Unavailable` or `Lost` of [`ArbiterError`](super::ArbiterError).
    fn reserve(&mut self, part: Part, counter: CounterId) -> Result;

    /// Releases one register; always succeeds, and does nothing where it is not
    /// reserved.
    fn release(&mut self, part: Part, counter: CounterId);

    /// Starts the lease of a counter anew, where the host gives leases.
    ///
    /// # Errors
    /// `Unavailable` or `Lost` of [`ArbiterError`](super::ArbiterError).
    fn renew(&mut self, counter: CounterId) -> Result;

    /// Gives every counter back, whoever uses it; the arbiter holds none then.
    fn finish(&mut self);

    /// Linux's `reserve_perfctr_nmi`.
    ///
    /// # Errors
    /// As [`Master::reserve`].
    fn reserve_perfctr(&mut self, counter: CounterId) -> Result {
        self.reserve(Part::Perfctr, counter)
    }

    /// Linux's `release_perfctr_nmi`; always succeeds.
    fn release_perfctr(&mut self, counter: CounterId) {
        self.release(Part::Perfctr, counter);
    }

    /// Linux's `reserve_evntsel_nmi`.
    ///
    /// # Errors
    /// As [`Master::reserve`].
    fn reserve_evntsel(&mut self, counter: CounterId) -> Result {
        self.reserve(Part::Evntsel, counter)
    }

    /// Linux's `release_evntsel_nmi`; always succeeds.
    fn release_evntsel(&mut self, counter: CounterId) {
        self.release(Part::Evntsel, counter);
    }
}

/// What tells the arbiters apart.
pub trait LockRule: Sized {
    /// Brings the lock of a counter in line with who has reserved it.
    fn update_lock<P: PcrPort>(arbiter: &mut Arbiter<P, Self>, counter: CounterId) -> Result;
}

/// An arbiter; one of [`MinimalMaster`](super::MinimalMaster),
/// [`EnforcingMaster`](super::EnforcingMaster) and
/// [`FullMaster`](super::FullMaster).
#[derive(Debug)]
pub struct Arbiter<P, S> {
    pub(super) registers: Registers<P>,
    /// The management cookie of all its counters, and the access cookie of the
    /// locked ones.
    pub(super) secret: Key,
    /// Control word of an open counter.
    pub(super) control: u64,
    /// What it holds on every CPU.
    pub(super) counters: CounterSet,
    /// Reserved registers, by [`Part`].
    pub(super) owners: [CounterSet; 2],
    /// Counters that the classic calls find in use.
    pub(super) private: CounterSet,
    pub(super) rule: S,
}

impl<P: PcrPort, S: LockRule> Arbiter<P, S> {
    /// Reserves what can be had on every CPU, and shuts the firmware out of it.
    pub(super) fn new(port: P, machine: Discovery, denial: DeniedAccess, rule: S) -> Result<Self> {
        let mut registers = Registers { port, machine };
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
            rule,
        };
        for counter in machine.counters().iter() {
            // To try the lock alone would clear what legacy software counts on the
            // CPUs before the one that refuses. What is lost meanwhile is
            // not among its counters.
            let free = arbiter.registers.is_free(counter);
            if free && arbiter.lock(counter) && arbiter.open(counter).is_ok() {
                arbiter.counters.insert(counter);
                let _ = S::update_lock(&mut arbiter, counter);
            }
        }
        Ok(arbiter)
    }

    /// Tries to set the lock on every CPU; a failure leaves it on none.
    fn lock(&mut self, counter: CounterId) -> bool {
        let register = (abi::MSR_MANAGEMENT_KEY, self.secret.register());
        let locked = self.registers.write(counter, register, Key::DEFAULT);
        if let Err(cpu) = locked {
            self.give_back(counter, cpu);
        }
        locked.is_ok()
    }

    /// `pcr_update_lock` of the paper's figure 2, on every CPU.
    pub(super) fn enforce(&mut self, counter: CounterId) -> Result {
        if self.owners.iter().all(|owners| owners.contains(counter)) {
            self.open(counter)
        } else {
            // FIXED_CTR_CTRL asks for no cookie: it would start a locked one.
            self.set(counter, self.secret, !abi::CONTROL_FIXED_CTRL)
        }
    }

    fn open(&mut self, counter: CounterId) -> Result {
        self.set(counter, Key::DEFAULT, u64::MAX)
    }

    /// Sets who has access, and which bits of the control word stay set.
    pub(super) fn set(&mut self, counter: CounterId, access: Key, mask: u64) -> Result {
        self.manage(counter, (abi::MSR_CONTROL, self.control & mask))?;
        self.manage(counter, (abi::MSR_ACCESS_KEY, access.register()))
    }

    /// Writes a register on every CPU. Where the machine does not take the
    /// cookie any more the counter is lost, and then it is given back elsewhere.
    fn manage(&mut self, counter: CounterId, register: Register) -> Result {
        let written = self.registers.write(counter, register, self.secret);
        written.map_err(|cpu| {
            self.give_back(counter, self.registers.port.cpus());
            ArbiterError::Lost { counter, cpu }
        })
    }

    /// Gives a counter back on the CPUs below `end`; one that has lost it has
    /// nothing to say to that.
    fn give_back(&mut self, counter: CounterId, end: u32) {
        self.counters.remove(counter);
        let register = (abi::MSR_MANAGEMENT_KEY, abi::DEFAULT_COOKIE);
        for cpu in 0..end {
            let _ = self.registers.write_on(cpu, counter, register, self.secret);
        }
    }
}

impl<P: PcrPort, S: LockRule> Master for Arbiter<P, S> {
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
        S::update_lock(self, counter)
    }

    fn release(&mut self, part: Part, counter: CounterId) {
        self.owners[part as usize].remove(counter);
        // A release succeeds; a counter that is lost needs no lock.
        if (self.counters & !self.private).contains(counter) {
            let _ = S::update_lock(self, counter);
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
            self.give_back(counter, self.registers.port.cpus());
        }
        self.owners = [CounterSet::EMPTY; 2];
        self.private = CounterSet::EMPTY;
    }
}
