//! Random schedules of vCPUs on shared cores, and what has to come of them.

use pmu_virt::{
    Caller, CorePmu, CounterBackend, Grant, Layer, MsrIndex, OwnerId, PmiRequest, PmuModel,
    Progress, ReadOutcome, Ring, Ticks, Tsc, WriteOutcome,
};
use proptest::collection::vec;
use proptest::prelude::{Strategy, prop_assert_eq, prop_oneof};
use proptest::sample::select;

use crate::seated::Seated;

pub(crate) const KERNEL: Caller = Caller::legacy(Layer::GuestKernel);
const VCPUS: usize = 4;
const CORES: usize = 2;

#[derive(Clone, Debug)]
pub(crate) enum Access {
    Write(u32, u64),
    Read(u32),
    Pmi,
}

/// A vCPU runs on a core for a while, and then its guest has the floor.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    pub(crate) vcpu: usize,
    pub(crate) core: usize,
    pub(crate) ring: Option<Ring>,
    pub(crate) ticks: u64,
    pub(crate) halted: u64,
    pub(crate) accesses: Vec<Access>,
}

/// What the accesses of a model can be about.
pub(crate) struct Registers {
    pub(crate) spec: &'static str,
    pub(crate) selects: Vec<u32>,
    pub(crate) counters: Vec<u32>,
    pub(crate) others: Vec<(u32, Vec<u64>)>,
    pub(crate) events: Vec<u64>,
}

pub(crate) fn amd() -> Registers {
    Registers {
        spec: "amd-core",
        selects: (0..6).map(|n| 0xc001_0200 + 2 * n).collect(),
        counters: (0..6).map(|n| 0xc001_0201 + 2 * n).collect(),
        others: vec![],
        events: vec![0, 0x43_0076, 0x53_0076, 0x41_0076, 0x52_0076, 0x53_00c0],
    }
}

pub(crate) fn intel() -> Registers {
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

pub(crate) fn turn(registers: &Registers) -> impl Strategy<Value = Turn> + use<> {
    (
        0..VCPUS,
        prop_oneof![3 => 0..1usize, 1 => 0..CORES],
        select(vec![Some(Ring::Kernel), Some(Ring::User)]),
        prop_oneof![1 => 0u64..2, 4 => 0u64..2_000],
        prop_oneof![3 => 0u64..1, 1 => 0u64..1_000],
        vec(access(registers), 0..5),
    )
        .prop_map(|(vcpu, core, ring, ticks, halted, accesses)| Turn {
            vcpu,
            core,
            ring,
            ticks,
            halted: halted.min(ticks),
            accesses,
        })
}

/// vCPUs on cores, as a scheduler moves them.
pub(crate) struct Host {
    vcpus: Vec<Seated>,
    /// The core on which a vCPU is or was last.
    home: Vec<Option<usize>>,
    /// Cores on which no vCPU is.
    idle: Vec<Option<Box<CorePmu>>>,
    /// Who is on each core.
    on: Vec<Option<usize>>,
}

impl Host {
    pub(crate) fn new(spec: &str, backend: impl Fn() -> Box<dyn CounterBackend>) -> Self {
        let model = PmuModel::parse(spec).expect("a model");
        let vcpu = |n| Seated::detached(OwnerId(n), model.clone(), Grant::everything());
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
    pub(crate) fn clear(&mut self, core: usize) {
        if let Some(vcpu) = self.on[core].take() {
            self.idle[core] = self.vcpus[vcpu].park();
        }
    }

    pub(crate) fn switch(&mut self, vcpu: usize, core: usize) -> &mut Seated {
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

/// Runs a vCPU for a turn; returns when it wanted to be interrupted.
pub(crate) fn run(pmu: &mut Seated, tsc: u64, turn: &Turn) -> Option<u64> {
    pmu.observe(Progress::Entered { tsc: Tsc(tsc) });
    let deadline = pmu.deadline();
    pmu.observe(Progress::Left {
        tsc: Tsc(tsc + turn.ticks),
        halted: Ticks(turn.halted),
        ring: turn.ring,
    });
    deadline
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Wrote(WriteOutcome),
    Read(ReadOutcome),
    Pmi(Option<PmiRequest>),
}

fn carry_out(pmu: &mut Seated, access: &Access) -> Outcome {
    match *access {
        Access::Write(msr, value) => Outcome::Wrote(pmu.wrmsr(MsrIndex(msr), value, KERNEL)),
        Access::Read(msr) => Outcome::Read(pmu.rdmsr(MsrIndex(msr), KERNEL)),
        Access::Pmi => Outcome::Pmi(pmu.take_pmi()),
    }
}

/// Every vCPU sees on shared cores what it sees with counters of its own.
pub(crate) fn check_schedule(
    spec: &str,
    shared: impl Fn() -> Box<dyn CounterBackend>,
    own: impl Fn() -> Box<dyn CounterBackend>,
    turns: &[Turn],
) -> Result<(), proptest::test_runner::TestCaseError> {
    let mut host = Host::new(spec, shared);
    let model = PmuModel::parse(spec).expect("a model");
    let alone = || Seated::new(model.clone(), own(), Grant::everything());
    let mut free: Vec<Seated> = (0..VCPUS).map(|_| alone()).collect();
    let mut tsc = 1_000;
    for turn in turns {
        // Interrupted at the same time, told the same, and left the same.
        let on_core = host.switch(turn.vcpu, turn.core);
        let free = &mut free[turn.vcpu];
        let deadline = run(on_core, tsc, turn);
        prop_assert_eq!(deadline, run(free, tsc, turn), "deadline");
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
