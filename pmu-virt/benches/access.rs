//! One trapped access without the trap: decode, check, logical access.
//!
//! `cargo bench -p pmu-virt --bench access`; the goal is at most 60 ns each.

use std::hint::black_box;
use std::sync::Arc;

use arbiter::{GuardLimits, NoAudit, PcrConfig, PcrUnit, PerKind, Policy, Scheme, abi};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, criterion_group, criterion_main};
use instruction_facts::{InstructionInfoFactory, decode};
use pmu_virt::{
    Caller, ClockBackend, CorePmu, Grant, Layer, MsrIndex, OwnerId, PmuModel, Progress, RateTable,
    Reservations, Ring, SimBackend, Ticks, Tsc, VcpuPmu, Vendor, WriteOutcome,
};

/// A PMU with every programmable counter running.
fn busy(case: &Case) -> (VcpuPmu, CorePmu) {
    let model = PmuModel::parse(case.spec).unwrap_or_else(|error| panic!("{error}"));
    let selects = usize::from(model.programmable());
    let mut core = CorePmu::new(Box::new(ClockBackend::new()));
    let mut pmu = VcpuPmu::detached(OwnerId::default(), model, Grant::everything());
    pmu.attach(&mut core);
    for msr in (case.select..).step_by(case.stride).take(selects) {
        pmu.wrmsr(&mut core, MsrIndex(msr), case.value, LAYER);
    }
    (pmu, core)
}

/// A model with the MSR indices to be accessed.
struct Case {
    spec: &'static str,
    select: u32,
    stride: usize,
    value: u64,
    /// The MSR of a counter, and its number.
    counter: (u32, u32),
    /// Global control and its value with every programmable counter on.
    control: Option<(u32, u64)>,
}

/// One of Intel's versions with four counters.
const fn intel(spec: &'static str) -> Case {
    Case {
        spec,
        select: 0x186,
        stride: 1,
        value: 0x53_013c,
        counter: (0xc4, 3),
        control: Some((0x38f, 0xf)),
    }
}

/// K7 and Family 10h.
const fn amd(spec: &'static str) -> Case {
    Case {
        spec,
        select: 0xc001_0000,
        stride: 1,
        value: 0x53_0076,
        counter: (0xc001_0007, 3),
        control: None,
    }
}

/// With the core extension.
const fn amd_core(spec: &'static str, control: Option<(u32, u64)>) -> Case {
    Case {
        select: 0xc001_0200,
        stride: 2,
        control,
        ..amd(spec)
    }
}

const GLOBAL: Option<(u32, u64)> = Some((0xc000_0301, 0x3f));

const CASES: [Case; 16] = [
    Case {
        counter: (0xc2, 1),
        control: None,
        ..intel("intel-v1")
    },
    intel("intel-v2"),
    intel("intel-v3"),
    intel("intel-v4"),
    intel("intel-v5,counters=4"),
    intel("intel-v3,pebs=skid,pebs-format=3"),
    intel("intel-v4,pebs=skid"),
    intel("intel-v5,counters=4,pebs=skid"),
    amd("amd-k7"),
    amd("amd-fam10h"),
    amd_core("amd-core", None),
    amd_core("amd-perfmonv2", GLOBAL),
    amd("amd-fam10h,ibs=on"),
    amd_core("amd-core,ibs=on", None),
    amd_core("amd-perfmonv2,ibs=on", GLOBAL),
    amd_core("amd-perfmonv2,ibs=on,freeze=on", GLOBAL),
];

/// Every model has its figures.
fn assert_every_model() {
    for model in PmuModel::names() {
        let of_it = |case: &Case| case.spec.split(',').next() == Some(model.name);
        assert!(CASES.iter().any(of_it), "no figures of {}", model.name);
    }
}

/// `IbsOpCtl`.
const IBS_OP: u32 = 0xc001_1033;

/// Who accesses.
const LAYER: Caller = Caller::legacy(Layer::GuestKernel);

