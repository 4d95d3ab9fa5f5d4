//! The classic four calls, and the fate of software that makes none of them.

use arbiter::CounterId;
use arbiter::guest::{Master, PcrPort};

use super::findings::{code, done, grew, note, seen};
use super::port::Cpus;
use super::registers::{COUNTER, CYCLES, FIXED_CONTROL, GLOBAL_CONTROL, SELECT, linger, rogue};
use super::sys;

/// The counter that is granted.
const N: u32 = 1;
const GRANTED: CounterId = CounterId::Programmable(1);
/// What its owner leaves in it.
const COUNT: u64 = 0x1234;

pub(crate) fn play(master: &mut dyn Master) {
    note("counters", master.counters().bits());
    // The firmware has the first one on vCPU 1 only, and the last one on both.
    for taken in [0, 3] {
        let reserved = master.reserve_perfctr(CounterId::Programmable(taken));
        note("reserve a taken one", code(reserved));
    }
    rogue(N);
    note("reserve counter", code(master.reserve_perfctr(GRANTED)));
    note("reserve it again", code(master.reserve_perfctr(GRANTED)));
    note("reserve select", code(master.reserve_evntsel(GRANTED)));
    own();
    master.release_evntsel(GRANTED);
    rogue(N);
    note("reserve select", code(master.reserve_evntsel(GRANTED)));
    for cpu in 0..2 {
        note("owner reads", seen(Cpus.rdmsr(cpu, COUNTER + N)));
    }
    master.release_perfctr(GRANTED);
    master.release_evntsel(GRANTED);
    master.release_evntsel(GRANTED);
    fixed();
}

/// The counter's owner at work, through legacy registers.
fn own() {
    for cpu in 0..2 {
        let writes = [
            (GLOBAL_CONTROL, 1 << N),
            (COUNTER + N, 0),
            (SELECT + N, CYCLES),
        ];
        let written = writes.map(|(msr, value)| done(Cpus.wrmsr(cpu, msr, value)));
        note("owner programs", written.iter().sum());
    }
    let before = Cpus.rdmsr(0, COUNTER + N);
    linger();
    let after = sys::rdpmc(N, 0);
    note("it counts", grew(before, after));
    for cpu in 0..2 {
        let writes = [(SELECT + N, 0), (COUNTER + N, COUNT), (GLOBAL_CONTROL, 0)];
        let written = writes.map(|(msr, value)| done(Cpus.wrmsr(cpu, msr, value)));
        note("owner stops", written.iter().sum());
    }
    note("program's RDPMC", seen(sys::user_rdpmc(N, 0)));
}

/// FIXED_CTR_CTRL belongs to counters that nobody has reserved.
fn fixed() {
    note(
        "rogue starts fixed",
        done(Cpus.wrmsr(0, FIXED_CONTROL, 0x333)),
    );
    note("fixed control", seen(Cpus.rdmsr(0, FIXED_CONTROL)));
    note("rogue stops fixed", done(Cpus.wrmsr(0, FIXED_CONTROL, 0)));
}
