//! One trapped access without the trap: decode, check, logical access.
//!
//! `cargo bench -p pmu-virt --bench access`; the goal is at most 60 ns each.

use criterion::{Criterion, criterion_group, criterion_main};
use pmu_virt::{
    Caller, ClockBackend, Grant, Layer, MsrIndex, PmuModel, Progress, Ring, VcpuPmu, step,
};
use std::hint::black_box;

/// A PMU with every programmable counter running.
fn busy(case: &Case) -> VcpuPmu {
    let model = PmuModel::parse(case.spec).unwrap_or_else(|error| panic!("{error}"));
    let selects = usize::from(model.programmable());
    let mut pmu = VcpuPmu::new(model, Box::new(ClockBackend::new()), Grant::everything());
    for msr in (case.select..).step_by(case.stride).take(selects) {
        pmu.wrmsr(MsrIndex(msr), case.value, LAYER);
    }
    pmu
}

/// A model with the MSR indices to be accessed.
struct Case {
    spec: &'static str,
    select: u32,
    stride: usize,
    value: u64,
    counter: u32,
    /// Global control and its value with every programmable counter on.
    control: Option<(u32, u64)>,
}

const CASES: [Case; 3] = [
    Case {
        spec: "intel-v2",
        select: 0x186,
        stride: 1,
        value: 0x53_013c,
        counter: 0xc4,
        control: Some((0x38f, 0xf)),
    },
    Case {
        spec: "amd-core",
        select: 0xc001_0200,
        stride: 2,
        value: 0x53_0076,
        counter: 0xc001_0007,
        control: None,
    },
    Case {
        spec: "amd-perfmonv2",
        select: 0xc001_0200,
        stride: 2,
        value: 0x53_0076,
        counter: 0xc001_0007,
        control: Some((0xc000_0301, 0x3f)),
    },
];

const LAYER: Caller = Caller::legacy(Layer::GuestKernel);

fn accesses(criterion: &mut Criterion) {
    for case in CASES {
        let mut pmu = busy(&case);
        let mut group = criterion.benchmark_group(case.spec);
        group.bench_function("rdmsr counter", |bench| {
            bench.iter(|| pmu.rdmsr(black_box(MsrIndex(case.counter)), LAYER));
        });
        group.bench_function("wrmsr counter", |bench| {
            let msr = MsrIndex(case.counter);
            bench.iter(|| pmu.wrmsr(black_box(msr), black_box(1 << 20), LAYER));
        });
        group.bench_function("rdpmc", |bench| {
            bench.iter(|| pmu.rdpmc(black_box(3), LAYER));
        });
        group.bench_function("rdmsr select", |bench| {
            bench.iter(|| pmu.rdmsr(black_box(MsrIndex(case.select)), LAYER));
        });
        group.bench_function("wrmsr select, on and off", |bench| {
            let mut value = case.value;
            bench.iter(|| {
                value ^= 1 << 22;
                pmu.wrmsr(black_box(MsrIndex(case.select)), black_box(value), LAYER)
            });
        });
        if let Some((msr, on)) = case.control {
            group.bench_function("wrmsr global control, all on and off", |bench| {
                let mut value = on;
                bench.iter(|| {
                    value ^= on;
                    pmu.wrmsr(black_box(MsrIndex(msr)), black_box(value), LAYER)
                });
            });
        }
        group.bench_function("absent register", |bench| {
            bench.iter(|| pmu.rdmsr(black_box(MsrIndex(0x10)), LAYER));
        });
        let mut tsc = 0;
        group.bench_function("entry and exit", |bench| {
            bench.iter(|| {
                pmu.observe(Progress::Entered { tsc });
                tsc += 1_000;
                pmu.observe(Progress::Left {
                    tsc,
                    halted: 0,
                    ring: Some(Ring::Kernel),
                });
            });
        });
        group.finish();
    }
    criterion.bench_function("decode and retire one instruction", |bench| {
        bench.iter(|| {
            let bytes = black_box([0x48, 0x8b, 0x03, 0x90, 0x90, 0x90, 0x90, 0x90]);
            step::decode(&bytes, 64, 0x1000).map(|facts| facts.retire(0x1003, 0, 0))
        });
    });
}

criterion_group!(benches, accesses);
criterion_main!(benches);
