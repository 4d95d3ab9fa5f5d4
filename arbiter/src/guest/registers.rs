//! Access to the registers of the reservations on every CPU, by the legacy names of
//! their counters.

use super::error::Result;
use super::{ArbiterError, Discovery, Fault, Key, PcrPort};
use crate::{CounterId, abi};

/// How an access to a counter fails that its software has not reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeniedAccess {
    /// Reads yield 0, and writes vanish. This is safe for software that expects no
    /// fault.
    Drop,
    /// The access raises #GP, so that the kernel sees who made it. RDPMC at CPL 0 is
    /// dropped nevertheless.
    Fault,
}

impl DeniedAccess {
    /// The initial control word with this behaviour, without the firmware's mode bits.
    pub(super) const fn control(self) -> u64 {
        let firmware = abi::CONTROL_MANAGE_FIRMWARE | abi::CONTROL_ACCESS_FIRMWARE;
        let kernel = abi::CONTROL_INITIAL & !firmware;
        match self {
            DeniedAccess::Drop => kernel,
            DeniedAccess::Fault => kernel | abi::CONTROL_FAULT,
        }
    }
}

/// A register of a counter, as a row of the ABI, and the value to write to it.
pub(super) type Register = (u32, u64);

/// The registers of the machine: its CPUs, and what CPUID says about it.
#[derive(Debug)]
pub(super) struct Registers<P> {
    port: P,
    machine: Discovery,
}

impl<P: PcrPort> Registers<P> {
    pub(super) fn new(port: P, machine: Discovery) -> Self {
        Registers { port, machine }
    }

    pub(super) fn cpus(&self) -> u32 {
        self.port.cpus()
    }

    /// Whether the caller runs in the kernel's layer.
    pub(super) fn in_kernel(&mut self) -> bool {
        let phase = self.machine.msr(abi::MSR_PHASE, 0);
        self.port.rdmsr(0, phase) == Ok(abi::LAYER_KERNEL)
    }

    /// Whether nobody has reserved the counter on any CPU.
    pub(super) fn is_free(&mut self, counter: CounterId) -> bool {
        (0..self.cpus()).all(|cpu| {
            let position = self.machine.position(&mut self.port, cpu, counter);
            let status = position.map(|n| self.machine.msr(abi::MSR_STATUS, n));
            let status = status.and_then(|msr| self.port.rdmsr(cpu, msr).ok());
            status.is_some_and(|status| status & abi::STATUS_RESERVED == 0)
        })
    }

    /// Does something on one CPU after the other. The first that refuses ends this, and
    /// is the error.
    pub(super) fn on_each(
        &mut self,
        mut act: impl FnMut(&mut Self, u32) -> Result<(), Fault>,
    ) -> Result<(), u32> {
        let mut cpus = 0..self.cpus();
        cpus.find(|cpu| act(self, *cpu).is_err())
            .map_or(Ok(()), Err)
    }

    /// Reserves a counter on one CPU, by its lock or, under a single master, by the
    /// mailbox.
    pub(super) fn reserve_on(
        &mut self,
        cpu: u32,
        counter: CounterId,
        key: Key,
    ) -> Result<(), Fault> {
        let lock = (abi::MSR_MANAGEMENT_KEY, key.register());
        let locked = self.write_on(cpu, counter, lock, Key::DEFAULT);
        locked.or_else(|fault| {
            self.ask_master(cpu, counter, abi::REQUEST_RESERVE, key)
                .ok_or(fault)
        })
    }

    /// Gives a counter back on one CPU. Errors of a CPU that has lost it do not matter.
    pub(super) fn give_back_on(&mut self, cpu: u32, counter: CounterId, key: Key) {
        let lock = (abi::MSR_MANAGEMENT_KEY, abi::DEFAULT_COOKIE);
        if self.write_on(cpu, counter, lock, key).is_err() {
            let _ = self.ask_master(cpu, counter, abi::REQUEST_RELEASE, key);
        }
    }

    /// Has the master do what a write of the lock was refused for. Of a counter that is
    /// free or one's own it has its answer at once; nothing else is waited for.
    fn ask_master(&mut self, cpu: u32, counter: CounterId, operation: u64, key: Key) -> Option<()> {
        let [refusal, request, answer] = [abi::MSR_REFUSAL, abi::MSR_REQUEST, abi::MSR_ANSWER]
            .map(|msr| self.machine.msr(msr, 0));
        if self.port.rdmsr(cpu, refusal) != Ok(abi::REASON_MASTER) {
            return None;
        }
        let position = self.machine.position(&mut self.port, cpu, counter)?;
        let which = u64::from(position) << abi::REQUEST_WHICH_SHIFT;
        let word = operation | abi::REQUEST_POSITION | which;
        self.port.wrmsr_with(cpu, request, word, key).ok()?;
        let state = self.port.rdmsr(cpu, answer).ok()? & abi::ANSWER_STATE_MASK;
        if state == abi::ANSWER_PENDING {
            let withdraw = abi::REQUEST_WITHDRAW;
            let _ = self.port.wrmsr_with(cpu, request, withdraw, key);
        }
        (state == abi::ANSWER_GRANTED).then_some(())
    }

    /// Writes a register on one CPU.
    pub(super) fn write_on(
        &mut self,
        cpu: u32,
        counter: CounterId,
        (row, value): Register,
        key: Key,
    ) -> Result<(), Fault> {
        let position = self.machine.position(&mut self.port, cpu, counter);
        let msr = self.machine.msr(row, position.ok_or(Fault)?);
        self.port.wrmsr_with(cpu, msr, value, key)
    }

    /// Stops and clears a counter with the access cookie `key`.
    pub(super) fn clear(&mut self, counter: CounterId, key: Key) {
        let rows = [abi::MSR_SELECT, abi::MSR_COUNTER, abi::MSR_OVERFLOW];
        for cpu in 0..self.cpus() {
            for register in rows.into_iter().zip([0, 0, abi::OVERFLOW_CLEAR]) {
                // Models without global status have no overflow bit.
                let _ = self.write_on(cpu, counter, register, key);
            }
        }
    }

    /// Draws a new cookie.
    pub(super) fn fresh_key(&mut self) -> Result<Key> {
        let bits = if self.machine.has(abi::FEATURE_RANDOM) {
            self.port
                .rdmsr(0, self.machine.msr(abi::MSR_RANDOM, 0))
                .ok()
        } else {
            self.port.random()
        };
        bits.map(Key::from_random).ok_or(ArbiterError::NoRandom)
    }
}
