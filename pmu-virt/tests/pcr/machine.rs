//! A PMU with reservations, and operations of a guest with their outcomes.

use std::sync::{Arc, Mutex};

use arbiter::{
    Auditor, Entropy, GuardLimits, PcrConfig, PcrUnit, PerKind, Phase, Policy, Record, Scheme, abi,
};
use pmu_virt::{
    Caller, ClockBackend, CombinedBackend, CounterBackend, Grant, Layer, MsrIndex, PmuModel,
    Progress, RateTable, ReadOutcome, Reservations, Ring, SimBackend, SimClocks, Ticks, Tsc,
    WriteOutcome,
};

use crate::seated::Seated;

pub(crate) const FIRMWARE: Layer = Layer::Firmware;
pub(crate) const HYPERVISOR: Layer = Layer::Hypervisor;
pub(crate) const KERNEL: Layer = Layer::GuestKernel;
pub(crate) const USER: Layer = Layer::GuestUser;

/// A management and an access cookie.
pub(crate) const M: u64 = 0x1234_5678_9abc;
pub(crate) const A: u64 = 0xfedc_ba98_7654;
/// A wrong one.
pub(crate) const X: u64 = 0x1111_1111_1111;

const fn at(row: u32, position: u32) -> u32 {
    abi::MSR_BASE + row + position
}
pub(crate) const fn management(n: u32) -> u32 {
    at(abi::MSR_MANAGEMENT_KEY, n)
}
pub(crate) const fn access(n: u32) -> u32 {
    at(abi::MSR_ACCESS_KEY, n)
}
pub(crate) const fn control(n: u32) -> u32 {
    at(abi::MSR_CONTROL, n)
}
pub(crate) const fn drop_value(n: u32) -> u32 {
    at(abi::MSR_DROP_VALUE, n)
}
pub(crate) const fn counter(n: u32) -> u32 {
    at(abi::MSR_COUNTER, n)
}
pub(crate) const fn select(n: u32) -> u32 {
    at(abi::MSR_SELECT, n)
}
pub(crate) const fn overflow(n: u32) -> u32 {
    at(abi::MSR_OVERFLOW, n)
}
pub(crate) const fn status(n: u32) -> u32 {
    at(abi::MSR_STATUS, n)
}
pub(crate) const fn legacy_map(n: u32) -> u32 {
    at(abi::MSR_LEGACY_MAP, n)
}
pub(crate) const PHASE: u32 = at(abi::MSR_PHASE, 0);
pub(crate) const RANDOM: u32 = at(abi::MSR_RANDOM, 0);
/// A register of the accounting page: snapshot, or a word of a position.
pub(crate) const SNAPSHOT: u32 = pmu_virt::accounting::MSR_BASE;
pub(crate) const fn word(n: u32, word: u32) -> u32 {
    SNAPSHOT + 0x100 + 4 * n + word
}

/// One operation with its outcome.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    /// Who performs what follows, and what RSI holds.
    As(Layer, u64),
    /// WRMSR.
    W(u32, u64),
    /// WRMSR that raises #GP.
    WGp(u32, u64),
    /// WRMSR of an absent register.
    WAbsent(u32),
    /// RDMSR with its value.
    R(u32, u64),
    /// RDMSR that raises #GP.
    RGp(u32),
    /// RDMSR of an absent register.
    RAbsent(u32),
    /// RDPMC with its value.
    P(u32, u64),
    /// RDPMC that raises #GP.
    PGp(u32),
    /// The guest runs for so many ticks at CPL 0.
    Run(u64),
    /// The pending PMI, as bits of positions; 0 for none.
    Pmi(u64),
    /// The processor takes its part of a write of IA32_DEBUGCTL: what the guest
    /// writes, and that part.
    Debugctl(u64, u64),
    /// The vCPU is reset.
    Reset,
    /// Decisions that were recorded since the last time: layer, counter, event,
    /// reason.
    Told(&'static [&'static str]),
}

#[derive(Debug, Default)]
struct Trail(Arc<Mutex<Vec<String>>>);

