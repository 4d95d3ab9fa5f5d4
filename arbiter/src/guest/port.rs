//! The port: what an arbiter needs from the kernel that it is part of.

use core::fmt;

use crate::abi;

/// An access raised #GP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// A cookie as software of the guest holds it. It has 48 bits, and is never printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    /// `PCR_DEFAULT_COOKIE`.
    pub const DEFAULT: Key = Key(abi::DEFAULT_COOKIE);

    /// The cookie in a register's 64 bits. `None` means that a bit above the 48th is
    /// set.
    pub const fn new(register: u64) -> Option<Key> {
        match register & !abi::COOKIE_MASK {
            0 => Some(Key(register)),
            _ => None,
        }
    }

    /// A cookie made of random bits. It is never the default cookie.
    pub const fn from_random(bits: u64) -> Key {
        match bits & abi::COOKIE_MASK {
            abi::DEFAULT_COOKIE => Key(1),
            bits => Key(bits),
        }
    }

    /// The register value: what RSI holds while the cookie is presented, and what is
    /// written to a key's MSR to set it.
    pub const fn register(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// RDMSR and WRMSR on the CPUs of the machine, like `rdmsr_safe_on_cpu` and
/// `wrmsr_safe_on_cpu` of Linux.
///
/// The kernel handles CPUs that come or go while an arbiter holds counters: it gives
/// everything back and claims anew.
pub trait PcrPort {
    /// The number of CPUs. They are numbered from 0.
    fn cpus(&self) -> u32;

    /// Performs RDMSR on `cpu` with `key` in RSI.
    ///
    /// # Errors
    /// The instruction raised #GP.
    fn rdmsr_with(&mut self, cpu: u32, msr: u32, key: Key) -> Result<u64, Fault>;

    /// Performs WRMSR on `cpu` with `key` in RSI.
    ///
    /// # Errors
    /// The instruction raised #GP.
    fn wrmsr_with(&mut self, cpu: u32, msr: u32, value: u64, key: Key) -> Result<(), Fault>;

    /// Performs RDMSR of a register that takes no cookie.
    ///
    /// # Errors
    /// The instruction raised #GP.
    fn rdmsr(&mut self, cpu: u32, msr: u32) -> Result<u64, Fault> {
        self.rdmsr_with(cpu, msr, Key::DEFAULT)
    }

    /// Performs WRMSR of a register that takes no cookie.
    ///
    /// # Errors
    /// The instruction raised #GP.
    fn wrmsr(&mut self, cpu: u32, msr: u32, value: u64) -> Result<(), Fault> {
        self.wrmsr_with(cpu, msr, value, Key::DEFAULT)
    }

    /// Draws 64 random bits from the kernel, for machines whose reservations have no
    /// source. `None` means that the kernel has none either.
    fn random(&mut self) -> Option<u64> {
        None
    }
}
