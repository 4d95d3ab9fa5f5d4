//! Time in which nobody counted is never told as counted.

use super::rig::{Mail, Rig, Spot, context, register};
use super::shaky::{Hand, Shaky};
use super::truth::{EVENTS, clocks};
use perfmon_abi::consts as pfm;
use perfmon_abi::wire::{Call, Errno};
use perfmon_abi::{PmcArg, PmdArg};
use pmu_virt::perfmon::{HostAudit, HostEvent, HostPolicy, HostRecord};
use pmu_virt::{CounterBackend, Progress, Ring, SimBackend, Ticks, Tsc};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const CYCLES: u64 = EVENTS[0];
const MS: u64 = 1_000_000;
const TIMEOUT: u64 = 100_000;
const VCPU: Spot = Spot::Vcpu(0);

fn rig(slots: usize) -> Rig {
    let clocks = clocks(slots);
    let mut rig = Rig::new(
        (1, 1),
        HostPolicy::GuestFirst,
        || -> Box<dyn CounterBackend> { Box::new(SimBackend::of(&clocks)) },
    );
    rig.switch(0, 0);
    rig
}

fn run(rig: &mut Rig, ticks: u64) {
    let left = Progress::Left {
        tsc: Tsc(rig.tsc + ticks),
        halted: Ticks(0),
        ring: Some(Ring::User),
    };
    rig.run(0, 0, left);
}

fn guest_counts(rig: &mut Rig, counters: u32, event: u64) {
    for n in 0..counters {
        rig.write(0, 0xc001_0200 + 2 * n, event);
    }
}

/// PMC0 of a set counts cycles.
fn pmc(set: u16) -> PmcArg {
    PmcArg {
        set,
        value: CYCLES,
        ..PmcArg::default()
    }
}

fn write_pmd() -> Call {
    Call::WritePmds(vec![PmdArg::default()])
}

fn must(rig: &mut Rig, call: Call) {
    assert_eq!(rig.outcome(VCPU, call), Ok(()));
}

fn how(rig: &mut Rig, set: u16) -> u32 {
    rig.read(VCPU, set, 0).1
}

/// A started context with two sets that take turns and count on what the guest
/// leaves: it was loaded for less.
fn overdrawn() -> Rig {
    let mut rig = rig(6);
    let sets = context(0, &[vec![], vec![]], TIMEOUT);
    assert!(rig.load(VCPU, sets, &Mail::default()).is_ok());
    must(&mut rig, Call::WritePmcs(vec![pmc(0), pmc(1)]));
    must(&mut rig, Call::Start(None));
    rig
}

#[test]
fn each_set_is_told_what_it_misses() {
    let mut rig = overdrawn();
    run(&mut rig, TIMEOUT);
    run(&mut rig, TIMEOUT);
    let counted = pfm::PFM_PROV_SIMULATED;
    assert_eq!([how(&mut rig, 0), how(&mut rig, 1)], [counted; 2]);
    guest_counts(&mut rig, 6, CYCLES);
    run(&mut rig, TIMEOUT / 2);
    assert_eq!(how(&mut rig, 0), pfm::PFM_PROV_LOST);
    assert_eq!(how(&mut rig, 1), counted, "it was not its turn");
    run(&mut rig, TIMEOUT / 2);
    run(&mut rig, TIMEOUT / 2);
    assert_eq!(how(&mut rig, 1), pfm::PFM_PROV_LOST);
}

#[test]
fn what_is_written_while_it_is_missing_misses_too() {
    let mut rig = overdrawn();
    guest_counts(&mut rig, 6, CYCLES);
    run(&mut rig, 1_000);
    assert_eq!(how(&mut rig, 0), pfm::PFM_PROV_LOST);
    must(&mut rig, write_pmd());
    run(&mut rig, 1_000);
    guest_counts(&mut rig, 6, 0);
    run(&mut rig, 1_000);
    assert_eq!(how(&mut rig, 0), pfm::PFM_PROV_LOST);
    // Written once more, it is whole.
    must(&mut rig, write_pmd());
    run(&mut rig, 1_000);
    assert_eq!(how(&mut rig, 0), pfm::PFM_PROV_SIMULATED);
}

