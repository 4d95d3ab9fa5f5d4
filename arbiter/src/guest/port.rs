//! What an arbiter needs of the kernel that it is part of.

use crate::abi;
use core::fmt;

/// An access raised #GP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// A cookie as software of the guest holds it: of 48 bits, and not printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    /// `PCR_DEFAULT_COOKIE`.
    pub const DEFAULT: Key = Key(abi::DEFAULT_COOKIE);

    /// The cookie in a register's 64 bits; `None` if it has more than 48.
    pub const fn new(register: u64) -> Option<Key> {
        match register & !abi::COOKIE_MASK {
            0 => Some(Key(register)),
            _ => None,
        }
    }

    /// A cookie out of random bits, never the default one.
    pub const fn from_random(bits: u64) -> Key {
        match bits & abi::COOKIE_MASK {
            abi::DEFAULT_COOKIE => Key(1),
            bits => Key(bits),
        }
    }

    /// What RSI holds while it is presented, and a key's MSR when it is set.
    pub const fn register(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// RDMSR and WRMSR on the CPUs of the machine, as `rdmsr_safe_on_cpu` and
/// `wrmsr_safe_on_cpu` of Linux.
///
/// A CPU that comes or goes while an arbiter holds counters is the kernel's to
/// handle: give everything back and claim anew.
pub trait PcrPort {
    /// How many CPUs there are; they are numbered from 0.
    fn cpus(&self) -> u32;

    /// RDMSR on `cpu` with `key` in RSI.
    ///
    /// # Errors
    /// It raised #GP.
    fn rdmsr_with(&mut self, cpu: u32, msr: u32, key: Key) -> Result<u64, Fault>;

    /// WRMSR on `cpu` with `key` in RSI.
    ///
    /// # Errors
    /// It raised #GP.
    fn wrmsr_with(&mut self, cpu: u32, msr: u32, value: u64, key: Key) -> Result<(), Fault>;

    /// RDMSR of a register that takes no cookie.
    ///
    /// # Errors
    /// It raised #GP.
    fn rdmsr(&mut self, cpu: u32, msr: u32) -> Result<u64, Fault> {
        self.rdmsr_with(cpu, msr, Key::DEFAULT)
    }

    /// WRMSR of a register that takes no cookie.
    ///
    /// # Errors
    /// It raised #GP.
    fn wrmsr(&mut self, cpu: u32, msr: u32, value: u64) -> Result<(), Fault> {
        self.wrmsr_with(cpu, msr, value, Key::DEFAULT)
    }

    /// 64 random bits of the kernel's own, for machines whose reservations have
    /// none; `None` if the kernel has none either.
    fn random(&mut self) -> Option<u64> {
        None
    }
}
