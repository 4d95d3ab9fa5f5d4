//! What the firmware of this guest does: it keeps the last programmable counter
//! of both vCPUs, and the first one of the second vCPU.

use arbiter::abi;
use arbiter::guest::{Discovery, Fault, Key, PcrPort};

use super::findings::{done, note, seen};
use super::port::Cpus;

/// What the firmware's counters hold.
const COUNT: u64 = 0x55;

/// Reserves them, privately. Gives the cookie.
pub(crate) fn reserve(machine: &Discovery) -> Option<Key> {
    let last = u32::from(machine.programmable).checked_sub(1)?;
    let random = Cpus.rdmsr(0, machine.msr(abi::MSR_RANDOM, 0)).ok()?;
    let key = Key::from_random(random);
    for (cpu, position) in [(0, last), (1, last), (1, 0)] {
        note("firmware reserves", done(hold(machine, cpu, position, key)));
    }
    Some(key)
}

fn hold(machine: &Discovery, cpu: u32, position: u32, key: Key) -> Result<(), Fault> {
    let msr = |row| machine.msr(row, position);
    let secret = key.register();
    Cpus.wrmsr_with(cpu, msr(abi::MSR_MANAGEMENT_KEY), secret, Key::DEFAULT)?;
    Cpus.wrmsr_with(cpu, msr(abi::MSR_ACCESS_KEY), secret, key)?;
    Cpus.wrmsr_with(cpu, msr(abi::MSR_COUNTER), COUNT, key)
}

/// Hands over to the kernel.
pub(crate) fn end_phase(machine: &Discovery) -> u64 {
    done(Cpus.wrmsr(0, machine.msr(abi::MSR_PHASE, 0), abi::PHASE_END))
}

/// What is left at the end: the firmware's counters as they were, and nothing of
/// anybody else's.
pub(crate) fn look(machine: &Discovery, key: Key) {
    let last = u32::from(machine.programmable) - 1;
    for (cpu, position) in [(0, last), (1, last), (1, 0)] {
        let read = |row, key| seen(Cpus.rdmsr_with(cpu, machine.msr(row, position), key));
        note("firmware's status", read(abi::MSR_STATUS, Key::DEFAULT));
        note("firmware's count", read(abi::MSR_COUNTER, key));
    }
    let free = machine
        .counters()
        .iter()
        .filter_map(|counter| counter.global_bit());
    let statuses = free
        .filter(|position| *position != last)
        .map(|position| seen(Cpus.rdmsr(0, machine.msr(abi::MSR_STATUS, position))));
    note(
        "others' status",
        statuses.fold(0, |all, status| all | status),
    );
}