#[test]
fn what_is_started_or_written_while_preempted_misses_too() {
    let start_again = |rig: &mut Rig| {
        must(rig, Call::Stop);
        must(rig, write_pmd());
        must(rig, Call::Start(None));
    };
    let write = |rig: &mut Rig| must(rig, write_pmd());
    let meanwhile: [&dyn Fn(&mut Rig); 2] = [&start_again, &write];
    for act in meanwhile {
        let mut rig = rig(6);
        let mail = Mail::default();
        guest_counts(&mut rig, 5, CYCLES);
        let soft = context(pfm::PFM_FL_PREEMPTIBLE, &[vec![(0, CYCLES)]], 0);
        assert!(rig.load(VCPU, soft, &mail).is_ok());
        must(&mut rig, Call::Start(None));
        run(&mut rig, MS);
        guest_counts(&mut rig, 6, CYCLES);
        assert_eq!(mail.kinds(), [pfm::PFM_MSG_PREEMPTED]);
        act(&mut rig);
        run(&mut rig, MS);
        guest_counts(&mut rig, 6, 0);
        run(&mut rig, 2 * MS);
        assert_eq!(mail.kinds(), [pfm::PFM_MSG_RESTORED]);
        run(&mut rig, MS);
        let (value, how) = rig.read(VCPU, 0, 0);
        assert!(value > 0);
        assert_eq!(how, pfm::PFM_PROV_LOST);
    }
}

#[test]
fn a_source_that_failed_for_a_while_counts_again() {
    let (clocks, hand) = (clocks(8), Hand::default());
    let mut rig = Rig::new(
        (1, 1),
        HostPolicy::GuestFirst,
        || -> Box<dyn CounterBackend> {
            Box::new(Shaky::new(Box::new(SimBackend::of(&clocks)), hand.clone()))
        },
    );
    rig.switch(0, 0);
    let mail = Mail::default();
    let notifies = PmcArg {
        flags: pfm::PFM_REGFL_OVFL_NOTIFY,
        ..pmc(0)
    };
    let value = PmdArg {
        value: 10_000u64.wrapping_neg(),
        ..PmdArg::default()
    };
    assert!(rig.load(VCPU, context(0, &[vec![]], 0), &mail).is_ok());
    must(&mut rig, Call::WritePmcs(vec![notifies]));
    must(&mut rig, Call::WritePmds(vec![value]));
    must(&mut rig, Call::Start(None));
    // The overflow comes while nobody can tell the count.
    hand.fails.store(true, Ordering::Relaxed);
    run(&mut rig, MS);
    assert!(!rig.vcpus[0].has_host_overflow());
    // No command follows; it is found as soon as there is a count again.
    hand.fails.store(false, Ordering::Relaxed);
    run(&mut rig, MS);
    assert!(rig.vcpus[0].has_host_overflow());
    assert_eq!(how(&mut rig, 0), pfm::PFM_PROV_LOST);
}

#[test]
fn a_halted_vcpu_is_not_woken_for_each_turn_of_the_sets() {
    let mut rig = rig(8);
    let sets = context(0, &[vec![(0, CYCLES)], vec![(0, CYCLES)]], TIMEOUT);
    assert!(rig.load(VCPU, sets, &Mail::default()).is_ok());
    must(&mut rig, Call::Start(None));
    // Enters, is left at the deadline, and tells when that was.
    let enter = |rig: &mut Rig, halts: bool| {
        let entered = rig.tsc;
        let pmu = &mut rig.vcpus[0];
        pmu.observe(Progress::Entered { tsc: Tsc(entered) });
        let tsc = pmu.deadline().expect("the sets take turns");
        let halted = if halts { tsc - entered } else { 0 };
        let ring = Some(Ring::User);
        pmu.observe(Progress::Left {
            tsc: Tsc(tsc),
            halted: Ticks(halted),
            ring,
        });
        rig.tsc = tsc;
        tsc - entered
    };
    assert_eq!(enter(&mut rig, false), TIMEOUT);
    let idle: Vec<u64> = (0..10).map(|_| enter(&mut rig, true)).collect();
    let grown = [1, 2, 4, 8, 16, 32, 64, 100, 100, 100].map(|n| n * TIMEOUT);
    assert_eq!(idle, grown);
    // The first turn after that may be long, and is told as it was.
    assert_eq!(enter(&mut rig, false), 10 * MS);
    assert_eq!(enter(&mut rig, false), TIMEOUT);
}

#[derive(Clone, Debug, Default)]
struct Overdrafts(Arc<AtomicUsize>);

