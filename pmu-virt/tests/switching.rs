//! vCPUs that share cores against vCPUs that have all counters of the world.

use std::num::NonZeroU64;

use pmu_virt::{
    CorePmu, CounterBackend, Grant, MsrIndex, Oversubscribe, OwnerId, PmuModel, Progress,
    ReadOutcome, Reading, Ticks, Tsc,
};
use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, prop_assert, prop_assert_eq, proptest};

use crate::seated::Seated;

use crate::limited::Limited;
use crate::schedules::{Host, KERNEL, amd, check_schedule, intel, turn};

fn clock_of(slots: usize) -> impl Fn() -> Box<dyn CounterBackend> {
    move || Box::new(Limited::clock(slots))
}

fn hardware_of(slots: usize) -> impl Fn() -> Box<dyn CounterBackend> {
    move || Box::new(Limited::clock(slots).shared())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn amd_counts_never_leak(slots in 6usize..13, turns in vec(turn(&amd()), 0..60)) {
        check_schedule(amd().spec, clock_of(slots), clock_of(64), &turns)?;
    }

    #[test]
    fn counts_never_leak_through_a_counter_that_goes_on(
        slots in 6usize..13,
        turns in vec(turn(&amd()), 0..60),
    ) {
        check_schedule(amd().spec, hardware_of(slots), clock_of(64), &turns)?;
    }

    #[test]
    fn intel_counts_never_leak(slots in 7usize..13, turns in vec(turn(&intel()), 0..60)) {
        check_schedule(intel().spec, clock_of(slots), clock_of(64), &turns)?;
    }

    /// A clock counts one event a tick: whatever a counter has waited for is
    /// known, so an estimate that is off by more than what is still unsettled
    /// is wrong.
    #[test]
    fn turns_estimate_a_steady_rate_exactly(
        slots in 1usize..6,
        wanted in 1usize..7,
        runs in vec((1u64..3_000, 0usize..6), 1..60),
    ) {
        let model = PmuModel::parse("amd-core").expect("a model");
        let turn = NonZeroU64::new(1_000).expect("not zero");
        let mut pmu = Seated::detached(OwnerId(0), model, Grant::everything())
            .with_oversubscription(Oversubscribe::Multiplex { timeslice: turn });
        pmu.attach(Box::new(CorePmu::new(clock_of(slots)())));
        for n in (0..).take(wanted) {
            pmu.wrmsr(MsrIndex(0xc001_0200 + 2 * n), 0x43_0076, KERNEL);
        }
        let (mut tsc, mut passed) = (0, 0);
        let mut last = vec![0; wanted];
        for (ticks, read) in runs {
            pmu.observe(Progress::Entered { tsc: Tsc(tsc) });
            let deadline = pmu.deadline();
            prop_assert!(wanted <= slots || deadline.is_some_and(|at| at <= tsc + 1_000));
            tsc += ticks;
            passed += ticks;
            pmu.observe(Progress::Left { tsc: Tsc(tsc), halted: Ticks(0), ring: None });
            let n = read % wanted;
            let ReadOutcome::Value(count) = pmu.rdpmc(u32::try_from(n).expect("small"), KERNEL)
            else {
                panic!("no count");
            };
            prop_assert!(count <= passed, "{count} of {passed}");
            prop_assert!(count >= last[n], "it fell from {} to {count}", last[n]);
            last[n] = count;
            for report in pmu.report() {
                prop_assert_eq!(report.time_enabled.0, passed);
                prop_assert!(report.time_running.0 <= passed);
                if wanted <= slots {
                    prop_assert_eq!(report.time_running.0, passed);
                }
            }
        }
        let reports = pmu.report();
        prop_assert_eq!(reports.len(), wanted);
        let running: usize = reports.iter().filter(|report| report.running).count();
        prop_assert_eq!(running, wanted.min(slots));
        for report in reports {
            // A counter that runs now was settled up to its last turn at least.
            if let Reading::Counted { value, .. } = report.reading {
                prop_assert!(value <= passed);
            } else {
                prop_assert_eq!(report.time_running.0, 0);
            }
        }
    }
}

fn reference_cycles(pmu: &mut Seated, number: u32) {
    for n in 0..number {
        pmu.wrmsr(MsrIndex(0xc001_0200 + 2 * n), 0x43_0076, KERNEL);
    }
}

#[test]
fn switches_touch_only_what_they_must() {
    let mut host = Host::new("amd-core", clock_of(6));
    // Nobody counts: nothing is touched.
    for vcpu in [0, 1, 2, 0, 1, 2] {
        host.switch(vcpu, 0);
    }
    let stats = |host: &mut Host, vcpu| host.switch(vcpu, 0).core().expect("a core").stats();
    assert_eq!(stats(&mut host, 2).operations, 0);
    // One counts; others come and go: one stop and one start for each return.
    reference_cycles(host.switch(0, 0), 4);
    let before = stats(&mut host, 0);
    host.switch(1, 0);
    host.switch(2, 0);
    let after = stats(&mut host, 0);
    assert_eq!(after.operations - before.operations, 2);
    assert_eq!(after.restored, before.restored);
    assert_eq!(after.in_place - before.in_place, 4);
    // The same one again without anybody in between: nothing at all.
    host.clear(0);
    assert_eq!(stats(&mut host, 0).operations, after.operations);
}

