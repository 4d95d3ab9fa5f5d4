//! The guest may use fewer counters at a time than it has.

use arbiter::{CounterId, Outcome, PerKind};
use perfmon_abi::wire::Errno;
use pmu_virt::perfmon::{AttachedContext, ContextId, HostPolicy};
use pmu_virt::{
    Caller, CorePmu, CounterBackend, Grant, Layer, MsrIndex, Oversubscribe, OwnerId, PmuModel,
    Progress, ReadOutcome, Reading, Ring, SimBackend, Ticks, Tsc, UnavailableReason, WriteOutcome,
};
use proptest::prelude::{Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest};

use super::reserved::{kernel_reserves, rig, with_reservations};
use super::rig::{KERNEL, Mail, Spot, context};
use super::truth::{EVENTS, KHZ, clocks};
use crate::seated::Seated;

const ON: u64 = EVENTS[0] | 1 << 22;
/// Ticks of the TSC in a millisecond.
const MS: u64 = 1_000_000;

fn programmable(most: u8) -> PerKind {
    PerKind {
        programmable: most,
        ..PerKind::ALL
    }
}

/// The kernel's six counters on a core that has them all.
fn pmu(answer: Oversubscribe) -> Seated {
    let model = PmuModel::parse("amd-core").expect("a model");
    let grant = Grant::everything().at_most(programmable(2));
    let pmu = Seated::detached(OwnerId(0), model, grant).with_oversubscription(answer);
    let mut pmu = with_reservations(pmu);
    let backend: Box<dyn CounterBackend> = Box::new(SimBackend::of(&clocks(6)));
    pmu.attach(Box::new(CorePmu::new(backend)));
    pmu
}

fn select(pmu: &mut Seated, n: u32, value: u64) {
    let written = pmu.wrmsr(MsrIndex(0xc001_0200 + 2 * n), value, KERNEL);
    assert_eq!(written, WriteOutcome::Done);
}

fn run(pmu: &mut Seated, now: &mut u64, ticks: u64) {
    pmu.observe(Progress::Entered { tsc: Tsc(*now) });
    *now += ticks;
    pmu.observe(Progress::Left {
        tsc: Tsc(*now),
        halted: Ticks(0),
        ring: Some(Ring::Kernel),
    });
}

/// The counters that count.
fn counting(pmu: &Seated) -> Vec<CounterId> {
    let report = pmu.report();
    let running = report.iter().filter(|one| one.running);
    running.map(|one| one.counter).collect()
}

fn pmcs(numbers: &[u8]) -> Vec<CounterId> {
    numbers
        .iter()
        .copied()
        .map(CounterId::Programmable)
        .collect()
}

/// What a counter says that does not count.
fn refused(pmu: &Seated, n: u8) -> Option<UnavailableReason> {
    let counter = CounterId::Programmable(n);
    let report = pmu.report();
    let one = report.iter().find(|one| one.counter == counter)?;
    match one.reading {
        Reading::Unavailable(reason) => Some(reason),
        Reading::Counted { .. } => None,
    }
}

#[test]
fn what_is_too_many_stands_still_and_goes_on_where_it_can() {
    let mut pmu = pmu(Oversubscribe::Refuse);
    let mut now = 0;
    for n in 0..4 {
        select(&mut pmu, n, ON);
    }
    run(&mut pmu, &mut now, 1_000);
    assert_eq!(counting(&pmu), pmcs(&[0, 1]));
    for n in [2, 3] {
        assert_eq!(
            refused(&pmu, n),
            Some(UnavailableReason::Budget { most: 2 })
        );
        // Its register is there all the same, as announced.
        let read = pmu.rdpmc(u32::from(n), KERNEL);
        assert_eq!(read, ReadOutcome::Value(0));
    }
    // Who stops makes room for the next one.
    select(&mut pmu, 0, 0);
    run(&mut pmu, &mut now, 1_000);
    assert_eq!(counting(&pmu), pmcs(&[1, 2]));
    // And the one that comes back waits.
    select(&mut pmu, 0, ON);
    run(&mut pmu, &mut now, 1_000);
    assert_eq!(counting(&pmu), pmcs(&[1, 2]));
    // More: what waited is placed.
    assert_eq!(pmu.set_budget(programmable(3), 0, None), Ok(()));
    assert_eq!(counting(&pmu).len(), 3);
    assert_eq!(pmu.set_budget(PerKind::ALL, 0, None), Ok(()));
    assert_eq!(counting(&pmu), pmcs(&[0, 1, 2, 3]));
    // Less, while they count: what was counted stays.
    run(&mut pmu, &mut now, 1_000);
    let counted: Vec<_> = (0..4).map(|n| pmu.rdpmc(n, KERNEL)).collect();
    assert_eq!(pmu.set_budget(programmable(0), 0, None), Ok(()));
    assert!(counting(&pmu).is_empty());
    run(&mut pmu, &mut now, 1_000);
    let after: Vec<_> = (0..4).map(|n| pmu.rdpmc(n, KERNEL)).collect();
    assert_eq!(counted, after);
    assert_eq!(pmu.claims().budget().generation, 3);
    // Away from its core as well.
    let core = pmu.park();
    assert_eq!(pmu.set_budget(programmable(1), 0, None), Ok(()));
    assert!(counting(&pmu).is_empty());
    pmu.attach(core.expect("it was on one"));
    assert_eq!(counting(&pmu).len(), 1);
}