impl HostAudit for Overdrafts {
    fn record(&mut self, record: &HostRecord) {
        if record.event == HostEvent::Overdrawn {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn an_overdraft_is_told_once() {
    let told = Overdrafts::default();
    let mut rig = rig(7);
    rig.core(0, |core| core.set_host_audit(Box::new(told.clone())));
    let one = context(0, &[vec![(0, CYCLES)]], 0);
    assert!(rig.load(VCPU, one, &Mail::default()).is_ok());
    let write = |rig: &mut Rig, n: usize, value| {
        let num = register(n);
        let write = PmcArg {
            num,
            value,
            ..pmc(0)
        };
        must(rig, Call::WritePmcs(vec![write]));
    };
    // Counter, select; times that it was told by then.
    let table = [
        (1, CYCLES, 1),
        (1, CYCLES, 1),
        (2, CYCLES, 1),
        (2, 0, 1),
        (1, 0, 1),
        (1, CYCLES, 2),
    ];
    for (row, (n, value, times)) in table.into_iter().enumerate() {
        write(&mut rig, n, value);
        assert_eq!(told.0.load(Ordering::Relaxed), times, "row {row}");
    }
}

#[test]
fn a_write_that_demands_nothing_else_looks_at_nothing_else() {
    let (clocks, hand) = (clocks(16), Hand::default());
    let mut rig = Rig::new(
        (1, 1),
        HostPolicy::GuestFirst,
        || -> Box<dyn CounterBackend> {
            Box::new(Shaky::new(Box::new(SimBackend::of(&clocks)), hand.clone()))
        },
    );
    rig.switch(0, 0);
    let sets = vec![vec![(0, CYCLES), (1, CYCLES)]; 12];
    let many = context(0, &sets, TIMEOUT);
    assert!(rig.load(VCPU, many, &Mail::default()).is_ok());
    let asked = |rig: &mut Rig, value| {
        hand.asked.store(0, Ordering::Relaxed);
        let write = PmcArg { value, ..pmc(3) };
        must(rig, Call::WritePmcs(vec![write]));
        hand.asked.load(Ordering::Relaxed)
    };
    // The same, another event that the same counters count, none, one again.
    assert_eq!(asked(&mut rig, CYCLES), 0);
    assert!(asked(&mut rig, EVENTS[5]) <= 2);
    assert!(asked(&mut rig, 0) >= 23);
    assert!(asked(&mut rig, CYCLES) >= 24);
}

/// An event that nobody counts is refused when it is written on a core. Off a core it is
/// taken; from then on the context tells that nobody counts it. Writing it once more as
/// it is asks for nothing else, so it is taken and changes nothing about that.
#[test]
fn what_nobody_counts_stays_told_when_it_is_written_as_it_is() {
    const UNKNOWN: u64 = 0x43_00ff;
    let mut rig = rig(16);
    let counts = context(0, &[vec![(0, CYCLES)]], 0);
    assert!(rig.load(VCPU, counts, &Mail::default()).is_ok());
    must(&mut rig, Call::Start(None));
    let write = |value| Call::WritePmcs(vec![PmcArg { value, ..pmc(0) }]);
    assert_eq!(rig.outcome(VCPU, write(UNKNOWN)), Err(Errno::EINVAL));

    rig.clear(0);
    must(&mut rig, write(UNKNOWN));
    run(&mut rig, MS);
    assert_eq!(how(&mut rig, 0), pfm::PFM_PROV_LOST);
    must(&mut rig, write(UNKNOWN));
    run(&mut rig, MS);
    assert_eq!(how(&mut rig, 0), pfm::PFM_PROV_LOST);
    assert_eq!(rig.outcome(VCPU, write(UNKNOWN + 1)), Err(Errno::EINVAL));

    must(&mut rig, write(CYCLES));
    run(&mut rig, MS);
    assert!(rig.read(VCPU, 0, 0).0 > 0);
}

/// Drivers enable and disable their counters all the time, those of dead events too.
#[test]
fn a_core_is_asked_once_about_an_event_that_it_does_not_have() {
    const DEAD: u64 = 0x53_00ff;
    let (clocks, hand) = (clocks(16), Hand::default());
    let mut rig = Rig::new(
        (2, 2),
        HostPolicy::GuestFirst,
        || -> Box<dyn CounterBackend> {
            Box::new(Shaky::new(Box::new(SimBackend::of(&clocks)), hand.clone()))
        },
    );
    rig.switch(0, 0);
    let asked = |rig: &mut Rig, selects: &[u64]| {
        hand.asked.store(0, Ordering::Relaxed);
        for select in selects {
            rig.write(0, 0xc001_0200, *select);
            run(rig, MS);
        }
        hand.asked.load(Ordering::Relaxed)
    };
    let off = DEAD & !(1 << 22);
    assert_eq!(asked(&mut rig, &[DEAD, off, DEAD, off, DEAD, DEAD]), 1);
    assert_eq!(asked(&mut rig, &[DEAD + 1]), 1, "another event");
    assert_eq!(asked(&mut rig, &[CYCLES, CYCLES & !(1 << 22), CYCLES]), 1);
    assert!(rig.value(0, 0xc001_0201) > 0);
    assert_eq!(asked(&mut rig, &[DEAD]), 1);
    // Another core may have it.
    hand.asked.store(0, Ordering::Relaxed);
    rig.switch(0, 1);
    assert_eq!(hand.asked.load(Ordering::Relaxed), 1);
    // The same core has not got it meanwhile.
    rig.switch(1, 1);
    rig.switch(0, 1);
    assert_eq!(hand.asked.load(Ordering::Relaxed), 1);
}
