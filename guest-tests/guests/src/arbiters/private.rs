//! A private counter: its holder, and all others.

use arbiter::abi;
use arbiter::guest::{Discovery, FullMaster, Key, Master, PcrPort, Private};
use arbiter::{CounterId, CounterSet};

use super::findings::{code, done, grew, note, seen};
use super::port::Cpus;
use super::registers::{CYCLES, GLOBAL_CONTROL, linger, rogue};
use super::sys;

/// The counter.
const N: u32 = 2;
const WANTED: CounterId = CounterId::Programmable(2);
/// What its holder leaves in it.
const COUNT: u64 = 0x77;

pub(crate) fn play(master: &mut FullMaster<Cpus>, machine: &Discovery) {
    let wanted = [WANTED].into_iter().collect();
    let held = match master.acquire(wanted) {
        Ok(held) => held,
        Err(error) => return note("acquire", code::<()>(Err(error))),
    };
    note("acquire", u64::from(held.counter == WANTED));
    note("acquire it again", code(master.acquire(wanted)));
    note(
        "acquire no counter",
        code(master.acquire(CounterSet::EMPTY)),
    );
    note("reserve it", code(master.reserve_perfctr(WANTED)));
    master.release_perfctr(WANTED);
    master.release_evntsel(WANTED);
    rogue(N);
    hold(machine, held.key);
    let stranger = Private {
        key: Key::from_random(!held.key.register()),
        ..held
    };
    let msr = machine.msr(abi::MSR_COUNTER, N);
    note(
        "another key reads",
        seen(Cpus.rdmsr_with(1, msr, stranger.key)),
    );
    note("another key gives up", code(master.give_up(stranger)));
    note("holder reads", seen(Cpus.rdmsr_with(1, msr, held.key)));
    note("holder gives up", code(master.give_up(held)));
    note("holder gives up again", code(master.give_up(held)));
    note("an old key reads", seen(Cpus.rdmsr_with(0, msr, held.key)));
}

/// The holder at work: no global control, and RDPMC with a cookie.
fn hold(machine: &Discovery, key: Key) {
    let (counter, select) = (
        machine.msr(abi::MSR_COUNTER, N),
        machine.msr(abi::MSR_SELECT, N),
    );
    note("stop all", done(Cpus.wrmsr(0, GLOBAL_CONTROL, 0)));
    note(
        "holder starts",
        done(Cpus.wrmsr_with(0, select, CYCLES, key)),
    );
    let before = Cpus.rdmsr_with(0, counter, key);
    linger();
    let after = sys::rdpmc(abi::RDPMC_COOKIE + N, key.register());
    note("it counts", grew(before, after));
    note("holder stops", done(Cpus.wrmsr_with(0, select, 0, key)));
    for cpu in 0..2 {
        note(
            "holder writes",
            done(Cpus.wrmsr_with(cpu, counter, COUNT, key)),
        );
    }
    note(
        "holder's RDPMC",
        seen(sys::rdpmc(abi::RDPMC_COOKIE + N, key.register())),
    );
    let program = sys::user_rdpmc(abi::RDPMC_COOKIE + N, key.register());
    note("its program's RDPMC", seen(program));
    note("program's RDPMC", seen(sys::user_rdpmc(N, key.register())));
}
