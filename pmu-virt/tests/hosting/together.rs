//! Overflows of contexts that wait for each other, so that one exit serves them.

use std::num::NonZeroU64;

use perfmon_abi::wire::Call;
use perfmon_abi::{PmcArg, PmdArg, consts as pfm};
use pmu_virt::perfmon::{Context, HostPolicy};
use pmu_virt::{
    ClockBackend, CountRequest, CounterBackend, EventCode, EventFamily, KnownEvent, Progress, Ring,
    SlotIndex, Ticks, Tsc,
};
use proptest::prelude::{prop_assert, proptest};

use super::rig::{Mail, Nothing, Rig, Spot, context, register};

/// Ticks of a millisecond.
const MS: u64 = 2_600_000;
const CYCLES: u64 = 0x43_0076;
/// The same with INT.
const CYCLES_INT: u64 = 0x53_0076;
const EVENT_SELECT: u32 = 0xc001_0000;
const COUNTER: u32 = 0xc001_0004;

fn left(tsc: u64) -> Progress {
    Progress::Left {
        tsc: Tsc(tsc),
        halted: Ticks(0),
        ring: Some(Ring::User),
    }
}

/// A clock that is left when it asks for it, and armed anew at each overflow.
struct Sampled {
    clock: ClockBackend,
    now: u64,
    /// Of each slot; `false`: it may not wait.
    slots: Vec<(u64, bool)>,
}

impl Sampled {
    /// Slots in turn count both rings and one; none overflows with another at first.
    fn new(slots: Vec<(u64, bool)>) -> Self {
        let cycles = EventCode::of(EventFamily::Intel, KnownEvent::CoreCycles).expect("cycles");
        let parts = u64::try_from(slots.len()).expect("few");
        let mut clock = ClockBackend::new();
        for (slot, n) in (0..slots.len()).map(|n| (slot(n), n)) {
            let request = CountRequest::plain(cycles, n % 2 == 0, true);
            clock.program(slot, &request).expect("cycles are counted");
            clock.start(slot);
        }
        let mut sampled = Sampled {
            clock,
            now: 0,
            slots,
        };
        for n in 0..sampled.slots.len() {
            let period = sampled.slots[n].0;
            sampled.arm(n, period + period / parts * u64::try_from(n).expect("few"));
        }
        sampled
    }

    fn arm(&mut self, n: usize, after: u64) {
        let after = NonZeroU64::new(after);
        if self.slots[n].1 {
            self.clock.arm_about(slot(n), after);
        } else {
            self.clock.arm(slot(n), after);
        }
    }

    /// One exit, so late: which slots have overflowed.
    fn exit(&mut self, late: u64) -> Vec<usize> {
        let entered = self.now;
        self.clock.observe(&Progress::Entered { tsc: Tsc(entered) });
        let due = self.clock.deadline().expect("an overflow is armed");
        assert!(due.0 > entered);
        self.now = due.0 + late;
        self.clock.observe(&left(self.now));
        let told = self.clock.take_overflows();
        let told: Vec<usize> = told.iter().map(|slot| usize::from(slot.0)).collect();
        for n in &told {
            self.arm(*n, self.slots[*n].0);
        }
        told
    }
}

fn slot(n: usize) -> SlotIndex {
    SlotIndex(u8::try_from(n).expect("few"))
}

#[test]
fn counters_of_one_period_come_together() {
    for (period, late) in [(MS, 0), (MS, MS / 20), (MS / 10, 0), (MS / 10, MS / 100)] {
        let mut sampled = Sampled::new(vec![(period, true); 6]);
        while sampled.now < 40 * period {
            sampled.exit(late);
        }
        let (begun, mut exits) = (sampled.now, 0);
        while sampled.now < begun + 20 * period {
            assert_eq!(sampled.exit(late).len(), 6, "of {period}, late by {late}");
            exits += 1;
        }
        let expected = (20 * period).div_ceil(period + late);
        assert_eq!(exits, expected, "of {period}, late by {late}");
    }
}

#[test]
fn counters_that_may_not_wait_do_not() {
    let mut sampled = Sampled::new(vec![(MS / 4, false); 3]);
    for exit in 0..300 {
        assert_eq!(sampled.exit(0).len(), 1, "exit {exit}");
    }
}

