//! `umpire stat`, `record`, `report`, `top`, `ls`, `pcr` and `budget` beside a running VM, through the
//! real programs. Counts are declared by `sim`, or are those of a loop on the processor in software,
//! so what must come out is known.

mod bad_input;
mod budget;
mod counts;
mod endings;
mod liar;
mod lifecycle;
mod observers;
mod on_emu;
mod owners;
mod recording;
mod reservations;
mod rings;
mod samples;
mod scribbler;
mod scripts;
mod top;
mod track;
mod wrappers;

use guest_tests::umpire;
use guest_tests::vm::Vm;

/// Events per microsecond; instructions are a quarter of the cycles, and
/// branches a fifth of the instructions.
const RATES: &str = "counters = COUNT\n\
    [event.cycles]\nrate = 2000\n\
    [event.instructions]\nrate = 500\n\
    [event.branches]\nrate = 100\n\
    [event.branch-misses]\nphases = [{ us = 300, rate = 1 }, { us = 100, rate = 5 }]\n";

/// Boots a VM with so many physical counters, and more flags of `umpire run`.
fn boot(counters: u32, flags: &[&str]) -> Vm {
    let rates = RATES.replace("COUNT", &counters.to_string());
    Vm::boot(&umpire::path(), &rates, flags)
}

/// As [`boot`], with a guest that only halts; processors beyond the first are
/// never started.
fn boot_idle(counters: u32, flags: &[&str]) -> Vm {
    let rates = RATES.replace("COUNT", &counters.to_string());
    Vm::boot_idle(&umpire::path(), &rates, flags)
}