#[test]
fn where_counters_take_turns_they_do_so_within_the_budget() {
    let timeslice = std::num::NonZeroU64::new(1_000).expect("not zero");
    let mut pmu = pmu(Oversubscribe::Multiplex { timeslice });
    let mut now = 0;
    for n in 0..5 {
        select(&mut pmu, n, ON);
    }
    for _ in 0..200 {
        run(&mut pmu, &mut now, 700);
        assert_eq!(counting(&pmu).len(), 2);
    }
    let report = pmu.report();
    for one in &report {
        let share = one.time_running.0 as f64 / one.time_enabled.0 as f64;
        assert!((0.3..0.5).contains(&share), "{share}: {one:?}");
    }
    // No turns where there is nothing to take turns on: that is no time to be scaled.
    assert_eq!(pmu.set_budget(programmable(0), 0, None), Ok(()));
    assert_eq!(
        refused(&pmu, 0),
        Some(UnavailableReason::Budget { most: 0 })
    );
    let before: Vec<_> = (0..5).map(|n| pmu.rdpmc(n, KERNEL)).collect();
    pmu.observe(Progress::Entered { tsc: Tsc(now) });
    assert_eq!(pmu.deadline(), None, "there are no turns");
    run(&mut pmu, &mut now, 1_000_000);
    assert_eq!(pmu.set_budget(PerKind::ALL, 0, None), Ok(()));
    assert_eq!(counting(&pmu).len(), 5);
    pmu.observe(Progress::Entered { tsc: Tsc(now) });
    assert_eq!(pmu.deadline(), None, "nobody takes turns any more");
    let after: Vec<_> = (0..5).map(|n| pmu.rdpmc(n, KERNEL)).collect();
    assert_eq!(before, after, "what stood still made no events up");
}

/// A core knows whose guest is there before it takes contexts at all: the first is promised no
/// more than that leaves.
#[test]
fn a_core_that_begins_to_take_contexts_keeps_room_for_who_is_there() {
    let model = PmuModel::parse("amd-core").expect("a model");
    let backend = Box::new(SimBackend::of(&clocks(6)));
    let mut pmu = Seated::new(model, backend, Grant::everything());
    let context = context(0, &[vec![(0, EVENTS[0])]], 0);
    let mail = Box::new(Mail::default());
    let hosted = AttachedContext::new(ContextId(1), Box::new(context), mail);
    let loaded = pmu.with_core(|core| {
        core.enable_hosting(HostPolicy::GuestFirst, KHZ);
        core.load_context(hosted, 0)
    });
    let refused = loaded.expect("a core").map_err(|not| not.refusal.errno);
    assert_eq!(refused, Err(Errno::EBUSY));
}