fn accesses(criterion: &mut Criterion) {
    assert_every_model();
    for case in CASES {
        let (counter, number) = case.counter;
        let (mut pmu, mut core) = busy(&case);
        let mut group = criterion.benchmark_group(case.spec);
        group.bench_function("rdmsr counter", |bench| {
            bench.iter(|| pmu.rdmsr(&mut core, black_box(MsrIndex(counter)), LAYER));
        });
        group.bench_function("wrmsr counter", |bench| {
            let msr = MsrIndex(counter);
            bench.iter(|| pmu.wrmsr(&mut core, black_box(msr), black_box(1 << 20), LAYER));
        });
        group.bench_function("rdpmc", |bench| {
            bench.iter(|| pmu.rdpmc(&mut core, black_box(number), LAYER));
        });
        group.bench_function("rdmsr select", |bench| {
            bench.iter(|| pmu.rdmsr(&mut core, black_box(MsrIndex(case.select)), LAYER));
        });
        let select = (case.select, case.value, 1 << 22);
        let name = "wrmsr select, on and off";
        switched(&mut group, name, select, (&mut pmu, &mut core));
        pmu.wrmsr(&mut core, MsrIndex(case.select), case.value, LAYER);
        if let Some((msr, on)) = case.control {
            let name = "wrmsr global control, all on and off";
            switched(&mut group, name, (msr, on, on), (&mut pmu, &mut core));
            pmu.wrmsr(&mut core, MsrIndex(msr), on, LAYER);
        }
        // Status of AMD's is another register, and takes no part of this.
        if pmu.model().vendor() == Vendor::Intel && pmu.model().has_frozen_status() {
            group.bench_function("rdmsr in use", |bench| {
                bench.iter(|| pmu.rdmsr(&mut core, black_box(MsrIndex(0x392)), LAYER));
            });
            group.bench_function("wrmsr status, set and reset", |bench| {
                let mut msr = 0x390;
                bench.iter(|| {
                    msr ^= 1;
                    pmu.wrmsr(&mut core, black_box(MsrIndex(msr)), black_box(1), LAYER)
                });
            });
        }
        if pmu.model().pebs().is_some() {
            switched(
                &mut group,
                "wrmsr pebs enable, on and off",
                (0x3f1, 1, 1),
                (&mut pmu, &mut core),
            );
        }
        if pmu.model().ibs() != 0 {
            group.bench_function("rdmsr ibs op control", |bench| {
                bench.iter(|| pmu.rdmsr(&mut core, black_box(MsrIndex(IBS_OP)), LAYER));
            });
            // A maximum of a million cycles.
            let (on, enable) = (0xffff | 1 << 17, 1 << 17);
            let name = "wrmsr ibs op control, on and off";
            switched(
                &mut group,
                name,
                (IBS_OP, on, enable),
                (&mut pmu, &mut core),
            );
        }
        group.bench_function("absent register", |bench| {
            bench.iter(|| pmu.rdmsr(&mut core, black_box(MsrIndex(0x10)), LAYER));
        });
        let mut tsc = 0;
        group.bench_function("entry and exit", |bench| {
            bench.iter(|| {
                pmu.observe(&mut core, Progress::Entered { tsc: Tsc(tsc) });
                tsc += 1_000;
                pmu.observe(
                    &mut core,
                    Progress::Left {
                        tsc: Tsc(tsc),
                        halted: Ticks(0),
                        ring: Some(Ring::Kernel),
                    },
                );
            });
        });
        group.finish();
    }
    criterion.bench_function("decode and retire one instruction", |bench| {
        let mut factory = InstructionInfoFactory::new();
        bench.iter(|| {
            let bytes = black_box([0x48, 0x8b, 0x03, 0x90, 0x90, 0x90, 0x90, 0x90]);
            let decoded = decode(&bytes, 64, 0x1000, &mut factory);
            decoded.map(|decoded| decoded.facts.retire(0x1003, 0, 0))
        });
    });
}

/// Writes a register whose value is `on`, then without the bits of `switch`, in turn.
fn switched(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    (msr, on, switch): (u32, u64, u64),
    (pmu, core): (&mut VcpuPmu, &mut CorePmu),
) {
    group.bench_function(name, |bench| {
        let mut value = on;
        bench.iter(|| {
            value ^= switch;
            pmu.wrmsr(core, black_box(MsrIndex(msr)), black_box(value), LAYER)
        });
    });
    pmu.wrmsr(core, MsrIndex(msr), 0, LAYER);
}

/// What stands between an access and its counter.
#[derive(Clone, Copy)]
enum Reserved {
    /// No reservations at all, `--pcr off`.
    Off,
    /// Nobody holds a counter.
    Nothing,
    /// The counter is held, without an access cookie.
    Open,
    /// It is held with a cookie, which the access presents by an alias register.
    Cookie,
    /// So it is, and a legacy access is dropped and recorded.
    Dropped,
    /// The firmware holds another one, so that names are mapped.
    Mapped,
}

