//! vCPUs that share cores against vCPUs that have all counters of the world.

use pmu_virt::{
    CorePmu, CounterBackend, Grant, Layer, MsrIndex, Oversubscribe, OwnerId, PmuModel, Progress,
    ReadOutcome, Reading, Ring, VcpuPmu, WriteOutcome,
};
use proptest::collection::vec;
use proptest::prelude::{
    ProptestConfig, Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use proptest::sample::select;
use std::num::NonZeroU64;

mod limited;

use limited::Limited;

const KERNEL: Layer = Layer::GuestKernel;
const VCPUS: usize = 4;
const CORES: usize = 2;

#[derive(Clone, Debug)]
enum Access {
    Write(u32, u64),
    Read(u32),
    Pmi,
}

/// A vCPU runs on a core for a while, and then its guest has the floor.
#[derive(Clone, Debug)]
struct Turn {
    vcpu: usize,
    core: usize,
    ring: Ring,
    ticks: u64,
    accesses: Vec<Access>,
}

/// What the accesses of a model can be about.
struct Registers {
    spec: &'static str,
    selects: Vec<u32>,
    counters: Vec<u32>,
    others: Vec<(u32, Vec<u64>)>,
    events: Vec<u64>,
}

fn amd() -> Registers {
    Registers {
        spec: "amd-core",
        selects: (0..6).map(|n| 0xc001_0200 + 2 * n).collect(),
        counters: (0..6).map(|n| 0xc001_0201 + 2 * n).collect(),
        others: vec![],
        events: vec![0, 0x43_0076, 0x53_0076, 0x41_0076, 0x52_0076, 0x53_00c0],
    }
}

fn intel() -> Registers {
    Registers {
        spec: "intel-v2,counters=4,fixed=3",
        selects: (0..4).map(|n| 0x186 + n).collect(),
        counters: (0..4).map(|n| 0x4c1 + n).chain(0x309..0x30c).collect(),
        others: vec![
            (0x38f, vec![0, 0xf, 0x7_0000_000f, 0x5]),
            (0x38d, vec![0, 0xbbb, 0x330]),
            (0x390, vec![0xf, 0x7_0000_000f]),
            (0x38e, vec![]),
        ],
        events: vec![0, 0x43_003c, 0x53_003c, 0x53_013c, 0x41_013c, 0x53_00c0],
    }
}

fn access(registers: &Registers) -> impl Strategy<Value = Access> + use<> {
    let model = PmuModel::parse(registers.spec).expect("a model");
    let width = u32::from(model.width());
    let near_wrap = (0u64..5_000).prop_map(move |below| (u64::MAX >> (64 - width)) - below);
    let count = prop_oneof![2 => near_wrap, 1 => 0u64..100];
    let mut all = registers.selects.clone();
    all.extend(&registers.counters);
    let others: Vec<(u32, u64)> = registers
        .others
        .iter()
        .flat_map(|(msr, values)| values.iter().map(move |value| (*msr, *value)))
        .collect();
    all.extend(registers.others.iter().map(|(msr, _)| *msr));
    let selects = select(registers.selects.clone());
    let write_select = (selects, select(registers.events.clone()))
        .prop_map(|(msr, value)| Access::Write(msr, value));
    let write_count = (select(registers.counters.clone()), count)
        .prop_map(|(msr, value)| Access::Write(msr, value));
    let write_other = select(if others.is_empty() {
        vec![(registers.selects[0], 0)]
    } else {
        others
    })
    .prop_map(|(msr, value)| Access::Write(msr, value));
    prop_oneof![
        4 => write_select,
        2 => write_count,
        2 => write_other,
        4 => select(all).prop_map(Access::Read),
        1 => proptest::strategy::Just(Access::Pmi),
    ]
}

fn turn(registers: &Registers) -> impl Strategy<Value = Turn> + use<> {
    (
        0..VCPUS,
        prop_oneof![3 => 0..1usize, 1 => 0..CORES],
        select(vec![Ring::Kernel, Ring::User]),
        prop_oneof![1 => 0u64..2, 4 => 0u64..2_000],
        vec(access(registers), 0..5),
    )
        .prop_map(|(vcpu, core, ring, ticks, accesses)| Turn {
            vcpu,
            core,
            ring,
            ticks,
            accesses,
        })
}

/// vCPUs on cores, as a scheduler moves them.
struct Host {
    vcpus: Vec<VcpuPmu>,
    /// The core on which a vCPU is or was last.
    home: Vec<Option<usize>>,
    /// Cores on which no vCPU is.
    idle: Vec<Option<Box<CorePmu>>>,
    /// Who is on each core.
    on: Vec<Option<usize>>,
}

impl Host {
    fn new(spec: &str, backend: impl Fn() -> Box<dyn CounterBackend>) -> Self {
        let model = PmuModel::parse(spec).expect("a model");
        let vcpu = |n| VcpuPmu::detached(OwnerId(n), model.clone(), Grant::everything());
        Host {
            vcpus: (0..).map(vcpu).take(VCPUS).collect(),
            home: vec![None; VCPUS],
            idle: (0..CORES)
                .map(|_| Some(Box::new(CorePmu::new(backend()))))
                .collect(),
            on: vec![None; CORES],
        }
    }

    /// Parks whoever is on `core`.
    fn clear(&mut self, core: usize) {
        if let Some(vcpu) = self.on[core].take() {
            self.idle[core] = self.vcpus[vcpu].park();
        }
    }

    fn switch(&mut self, vcpu: usize, core: usize) -> &mut VcpuPmu {
        if self.on[core] != Some(vcpu) {
            if let Some(old) = self.home[vcpu].filter(|old| *old != core) {
                if self.on[old] == Some(vcpu) {
                    self.clear(old);
                }
                // Another vCPU may be there by now.
                let other = self.on[old];
                if let Some(other) = other {
                    self.idle[old] = self.vcpus[other].park();
                }
                let mut left = self.idle[old].take().expect("the core");
                self.vcpus[vcpu].leave(&mut left);
                match other {
                    Some(other) => self.vcpus[other].attach(left),
                    None => self.idle[old] = Some(left),
                }
            }
            self.clear(core);
            let here = self.idle[core].take().expect("the core");
            self.vcpus[vcpu].attach(here);
            self.on[core] = Some(vcpu);
            self.home[vcpu] = Some(core);
        }
        &mut self.vcpus[vcpu]
    }
}

fn run(pmu: &mut VcpuPmu, tsc: u64, turn: &Turn) {
    pmu.observe(Progress::Entered { tsc });
    pmu.observe(Progress::Left {
        tsc: tsc + turn.ticks,
        halted: 0,
        ring: Some(turn.ring),
    });
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Wrote(WriteOutcome),
    Read(ReadOutcome),
    Pmi(Option<pmu_virt::PmiRequest>),
}

fn carry_out(pmu: &mut VcpuPmu, access: &Access) -> Outcome {
    match *access {
        Access::Write(msr, value) => Outcome::Wrote(pmu.wrmsr(MsrIndex(msr), value, KERNEL)),
        Access::Read(msr) => Outcome::Read(pmu.rdmsr(MsrIndex(msr), KERNEL)),
        Access::Pmi => Outcome::Pmi(pmu.take_pmi()),
    }
}

/// Every vCPU sees on shared cores what it sees with counters of its own.
fn check_schedule(
    spec: &str,
    shared: impl Fn() -> Box<dyn CounterBackend>,
    own: impl Fn() -> Box<dyn CounterBackend>,
    turns: &[Turn],
) -> Result<(), proptest::test_runner::TestCaseError> {
    let mut host = Host::new(spec, shared);
    let model = PmuModel::parse(spec).expect("a model");
    let alone = || VcpuPmu::new(model.clone(), own(), Grant::everything());
    let mut free: Vec<VcpuPmu> = (0..VCPUS).map(|_| alone()).collect();
    let mut tsc = 1_000;
    for turn in turns {
        let on_core = host.switch(turn.vcpu, turn.core);
        let free = &mut free[turn.vcpu];
        run(on_core, tsc, turn);
        run(free, tsc, turn);
        for access in &turn.accesses {
            let seen = carry_out(on_core, access);
            prop_assert_eq!(seen, carry_out(free, access), "{:?}", access);
        }
        prop_assert_eq!(on_core.needs(), free.needs());
        tsc += turn.ticks + 7;
    }
    // In the end each vCPU leaves with all it has counted.
    let registers: Vec<u32> = model
        .msr_ranges()
        .into_iter()
        .flat_map(|(first, last)| first..=last)
        .collect();
    for (vcpu, free) in free.iter_mut().enumerate() {
        let other = 1 - host.home[vcpu].unwrap_or(0);
        let on_core = host.switch(vcpu, other);
        for msr in &registers {
            let seen = on_core.rdmsr(MsrIndex(*msr), KERNEL);
            prop_assert_eq!(seen, free.rdmsr(MsrIndex(*msr), KERNEL), "MSR {:#x}", msr);
        }
        prop_assert_eq!(on_core.take_pmi(), free.take_pmi());
        for (here, there) in on_core.report().iter().zip(free.report()) {
            prop_assert_eq!(&here.reading, &there.reading);
            prop_assert_eq!(here.time_enabled, there.time_enabled);
            prop_assert_eq!(here.time_running, there.time_running);
        }
    }
    Ok(())
}

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
        let mut pmu = VcpuPmu::detached(OwnerId(0), model, Grant::everything())
            .with_oversubscription(Oversubscribe::Multiplex { turn });
        pmu.attach(Box::new(CorePmu::new(clock_of(slots)())));
        for n in (0..).take(wanted) {
            pmu.wrmsr(MsrIndex(0xc001_0200 + 2 * n), 0x43_0076, KERNEL);
        }
        let (mut tsc, mut passed) = (0, 0);
        let mut last = vec![0; wanted];
        for (ticks, read) in runs {
            pmu.observe(Progress::Entered { tsc });
            let deadline = pmu.deadline();
            prop_assert!(wanted <= slots || deadline.is_some_and(|at| at <= tsc + 1_000));
            tsc += ticks;
            passed += ticks;
            pmu.observe(Progress::Left { tsc, halted: 0, ring: None });
            let n = read % wanted;
            let ReadOutcome::Value(count) = pmu.rdpmc(u32::try_from(n).expect("small"), KERNEL)
            else {
                panic!("no count");
            };
            prop_assert!(count <= passed, "{count} of {passed}");
            prop_assert!(count >= last[n], "it fell from {} to {count}", last[n]);
            last[n] = count;
            for report in pmu.report() {
                prop_assert_eq!(report.time_enabled, passed);
                prop_assert!(report.time_running <= passed);
                if wanted <= slots {
                    prop_assert_eq!(report.time_running, passed);
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
                prop_assert_eq!(report.time_running, 0);
            }
        }
    }
}