impl Auditor for Trail {
    fn record(&mut self, record: &Record) {
        let counter = record.counter.map_or(String::new(), |c| format!(" {c}"));
        let reason = record.event.reason();
        let reason = reason.map_or(String::new(), |r| format!(" {}", r.name()));
        let (layer, event) = (record.layer, record.event.name());
        let line = format!("{layer}{counter} {event}{reason}");
        self.0.lock().expect("no test panics with it").push(line);
    }
}

#[derive(Debug, Default)]
struct Numbers(u64);

impl Entropy for Numbers {
    fn bits(&mut self) -> Option<u64> {
        self.0 += 1;
        Some(self.0)
    }
}

/// What the machine is like.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) model: &'static str,
    pub(crate) grant: Grant,
    pub(crate) firmware: bool,
    pub(crate) legacy: Option<PerKind>,
    pub(crate) policy: Policy,
}

impl Setup {
    /// A machine without firmware, whose layers may reserve what they like.
    pub(crate) fn of(model: &'static str) -> Self {
        let mut policy = Policy::default();
        policy.kernel.min = PerKind::default();
        Setup {
            model,
            grant: Grant::everything(),
            firmware: false,
            legacy: None,
            policy,
        }
    }
}

/// The vCPU of a machine.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) pmu: Seated,
    trail: Arc<Mutex<Vec<String>>>,
    layer: Layer,
    presented: u64,
    now: u64,
}

/// Ticks in a millisecond of the machines.
pub(crate) const MS: u64 = 1_000;

pub(crate) fn unit(setup: &Setup, model: &PmuModel) -> PcrUnit {
    let unit = PcrUnit::new(PcrConfig {
        counters: model.counts(),
        widths: model.widths(),
        policy: setup.policy,
        scheme: Scheme::Independent,
        guard: GuardLimits::with_ticks_per_ms(MS),
        ticks_per_ms: MS,
        phase: Arc::new(Phase::new(setup.firmware)),
        legacy: setup.legacy,
        smm: false,
    });
    if model.ibs() == 0 {
        unit
    } else {
        unit.with_samplers()
    }
}

/// What the clock cannot count has a source that never does: what nobody could count
/// cannot be reserved.
pub(crate) fn counts_all_that_is_fixed() -> Box<dyn CounterBackend> {
    let table = RateTable::parse("[event.instructions]\nrate = 0\n", "rates");
    let table = table.unwrap_or_else(|error| panic!("{error}"));
    let still = SimBackend::of(&SimClocks::new(table, 1_000_000));
    let sources: [Box<dyn CounterBackend>; 2] = [Box::new(ClockBackend::new()), Box::new(still)];
    Box::new(CombinedBackend::new(sources.into()))
}

impl Machine {
    pub(crate) fn new(setup: &Setup) -> Self {
        Machine::on(setup, counts_all_that_is_fixed())
    }

    /// One that counts with this backend.
    pub(crate) fn on(setup: &Setup, backend: Box<dyn CounterBackend>) -> Self {
        let model = PmuModel::parse(setup.model).unwrap_or_else(|error| panic!("{error}"));
        let trail = Trail::default();
        let seen = Arc::clone(&trail.0);
        let reservations = Reservations {
            unit: unit(setup, &model),
            entropy: Box::new(Numbers::default()),
            audit: Box::new(trail),
            holdings: Default::default(),
        };
        let pmu = Seated::new(model, backend, setup.grant);
        let machine = Machine::of(pmu.with_reservations(reservations));
        Machine {
            trail: seen,
            ..machine
        }
    }

    /// One with this PMU.
    pub(crate) fn of(pmu: Seated) -> Self {
        let mut machine = Machine {
            pmu,
            trail: Arc::default(),
            layer: KERNEL,
            presented: 0,
            now: 1 << 32,
        };
        // Every access follows an exit, which tells the time.
        machine.run(0);
        machine
    }

    fn caller(&self) -> Caller {
        Caller {
            layer: self.layer,
            presented: self.presented,
        }
    }

    pub(crate) fn read(&mut self, msr: u32) -> ReadOutcome {
        let caller = self.caller();
        self.pmu.rdmsr(MsrIndex(msr), caller)
    }