const SCENES: [(&str, Reserved); 6] = [
    ("without reservations", Reserved::Off),
    ("nothing reserved", Reserved::Nothing),
    ("reserved, default cookie", Reserved::Open),
    ("reserved, cookie by alias", Reserved::Cookie),
    ("reserved, dropped", Reserved::Dropped),
    ("names mapped", Reserved::Mapped),
];

#[derive(Debug)]
struct NoEntropy;

impl arbiter::Entropy for NoEntropy {
    fn bits(&mut self) -> Option<u64> {
        None
    }
}

const M: u64 = 0x1234_5678_9abc;
const A: u64 = 0xfedc_ba98_7654;
/// Position of the counter that is accessed.
const POSITION: u32 = 3;

/// The PMU with reservations, of which none is made yet.
fn with_unit(pmu: VcpuPmu, phase: arbiter::Phase, legacy: Option<PerKind>) -> VcpuPmu {
    let unit = PcrUnit::new(PcrConfig {
        counters: pmu.model().counts(),
        widths: pmu.model().widths(),
        policy: Policy::default(),
        scheme: Scheme::Independent,
        guard: GuardLimits::with_ticks_per_ms(1_000_000),
        ticks_per_ms: 1_000_000,
        phase: Arc::new(phase),
        legacy,
        smm: false,
    });
    pmu.with_reservations(Reservations {
        unit,
        entropy: Box::new(NoEntropy),
        audit: Box::new(NoAudit),
        holdings: Default::default(),
    })
}

/// A busy `intel-v2` with these reservations.
fn scene(reserved: Reserved) -> (VcpuPmu, CorePmu) {
    let (pmu, mut core) = busy(&intel("intel-v2"));
    if matches!(reserved, Reserved::Off) {
        return (pmu, core);
    }
    let phase = arbiter::Phase::new(matches!(reserved, Reserved::Mapped));
    let legacy = PerKind {
        programmable: pmu.model().programmable() - 1,
        fixed: pmu.model().fixed(),
    };
    let legacy = Some(legacy).filter(|_| matches!(reserved, Reserved::Mapped));
    let mut pmu = with_unit(pmu, phase, legacy);
    let mut write = |layer, presented, row, position, value| {
        let msr = MsrIndex(abi::MSR_BASE + row + position);
        let written = pmu.wrmsr(&mut core, msr, value, Caller { layer, presented });
        assert_eq!(written.outcome, WriteOutcome::Done);
    };
    let kernel = Layer::GuestKernel;
    match reserved {
        Reserved::Off | Reserved::Nothing => {}
        Reserved::Open => write(kernel, 0, abi::MSR_MANAGEMENT_KEY, POSITION, M),
        Reserved::Cookie | Reserved::Dropped => {
            write(kernel, 0, abi::MSR_MANAGEMENT_KEY, POSITION, M);
            write(kernel, M, abi::MSR_ACCESS_KEY, POSITION, A);
        }
        Reserved::Mapped => {
            write(Layer::Firmware, 0, abi::MSR_MANAGEMENT_KEY, 0, M);
            write(Layer::Firmware, 0, abi::MSR_PHASE, 0, abi::PHASE_END);
        }
    }
    (pmu, core)
}