fn reference_cycles(pmu: &mut VcpuPmu, number: u32) {
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
        pmu.observe(Progress::Entered { tsc: 0 });
        pmu.observe(Progress::Left {
            tsc: 100,
            halted: 0,
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
        first.observe(Progress::Entered { tsc: 0 });
        first.observe(Progress::Left {
            tsc: 60,
            halted: 0,
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
    let spend = |pmu: &mut VcpuPmu, tsc, ticks| {
        pmu.observe(Progress::Entered { tsc });
        pmu.observe(Progress::Left {
            tsc: tsc + ticks,
            halted: 0,
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
        let placed = |pmu: &VcpuPmu| -> Vec<bool> {
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
    let mut pmu = VcpuPmu::detached(OwnerId(0), model, Grant::everything())
        .with_oversubscription(Oversubscribe::Multiplex { turn });
    pmu.attach(Box::new(CorePmu::new(clock_of(2)())));
    reference_cycles(&mut pmu, 6);
    for slice in 0..60 {
        pmu.observe(Progress::Entered { tsc: slice * 100 });
        pmu.observe(Progress::Left {
            tsc: slice * 100 + 100,
            halted: 0,
            ring: None,
        });
    }
    for report in pmu.report() {
        assert_eq!(report.time_enabled, 6_000);
        assert_eq!(report.time_running, 2_000, "{report:?}");
        let Reading::Counted { value, provenance } = report.reading else {
            panic!("{report:?}");
        };
        assert_eq!(provenance, pmu_virt::Provenance::Scaled);
        assert!((5_500..=6_000).contains(&value), "{value}");
    }
}