    pub(crate) fn write(&mut self, msr: u32, value: u64) -> WriteOutcome {
        let caller = self.caller();
        self.pmu.wrmsr(MsrIndex(msr), value, caller)
    }

    pub(crate) fn rdpmc(&mut self, ecx: u32) -> ReadOutcome {
        let caller = self.caller();
        self.pmu.rdpmc(ecx, caller)
    }

    pub(crate) fn act_as(&mut self, layer: Layer, presented: u64) {
        (self.layer, self.presented) = (layer, presented);
    }

    pub(crate) fn run(&mut self, ticks: u64) {
        self.now += 10;
        self.pmu.observe(Progress::Entered { tsc: Tsc(self.now) });
        self.now += ticks;
        self.pmu.observe(Progress::Left {
            tsc: Tsc(self.now),
            halted: Ticks(0),
            ring: Some(Ring::Kernel),
        });
    }

    /// From now on it is so late, whatever the guest has done so far.
    pub(crate) fn set_time(&mut self, since_start: u64) {
        self.now = (1 << 32) + since_start;
        self.run(0);
    }

    pub(crate) fn told(&mut self) -> Vec<String> {
        std::mem::take(&mut *self.trail.lock().expect("no test panics with it"))
    }

    fn play(&mut self, op: &Op, case: &str) {
        let case = format!("{case}: {op:x?}");
        match *op {
            Op::As(layer, presented) => self.act_as(layer, presented),
            Op::W(msr, value) => assert_eq!(self.write(msr, value), WriteOutcome::Done, "{case}"),
            Op::WGp(msr, value) => assert_eq!(self.write(msr, value), WriteOutcome::Gp, "{case}"),
            Op::WAbsent(msr) => assert_eq!(self.write(msr, 0), WriteOutcome::NotHandled, "{case}"),
            Op::R(msr, value) => assert_eq!(self.read(msr), ReadOutcome::Value(value), "{case}"),
            Op::RGp(msr) => assert_eq!(self.read(msr), ReadOutcome::Gp, "{case}"),
            Op::RAbsent(msr) => assert_eq!(self.read(msr), ReadOutcome::NotHandled, "{case}"),
            Op::P(ecx, value) => assert_eq!(self.rdpmc(ecx), ReadOutcome::Value(value), "{case}"),
            Op::PGp(ecx) => assert_eq!(self.rdpmc(ecx), ReadOutcome::Gp, "{case}"),
            Op::Run(ticks) => self.run(ticks),
            Op::Pmi(counters) => {
                let pending = self.pmu.take_pmi().map_or(0, |pmi| pmi.counters.bits());
                assert_eq!(pending, counters, "{case}");
            }
            Op::Debugctl(value, rest) => {
                let written = self.pmu.written(MsrIndex(0x1d9), value, self.caller());
                assert_eq!(written.rest, Some(rest), "{case}");
                self.pmu.rest_taken(MsrIndex(0x1d9), value);
            }
            Op::Reset => self.pmu.reset(),
            Op::Told(expected) => assert_eq!(self.told(), expected, "{case}"),
        }
    }
}

/// Plays `ops` from power-on, and returns what is left.
pub(crate) fn check(setup: &Setup, ops: &[Op]) -> Machine {
    let mut machine = Machine::new(setup);
    play(&mut machine, ops);
    machine
}

/// Plays `ops` on.
pub(crate) fn play(machine: &mut Machine, ops: &[Op]) {
    let model = machine.pmu.model().to_string();
    for (n, op) in ops.iter().enumerate() {
        machine.play(op, &format!("{model}, operation {n}"));
    }
}

/// The kernel reserves position `n` with `M`, and shuts others out with `A`.
pub(crate) fn private(n: u32) -> [Op; 5] {
    [
        Op::As(KERNEL, 0),
        Op::W(management(n), M),
        Op::As(KERNEL, M),
        Op::W(access(n), A),
        Op::As(KERNEL, 0),
    ]
}

/// The kernel sets the control word of a counter that it holds.
pub(crate) fn controlled(n: u32, word: u64) -> [Op; 3] {
    [
        Op::As(KERNEL, M),
        Op::W(control(n), word),
        Op::As(KERNEL, 0),
    ]
}