/// The same accesses with more and more that has to be looked at. The goal is
/// at most 10 ns more than without reservations.
fn reservations(criterion: &mut Criterion) {
    for (name, reserved) in SCENES {
        let (mut pmu, mut core) = scene(reserved);
        let (alias, caller) = match reserved {
            Reserved::Cookie => (
                true,
                Caller {
                    presented: A,
                    ..LAYER
                },
            ),
            _ => (false, LAYER),
        };
        let n = match reserved {
            Reserved::Mapped => POSITION - 1,
            _ => POSITION,
        };
        let pick = |row: u32, legacy: u32| if alias { row + POSITION } else { legacy + n };
        let counter = MsrIndex(pick(abi::MSR_BASE + abi::MSR_COUNTER, 0x4c1));
        let select = MsrIndex(pick(abi::MSR_BASE + abi::MSR_SELECT, 0x186));
        let ecx = pick(abi::RDPMC_COOKIE, 0);
        let mut group = criterion.benchmark_group("reservations");
        group.bench_function(format!("rdmsr counter, {name}"), |bench| {
            bench.iter(|| pmu.rdmsr(&mut core, black_box(counter), black_box(caller)));
        });
        group.bench_function(format!("wrmsr counter, {name}"), |bench| {
            bench.iter(|| {
                pmu.wrmsr(
                    &mut core,
                    black_box(counter),
                    black_box(1 << 20),
                    black_box(caller),
                )
            });
        });
        group.bench_function(format!("rdmsr select, {name}"), |bench| {
            bench.iter(|| pmu.rdmsr(&mut core, black_box(select), black_box(caller)));
        });
        group.bench_function(format!("rdpmc, {name}"), |bench| {
            bench.iter(|| pmu.rdpmc(&mut core, black_box(ecx), black_box(caller)));
        });
        group.bench_function(format!("rdmsr global control, {name}"), |bench| {
            bench.iter(|| pmu.rdmsr(&mut core, black_box(MsrIndex(0x38f)), black_box(caller)));
        });
        group.bench_function(
            format!("wrmsr global control, one off and on, {name}"),
            |bench| {
                let mut value = 0x7;
                bench.iter(|| {
                    value ^= 1;
                    pmu.wrmsr(
                        &mut core,
                        black_box(MsrIndex(0x38f)),
                        black_box(value),
                        black_box(caller),
                    )
                });
            },
        );
        group.finish();
    }
    criterion.bench_function("reserve and give back", |bench| {
        let (mut pmu, mut core) = scene(Reserved::Nothing);
        let msr = MsrIndex(abi::MSR_BASE + abi::MSR_MANAGEMENT_KEY + POSITION);
        let holder = Caller {
            presented: M,
            ..LAYER
        };
        bench.iter(|| {
            let reserved = pmu.wrmsr(&mut core, black_box(msr), black_box(M), LAYER);
            (
                reserved,
                pmu.wrmsr(&mut core, black_box(msr), black_box(0), holder),
            )
        });
    });
}

/// Two vCPUs with four counters each on one core, which has enough for both or for one of
/// them. With `held` they have reserved what they count on.
fn two(counters: usize, held: bool) -> ([VcpuPmu; 2], CorePmu) {
    let rates = format!("counters = {counters}\n[event.cycles]\nrate = 1000\n");
    let rates = RateTable::parse(&rates, "rates").expect("a table");
    let mut core = CorePmu::new(Box::new(SimBackend::new(rates, 1_000_000)));
    let vcpus = [0, 1].map(|owner| {
        let model = PmuModel::parse("amd-core").expect("a model");
        let pmu = VcpuPmu::detached(OwnerId(owner), model, Grant::everything());
        let mut pmu = with_unit(pmu, arbiter::Phase::new(false), None);
        pmu.attach(&mut core);
        for n in 0..4 {
            let mut write = |msr, value, presented| {
                let caller = Caller { presented, ..LAYER };
                let written = pmu.wrmsr(&mut core, MsrIndex(msr), value, caller);
                assert_eq!(written.outcome, WriteOutcome::Done);
            };
            if held {
                write(abi::MSR_BASE + abi::MSR_MANAGEMENT_KEY + n, M, 0);
            }
            write(0xc001_0200 + 2 * n, 0x53_0076, 0);
        }
        pmu.park(&mut core);
        pmu
    });
    (vcpus, core)
}

/// A vCPU is switched out and the other one in.
fn switches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("switch");
    for (counters, place) in [(8, "in place"), (4, "restored")] {
        for (held, name) in [(false, "nothing reserved"), (true, "all reserved")] {
            let (mut vcpus, mut core) = two(counters, held);
            let mut tsc = 0;
            group.bench_function(format!("{place}, {name}"), |bench| {
                bench.iter(|| {
                    for pmu in &mut vcpus {
                        pmu.attach(&mut core);
                        pmu.observe(&mut core, Progress::Entered { tsc: Tsc(tsc) });
                        tsc += 1_000;
                        let left = Progress::Left {
                            tsc: Tsc(tsc),
                            halted: Ticks(0),
                            ring: Some(Ring::Kernel),
                        };
                        pmu.observe(&mut core, left);
                        pmu.park(&mut core);
                    }
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, accesses, reservations, switches);
criterion_main!(benches);
