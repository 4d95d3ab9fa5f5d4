//! The guest-side arbiters at work: firmware reserves counters on two vCPUs, an
//! arbiter of the kernel finds out what is left and grants it, and a rogue,
//! unaware of all this, touches the same registers.
//!
//! The program judges nothing. It writes down the result of each step
//! ([`findings`]), and the test compares. Bits 7:0 of the start word select the
//! arbiter, bits 15:8 are the number of the vCPU.
#![no_std]
#![no_main]
#![deny(unsafe_code)]

mod classic;
mod findings;
mod firmware;
mod port;
mod private;
mod registers;
#[allow(unsafe_code)]
mod sys;

use arbiter::abi;
use arbiter::guest::{
    DeniedAccess, Discovery, EnforcingMaster, FullMaster, Master, MinimalMaster, PcrPort,
};

use findings::{code, note, seen};
use port::Cpus;

/// Entered by [`sys`] on every vCPU.
fn start(word: u64) -> ! {
    let [arbiter, cpu, ..] = word.to_le_bytes();
    if cpu != 0 {
        port::serve();
    }
    match Discovery::find(sys::cpuid) {
        Ok(machine) => {
            run(arbiter, machine);
            sys::exit(0);
        }
        Err(_) => sys::exit(1),
    }
}

fn run(arbiter: u8, machine: Discovery) {
    let sizes = u64::from(machine.programmable) | u64::from(machine.fixed) << 8;
    note("counters that there are", sizes);
    note("layer", seen(Cpus.rdmsr(0, machine.msr(abi::MSR_PHASE, 0))));
    let Some(held) = firmware::reserve(&machine) else {
        return;
    };
    note(
        "claim too early",
        code(MinimalMaster::claim(Cpus, machine, DeniedAccess::Drop)),
    );
    note("phase ends", firmware::end_phase(&machine));
    note("phase ends again", firmware::end_phase(&machine));
    note("layer", seen(Cpus.rdmsr(0, machine.msr(abi::MSR_PHASE, 0))));
    for denial in [DeniedAccess::Drop, DeniedAccess::Fault] {
        round(arbiter, machine, denial);
    }
    firmware::look(&machine, held);
}

/// One arbiter from its claim to its end.
fn round(arbiter: u8, machine: Discovery, denial: DeniedAccess) {
    let (mut minimal, mut enforcing, mut full);
    let master: &mut dyn Master = match arbiter {
        0 => {
            minimal = MinimalMaster::claim(Cpus, machine, DeniedAccess::Drop);
            note(
                "claim",
                code(minimal.as_ref().map(drop).map_err(|error| *error)),
            );
            let Ok(minimal) = &mut minimal else { return };
            minimal
        }
        1 => {
            enforcing = EnforcingMaster::claim(Cpus, machine, denial);
            note(
                "claim",
                code(enforcing.as_ref().map(drop).map_err(|error| *error)),
            );
            let Ok(enforcing) = &mut enforcing else {
                return;
            };
            enforcing
        }
        _ => {
            full = FullMaster::claim(Cpus, machine, denial);
            note(
                "claim",
                code(full.as_ref().map(drop).map_err(|error| *error)),
            );
            let Ok(full) = &mut full else { return };
            private::play(full, &machine);
            full
        }
    };
    classic::play(master);
    master.finish();
    note("counters at the end", master.counters().bits());
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    sys::exit(2)
}