proptest! {
    /// Whatever the periods are: an overflow comes neither early nor, over its whole time,
    /// late by more than a 32nd; that of who may not wait comes at its tick.
    #[test]
    fn none_waits_for_long(
        slots in proptest::collection::vec((10_000u64..9 * MS, proptest::bool::ANY), 1..6),
    ) {
        let mut sampled = Sampled::new(slots.clone());
        let parts = u64::try_from(slots.len()).expect("few");
        let mut due: Vec<u64> = (0..parts)
            .zip(&slots)
            .map(|(n, (period, _))| period + period / parts * n)
            .collect();
        let mut waited = vec![0; slots.len()];
        for _ in 0..400 {
            let told = sampled.exit(0);
            for (n, (period, may_wait)) in slots.iter().enumerate() {
                prop_assert!(told.contains(&n) == (due[n] <= sampled.now));
                if due[n] <= sampled.now {
                    let late = sampled.now - due[n];
                    waited[n] += late;
                    prop_assert!(*may_wait || late == 0);
                    prop_assert!(late <= period.div_ceil(2) && late <= 2_500_000);
                    prop_assert!(waited[n] <= sampled.now / 32);
                    due[n] = sampled.now + period;
                }
            }
        }
    }
}

/// Counters of a context, with what each has left before its overflow.
fn periods(left: &[u64]) -> Call {
    let pmd = |(n, left): (usize, &u64)| PmdArg {
        num: register(n),
        value: left.wrapping_neg(),
        long_reset: MS.wrapping_neg(),
        short_reset: MS.wrapping_neg(),
        ..PmdArg::default()
    };
    Call::WritePmds(left.iter().enumerate().map(pmd).collect())
}

fn notifying() -> Context {
    let mut context = context(0, &[vec![]], 0);
    let pmc = |n| PmcArg {
        num: register(n),
        value: CYCLES,
        flags: pfm::PFM_REGFL_OVFL_NOTIFY,
        ..PmcArg::default()
    };
    let mut call = Call::WritePmcs(vec![pmc(0), pmc(1)]);
    let done = context.call(&mut call, &Nothing);
    assert_eq!(done, Ok(()));
    context
}

#[test]
fn a_context_waits_and_the_guest_does_not() {
    let mut rig = Rig::new((1, 1), HostPolicy::GuestFirst, || {
        Box::new(ClockBackend::new())
    });
    rig.switch(0, 0);
    let vcpu = Spot::Vcpu(0);
    assert!(rig.load(vcpu, notifying(), &Mail::default()).is_ok());
    assert_eq!(rig.outcome(vcpu, periods(&[10 * MS, 10 * MS])), Ok(()));
    assert_eq!(rig.outcome(vcpu, Call::Start(None)), Ok(()));
    let now = rig.tsc + 4 * MS;
    rig.run(0, 0, left(now));
    let due = |rig: &mut Rig| {
        let tsc = rig.tsc;
        let pmu = rig.switch(0, 0);
        pmu.observe(Progress::Entered { tsc: Tsc(tsc) });
        let due = pmu.deadline().expect("an overflow is armed") - tsc;
        pmu.observe(left(tsc));
        due
    };
    // By 4 ms an eighth of one was earned.
    for (second, expected) in [
        (1_000_000 + MS / 8, 1_000_000 + MS / 8),
        (1_001_000 + MS / 8, 1_000_000),
    ] {
        assert_eq!(rig.outcome(vcpu, periods(&[1_000_000, second])), Ok(()));
        assert_eq!(due(&mut rig), expected);
    }
    assert_eq!(rig.outcome(vcpu, periods(&[1_000_000, 1_100_000])), Ok(()));
    assert_eq!(due(&mut rig), 1_100_000);
    // One of the guest's in between is on time, and one before is not waited for.
    for guest in [1_050_000_u64, 900_000] {
        rig.write(0, EVENT_SELECT, 0);
        rig.write(0, COUNTER, (1 << 48) - guest);
        rig.write(0, EVENT_SELECT, CYCLES_INT);
        assert_eq!(due(&mut rig), guest);
    }
}
