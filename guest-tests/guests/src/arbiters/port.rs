//! Both vCPUs for the arbiters. The second one waits for orders to access a
//! register, and answers through memory.

use core::hint::spin_loop;
use core::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use arbiter::guest::{Fault, Key, PcrPort};

use super::sys;

const IDLE: u32 = 0;
const READ: u32 = 1;
const WRITE: u32 = 2;

static COMMAND: AtomicU32 = AtomicU32::new(IDLE);
static MSR: AtomicU32 = AtomicU32::new(0);
static KEY: AtomicU64 = AtomicU64::new(0);
static VALUE: AtomicU64 = AtomicU64::new(0);
static FAULTED: AtomicU32 = AtomicU32::new(0);

/// RSI at an access that presents no cookie: no cookie has this value.
const NO_COOKIE: u64 = 0xdead_beef_dead_beef;

/// The two vCPUs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cpus;

impl Cpus {
    fn read(cpu: u32, msr: u32, rsi: u64) -> Result<u64, Fault> {
        match cpu {
            0 => sys::rdmsr(msr, rsi),
            _ => ask(READ, msr, rsi, 0),
        }
    }

    fn write(cpu: u32, msr: u32, rsi: u64, value: u64) -> Result<(), Fault> {
        match cpu {
            0 => sys::wrmsr(msr, rsi, value),
            _ => ask(WRITE, msr, rsi, value).map(drop),
        }
    }
}

impl PcrPort for Cpus {
    fn cpus(&self) -> u32 {
        2
    }

    fn rdmsr_with(&mut self, cpu: u32, msr: u32, key: Key) -> Result<u64, Fault> {
        Self::read(cpu, msr, key.register())
    }

    fn wrmsr_with(&mut self, cpu: u32, msr: u32, value: u64, key: Key) -> Result<(), Fault> {
        Self::write(cpu, msr, key.register(), value)
    }

    fn rdmsr(&mut self, cpu: u32, msr: u32) -> Result<u64, Fault> {
        Self::read(cpu, msr, NO_COOKIE)
    }

    fn wrmsr(&mut self, cpu: u32, msr: u32, value: u64) -> Result<(), Fault> {
        Self::write(cpu, msr, NO_COOKIE, value)
    }
}

/// Makes the second vCPU perform an access.
fn ask(command: u32, msr: u32, rsi: u64, value: u64) -> Result<u64, Fault> {
    MSR.store(msr, Relaxed);
    KEY.store(rsi, Relaxed);
    VALUE.store(value, Relaxed);
    COMMAND.store(command, Release);
    while COMMAND.load(Acquire) != IDLE {
        spin_loop();
    }
    match FAULTED.load(Relaxed) {
        0 => Ok(VALUE.load(Relaxed)),
        _ => Err(Fault),
    }
}

/// What the second vCPU does until the first one ends the guest.
pub(crate) fn serve() -> ! {
    loop {
        let (msr, rsi) = match COMMAND.load(Acquire) {
            IDLE => {
                spin_loop();
                continue;
            }
            _ => (MSR.load(Relaxed), KEY.load(Relaxed)),
        };
        let answer = match COMMAND.load(Relaxed) {
            READ => sys::rdmsr(msr, rsi),
            _ => sys::wrmsr(msr, rsi, VALUE.load(Relaxed)).map(|()| 0),
        };
        FAULTED.store(u32::from(answer.is_err()), Relaxed);
        VALUE.store(answer.unwrap_or(0), Relaxed);
        COMMAND.store(IDLE, Release);
    }
}
