//! The counters that an arbiter holds on every CPU.

use super::error::Result;
use super::{ArbiterError, Discovery, Fault, Key, PcrPort};
use crate::{CounterId, CounterSet, abi};
use core::ops::Range;

/// The initial control word, without the firmware's mode bits.
pub(super) const KERNEL: u64 =
    abi::CONTROL_INITIAL & !(abi::CONTROL_MANAGE_FIRMWARE | abi::CONTROL_ACCESS_FIRMWARE);

/// Counters by their legacy names, all managed with one cookie.
#[derive(Debug)]
pub(super) struct Pool<P> {
    /// The machine.
    pub(super) port: P,
    machine: Discovery,
    /// The management cookie of all of them.
    pub(super) secret: Key,
    /// What is held.
    pub(super) counters: CounterSet,
}

impl<P: PcrPort> Pool<P> {
    /// Reserves what can be had on every CPU, and shuts the firmware out of it.
    pub(super) fn claim(mut port: P, machine: Discovery) -> Result<Self> {
        // A firmware that clears its own mode bits could never manage again.
        if port.rdmsr(0, machine.msr(abi::MSR_PHASE, 0)) != Ok(abi::LAYER_KERNEL) {
            return Err(ArbiterError::NotKernel);
        }
        let mut pool = Pool {
            port,
            machine,
            secret: Key::DEFAULT,
            counters: CounterSet::EMPTY,
        };
        pool.secret = pool.fresh_key()?;
        for counter in machine.counters().iter() {
            if pool.is_free(counter)
                && pool.lock(counter)
                && pool.set(counter, Key::DEFAULT, KERNEL).is_ok()
            {
                pool.counters.insert(counter);
            }
        }
        Ok(pool)
    }

    /// Whether nobody has the counter on any CPU. To try the lock alone would
    /// clear what legacy software counts on the CPUs before the one that refuses.
    fn is_free(&mut self, counter: CounterId) -> bool {
        (0..self.port.cpus()).all(|cpu| {
            let position = self.machine.position(&mut self.port, cpu, counter);
            let status = position.map(|n| self.machine.msr(abi::MSR_STATUS, n));
            let status = status.and_then(|msr| self.port.rdmsr(cpu, msr).ok());
            status.is_some_and(|status| status & abi::STATUS_RESERVED == 0)
        })
    }

    /// Tries to set the lock on every CPU; a failure leaves it on none.
    fn lock(&mut self, counter: CounterId) -> bool {
        let register = (abi::MSR_MANAGEMENT_KEY, self.secret.register());
        let mut cpus = 0..self.port.cpus();
        let refuses = |cpu: &u32| self.write(*cpu, counter, register, Key::DEFAULT).is_err();
        let refused = cpus.find(refuses);
        if let Some(cpu) = refused {
            self.give_back(counter, 0..cpu);
        }
        refused.is_none()
    }

    /// Sets who has access, on every CPU.
    pub(super) fn set(&mut self, counter: CounterId, access: Key, control: u64) -> Result {
        self.manage(counter, (abi::MSR_CONTROL, control))?;
        self.manage(counter, (abi::MSR_ACCESS_KEY, access.register()))
    }

    /// Starts the lease anew, on every CPU.
    pub(super) fn renew(&mut self, counter: CounterId) -> Result {
        let register = (abi::MSR_MANAGEMENT_KEY, self.secret.register());
        self.manage(counter, register)
    }

    /// Writes a register on every CPU. Where the machine does not take the
    /// cookie any more the counter is lost, and then it is given back elsewhere.
    fn manage(&mut self, counter: CounterId, register: (u32, u64)) -> Result {
        for cpu in 0..self.port.cpus() {
            if self.write(cpu, counter, register, self.secret).is_err() {
                self.give_back(counter, 0..self.port.cpus());
                return Err(ArbiterError::Lost { counter, cpu });
            }
        }
        Ok(())
    }

    /// Stops and clears a counter of which the access cookie is the arbiter's.
    pub(super) fn clear(&mut self, counter: CounterId) {
        let rows = [abi::MSR_SELECT, abi::MSR_COUNTER, abi::MSR_OVERFLOW];
        for cpu in 0..self.port.cpus() {
            for register in rows.into_iter().zip([0, 0, abi::OVERFLOW_CLEAR]) {
                // Models without global status have no overflow bit.
                let _ = self.write(cpu, counter, register, self.secret);
            }
        }
    }

    /// Gives a counter back; a CPU that has lost it has nothing to say to that.
    pub(super) fn give_back(&mut self, counter: CounterId, cpus: Range<u32>) {
        self.counters.remove(counter);
        let register = (abi::MSR_MANAGEMENT_KEY, abi::DEFAULT_COOKIE);
        for cpu in cpus {
            let _ = self.write(cpu, counter, register, self.secret);
        }
    }

    fn write(
        &mut self,
        cpu: u32,
        counter: CounterId,
        (row, value): (u32, u64),
        key: Key,
    ) -> Result<(), Fault> {
        let position = self.machine.position(&mut self.port, cpu, counter);
        let msr = self.machine.msr(row, position.ok_or(Fault)?);
        self.port.wrmsr_with(cpu, msr, value, key)
    }

    /// A new cookie.
    pub(super) fn fresh_key(&mut self) -> Result<Key> {
        let bits = match self.machine.has(abi::FEATURE_RANDOM) {
            true => self
                .port
                .rdmsr(0, self.machine.msr(abi::MSR_RANDOM, 0))
                .ok(),
            false => self.port.random(),
        };
        bits.map(Key::from_random).ok_or(ArbiterError::NoRandom)
    }
}
