//! One switch of vCPUs on a core, as the core's thread makes it: one out, the
//! next in. `umpire bench switch` compares it with saving and restoring
//! everything, and counts operations.
//!
//! `cargo bench -p pmu-virt --bench switch`

use criterion::{Criterion, criterion_group, criterion_main};
use pmu_virt::{
    Caller, ClockBackend, CorePmu, CounterBackend, Grant, Layer, MsrIndex, OwnerId, PmuModel,
    StepBackend, VcpuPmu,
};

/// A source with the event select that it counts.
struct Source {
    name: &'static str,
    select: u64,
    open: fn() -> Box<dyn CounterBackend>,
}

const SOURCES: [Source; 2] = [
    Source {
        name: "clock",
        select: 0x43_003c,
        open: || Box::new(ClockBackend::new()),
    },
    Source {
        name: "step",
        select: 0x43_00c0,
        open: || Box::new(StepBackend::new()),
    },
];

/// A vCPU on no core, with this many counters programmed and enabled.
fn vcpu(owner: u32, counters: u32, select: u64) -> VcpuPmu {
    const SELECT0: u32 = 0x186;
    const GLOBAL_CONTROL: u32 = 0x38f;
    let model = PmuModel::parse("intel-v2,counters=8,fixed=0").unwrap_or_else(|e| panic!("{e}"));
    let mut pmu = VcpuPmu::detached(OwnerId(owner), model, Grant::everything());
    for n in 0..counters {
        pmu.wrmsr(
            MsrIndex(SELECT0 + n),
            select,
            Caller::legacy(Layer::GuestKernel),
        );
    }
    pmu.wrmsr(
        MsrIndex(GLOBAL_CONTROL),
        0xff,
        Caller::legacy(Layer::GuestKernel),
    );
    pmu
}

/// vCPUs that take turns on one core.
struct Turns {
    vcpus: Vec<VcpuPmu>,
    core: Option<Box<CorePmu>>,
    next: usize,
}

impl Turns {
    fn new(source: &Source, counters: &[u32]) -> Self {
        let vcpus = (0u32..).zip(counters);
        let mut turns = Turns {
            vcpus: vcpus.map(|(n, c)| vcpu(n, *c, source.select)).collect(),
            core: Some(Box::new(CorePmu::new((source.open)()))),
            next: 0,
        };
        // The first time round, counters are given their places.
        counters.iter().for_each(|_| turns.switch());
        turns
    }

    /// The next one in, and out again.
    fn switch(&mut self) {
        let pmu = &mut self.vcpus[self.next];
        if let Some(core) = self.core.take() {
            pmu.attach(core);
            self.core = pmu.park();
        }
        self.next = (self.next + 1) % self.vcpus.len();
    }
}

fn switches(criterion: &mut Criterion) {
    let cases: [(&str, &[u32]); 5] = [
        ("nothing counts", &[0, 0]),
        ("4 counters and none, in turn", &[4, 0]),
        ("4 counters each, in turn", &[4, 4]),
        ("8 counters each, in turn", &[8, 8]),
        ("8 vCPUs with 0, 2, 4 and 8", &[0, 2, 4, 8, 0, 2, 4, 8]),
    ];
    for source in &SOURCES {
        let mut group = criterion.benchmark_group(source.name);
        for (name, counters) in cases {
            let mut turns = Turns::new(source, counters);
            group.bench_function(name, |bench| bench.iter(|| turns.switch()));
        }
        group.bench_function("4 counters move to another core", |bench| {
            let mut pmu = vcpu(0, 4, source.select);
            let mut cores = [(); 2].map(|()| Some(Box::new(CorePmu::new((source.open)()))));
            let mut at = 0;
            bench.iter(|| {
                if let Some(core) = cores[at].take() {
                    pmu.attach(core);
                    cores[at] = pmu.depart();
                }
                at ^= 1;
            });
        });
        group.finish();
    }
}

criterion_group!(benches, switches);
criterion_main!(benches);