#[test]
fn a_counter_that_counts_the_same_is_read_and_goes_on() {
    let mut host = Host::new("amd-core", hardware_of(4));
    for vcpu in [0, 1] {
        reference_cycles(host.switch(vcpu, 0), 4);
        let pmu = host.switch(vcpu, 0);
        pmu.observe(Progress::Entered { tsc: Tsc(0) });
        pmu.observe(Progress::Left {
            tsc: Tsc(100),
            halted: Ticks(0),
            ring: None,
        });
    }
    let stats = |host: &mut Host, vcpu| host.switch(vcpu, 0).core().expect("a core").stats();
    let before = stats(&mut host, 1);
    let after = stats(&mut host, 0);
    // One stop, four counts, one start, and nothing programmed.
    assert_eq!(after.operations - before.operations, 6);
    assert_eq!(after.restored, before.restored);
    assert_eq!(host.switch(0, 0).rdpmc(3, KERNEL), ReadOutcome::Value(100));
}

#[test]
fn an_overflow_that_is_told_at_the_switch_reaches_its_vcpu() {
    for evicted in [false, true] {
        let mut host = Host::new("amd-core", || Box::new(Limited::late_clock(1)));
        let first = host.switch(0, 0);
        first.wrmsr(MsrIndex(0xc001_0200), 0x53_0076, KERNEL);
        first.wrmsr(MsrIndex(0xc001_0201), (1 << 48) - 50, KERNEL);
        first.observe(Progress::Entered { tsc: Tsc(0) });
        first.observe(Progress::Left {
            tsc: Tsc(60),
            halted: Ticks(0),
            ring: None,
        });
        let second = host.switch(1, 0);
        if evicted {
            second.wrmsr(MsrIndex(0xc001_0200), 0x53_0076, KERNEL);
        }
        assert_eq!(second.take_pmi(), None);
        let first = host.switch(0, 0);
        assert!(first.take_pmi().is_some(), "evicted: {evicted}");
        assert_eq!(first.rdpmc(0, KERNEL), ReadOutcome::Value(10));
    }
}

#[test]
fn an_overflow_found_after_eviction_leaves_the_place_s_next_counter_alone() {
    let spend = |pmu: &mut Seated, tsc, ticks| {
        pmu.observe(Progress::Entered { tsc: Tsc(tsc) });
        pmu.observe(Progress::Left {
            tsc: Tsc(tsc + ticks),
            halted: Ticks(0),
            ring: None,
        });
    };
    let mut host = Host::new("amd-core", clock_of(2));
    // It wraps without INT, so nobody has settled it when it makes room.
    let first = host.switch(0, 0);
    first.wrmsr(MsrIndex(0xc001_0201), (1 << 48) - 50, KERNEL);
    first.wrmsr(MsrIndex(0xc001_0200), 0x43_0076, KERNEL);
    spend(first, 0, 60);
    // The second vCPU's sampling counter takes that slot, and frees the other.
    let second = host.switch(1, 0);
    second.wrmsr(MsrIndex(0xc001_0200), 0x43_0076, KERNEL);
    second.wrmsr(MsrIndex(0xc001_0203), (1 << 48) - 100, KERNEL);
    second.wrmsr(MsrIndex(0xc001_0202), 0x53_0076, KERNEL);
    second.wrmsr(MsrIndex(0xc001_0200), 0, KERNEL);
    let first = host.switch(0, 0);
    assert_eq!(first.rdpmc(0, KERNEL), ReadOutcome::Value(10));
    assert_eq!(first.take_pmi(), None);
    let second = host.switch(1, 0);
    spend(second, 100, 150);
    assert!(second.take_pmi().is_some(), "its overflow was taken back");
}

#[test]
fn a_counter_that_was_refused_takes_no_place_from_one_that_had_it() {
    for migrates in [false, true] {
        let mut host = Host::new("amd-core", clock_of(1));
        let first = host.switch(0, 0);
        first.wrmsr(MsrIndex(0xc001_0202), 0x43_0076, KERNEL);
        first.wrmsr(MsrIndex(0xc001_0200), 0x43_0076, KERNEL);
        let placed = |pmu: &Seated| -> Vec<bool> {
            pmu.report().iter().map(|report| report.running).collect()
        };
        assert_eq!(placed(first), [false, true]);
        reference_cycles(host.switch(1, 0), 1);
        let first = host.switch(0, usize::from(migrates));
        assert_eq!(placed(first), [false, true], "migrates: {migrates}");
    }
}

#[test]
fn waiting_counters_get_their_turns() {
    let model = PmuModel::parse("amd-core").expect("a model");
    let turn = NonZeroU64::new(100).expect("not zero");
    let mut pmu = Seated::detached(OwnerId(0), model, Grant::everything())
        .with_oversubscription(Oversubscribe::Multiplex { timeslice: turn });
    pmu.attach(Box::new(CorePmu::new(clock_of(2)())));
    reference_cycles(&mut pmu, 6);
    for slice in 0..60 {
        pmu.observe(Progress::Entered {
            tsc: Tsc(slice * 100),
        });
        pmu.observe(Progress::Left {
            tsc: Tsc(slice * 100 + 100),
            halted: Ticks(0),
            ring: None,
        });
    }
    for report in pmu.report() {
        assert_eq!(report.time_enabled.0, 6_000);
        assert_eq!(report.time_running.0, 2_000, "{report:?}");
        let Reading::Counted { value, provenance } = report.reading else {
            panic!("{report:?}");
        };
        assert_eq!(provenance, pmu_virt::Provenance::Scaled);
        assert!((5_500..=6_000).contains(&value), "{value}");
    }
}