/// Two vCPUs of one core: what one may have is no room of the other's.
#[test]
fn a_core_keeps_room_for_the_vcpu_that_wants_most() {
    let clocks = clocks(6);
    let backend = || -> Box<dyn CounterBackend> { Box::new(SimBackend::of(&clocks)) };
    let mut rig = super::rig::Rig::new((2, 1), HostPolicy::GuestFirst, backend);
    for vcpu in [0, 1] {
        rig.switch(vcpu, 0);
        assert_eq!(rig.vcpus[vcpu].set_budget(programmable(1), 0, None), Ok(()));
    }
    let two = || context(0, &[vec![(0, EVENTS[0]), (1, EVENTS[4])]], 0);
    assert!(rig.load(Spot::Core(0), two(), &Mail::default()).is_ok());
    // Both may have four beside it, one after the other.
    for vcpu in [0, 1] {
        rig.switch(vcpu, 0);
        assert_eq!(rig.vcpus[vcpu].set_budget(programmable(4), 0, None), Ok(()));
        let more = rig.vcpus[vcpu].set_budget(programmable(5), 0, None);
        assert!(more.is_err(), "{vcpu}");
    }
    // The last one to be told is not the one that counts.
    assert_eq!(rig.vcpus[1].set_budget(programmable(0), 0, None), Ok(()));
    assert!(rig.load(Spot::Core(0), two(), &Mail::default()).is_err());
}

#[test]
fn what_is_reserved_goes_last_and_after_notice() {
    let mut pmu = pmu(Oversubscribe::Refuse);
    let mut now = 0;
    let granted = kernel_reserves(&mut pmu, 5);
    assert!(matches!(granted, Outcome::Granted(_)), "{granted:?}");
    let owner = Caller {
        layer: Layer::GuestKernel,
        presented: 7,
    };
    let alias = MsrIndex(0x554d_6140 + 5);
    assert_eq!(pmu.wrmsr(alias, ON, owner), WriteOutcome::Done);
    for n in [0, 1] {
        select(&mut pmu, n, ON);
    }
    run(&mut pmu, &mut now, MS);
    assert_eq!(counting(&pmu), pmcs(&[0, 5]));
    assert_eq!(pmu.set_budget(programmable(1), 10, None), Ok(()));
    assert_eq!(counting(&pmu), pmcs(&[5]));
    let refusal = kernel_reserves(&mut pmu, 4);
    assert_eq!(refusal, Outcome::Refused(arbiter::Reason::Unbacked));
    assert_eq!(pmu.set_budget(programmable(0), 10, None), Ok(()));
    for _ in 0..9 {
        run(&mut pmu, &mut now, MS);
        assert_eq!(counting(&pmu), pmcs(&[5]), "its notice is not over");
    }
    let report = pmu.report();
    let reserved = report.last().expect("it is in use");
    assert_eq!(reserved.time_enabled, reserved.time_running);
    run(&mut pmu, &mut now, 2 * MS);
    assert!(counting(&pmu).is_empty());
    let held = pmu.claims().unit().map(|unit| unit.bank().held());
    assert!(held.is_some_and(|held| held.is_empty()));
}

#[test]
fn a_budget_for_a_time_ends() {
    let mut pmu = pmu(Oversubscribe::Refuse);
    let mut now = 0;
    for n in 0..3 {
        select(&mut pmu, n, ON);
    }
    run(&mut pmu, &mut now, MS);
    let until = now + 3 * MS;
    assert_eq!(pmu.set_budget(programmable(0), 0, Some(until)), Ok(()));
    pmu.observe(Progress::Entered { tsc: Tsc(now) });
    assert_eq!(pmu.deadline(), Some(until), "the guest is left for it");
    run(&mut pmu, &mut now, MS);
    assert!(counting(&pmu).is_empty());
    // One for a time after another: what comes back is what lasted.
    let until = now + 5 * MS;
    assert_eq!(pmu.set_budget(PerKind::ALL, 0, Some(until)), Ok(()));
    assert_eq!(counting(&pmu).len(), 3);
    // A halted vCPU is ticked.
    pmu.tick(until);
    assert_eq!(counting(&pmu), pmcs(&[0, 1]));
    assert_eq!(pmu.claims().budget().until, None);
}

#[test]
fn what_a_guest_gives_up_contexts_have_and_keep() {
    let mut rig = rig(HostPolicy::GuestFirst);
    let three = || {
        context(
            0,
            &[vec![(0, EVENTS[0]), (1, EVENTS[4]), (2, EVENTS[1])]],
            0,
        )
    };
    let refused = rig.load(Spot::Vcpu(0), three(), &Mail::default());
    assert!(refused.is_err(), "all four are the guest's");
    assert_eq!(rig.vcpus[0].set_budget(programmable(1), 0, None), Ok(()));
    assert!(rig.load(Spot::Vcpu(0), three(), &Mail::default()).is_ok());
    let vcpu = &mut rig.vcpus[0];
    let refusal = vcpu.set_budget(programmable(2), 0, None);
    let refusal = refusal.expect_err("a context relies on it");
    assert_eq!(refusal.errno, Errno::EBUSY);
    assert_eq!(vcpu.claims().budget().most().programmable, 1);
    assert!(rig.unload(Spot::Vcpu(0)).is_some());
    assert_eq!(rig.vcpus[0].set_budget(programmable(2), 0, None), Ok(()));
    // What comes back by itself is nobody else's meanwhile.
    let until = Some(1_000 * MS);
    assert_eq!(rig.vcpus[0].set_budget(programmable(0), 0, until), Ok(()));
    assert!(rig.load(Spot::Vcpu(0), three(), &Mail::default()).is_err());
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Select(u32, bool),
    Run(u64),
    /// On its core, or while it is away.
    Budget(u8, bool),
    Reserve(u8),
    Park,
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u32..6, proptest::bool::ANY).prop_map(|(n, on)| Step::Select(n, on)),
        4 => (1u64..3_000).prop_map(Step::Run),
        2 => (0u8..8, proptest::bool::ANY).prop_map(|(most, away)| Step::Budget(most, away)),
        1 => (0u8..6).prop_map(Step::Reserve),
        1 => proptest::strategy::Just(Step::Park),
    ]
}

proptest! {
    /// Never more than the budget, and as many as it allows; no access faults.
    #[test]
    fn a_guest_uses_what_it_may(
        steps in proptest::collection::vec(steps(), 1..60),
        turns in proptest::bool::ANY,
    ) {
        let timeslice = std::num::NonZeroU64::new(1_000).expect("not zero");
        let mut pmu = pmu(if turns {
            Oversubscribe::Multiplex { timeslice }
        } else {
            Oversubscribe::Refuse
        });
        let (mut now, mut most, mut on, mut reserved) = (0, 2, [false; 6], [false; 6]);
        for step in steps {
            match step {
                // The kernel cannot reach what is reserved by its legacy name.
                Step::Select(n, _) if reserved[n as usize] => {}
                Step::Select(n, is_on) => {
                    select(&mut pmu, n, if is_on { ON } else { 0 });
                    on[n as usize] = is_on;
                }
                Step::Run(ticks) => run(&mut pmu, &mut now, ticks),
                Step::Budget(to, away) => {
                    let held = reserved.iter().filter(|one| **one).count();
                    let core = away.then(|| pmu.park().expect("it is on one"));
                    // What is reserved is taken at once.
                    prop_assert_eq!(pmu.set_budget(programmable(to), 0, None), Ok(()));
                    core.into_iter().for_each(|core| pmu.attach(core));
                    most = usize::from(to);
                    if held > most {
                        let unit = pmu.claims().unit().expect("there are some");
                        let held = unit.bank().held();
                        for n in 0..6u8 {
                            let is = held.contains(CounterId::Programmable(n));
                            let n = usize::from(n);
                            on[n] &= is || !reserved[n];
                            reserved[n] = is;
                        }
                    }
                }
                Step::Reserve(n) => {
                    let held = reserved.iter().filter(|one| **one).count();
                    let granted = kernel_reserves(&mut pmu, n);
                    let n = usize::from(n);
                    if let Outcome::Granted(_) = granted {
                        prop_assert!(held < most || reserved[n]);
                        // It begins anew.
                        on[n] &= reserved[n];
                        reserved[n] = true;
                    }
                }
                Step::Park => {
                    let core = pmu.park().expect("it is on one");
                    pmu.attach(core);
                }
            }
            let wanted = on.iter().filter(|one| **one).count();
            prop_assert_eq!(counting(&pmu).len(), wanted.min(most), "{:?}", step);
            for n in 0..6 {
                prop_assert!(matches!(pmu.rdpmc(n, KERNEL), ReadOutcome::Value(_)));
            }
        }
    }
}
