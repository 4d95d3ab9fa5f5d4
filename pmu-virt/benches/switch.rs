//! One switch of vCPUs on a core, as the core's thread makes it: one out, the
//! next in. `umpire bench switch` compares it with saving and restoring
//! everything, and counts operations.
//!
//! `cargo bench -p pmu-virt --bench switch`

use criterion::{Criterion, criterion_group, criterion_main};
use perfmon_abi::consts::{PFM_FL_SYSTEM_WIDE, PFM_SETFL_TIME_SWITCH};
use perfmon_abi::wire::Call;
use perfmon_abi::{Message, PmcArg, SetDesc, Timespec};
use pmu_virt::perfmon::{
    AttachedContext, Context, ContextId, HostPolicy, LogicalPmu, MessageQueue, Quantities,
    VirtualPmd,
};
use pmu_virt::{
    Caller, ClockBackend, CorePmu, CounterBackend, Grant, Layer, MsrIndex, OwnerId, PmuModel,
    Progress, StepBackend, VcpuPmu,
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

/// The model of every vCPU.
const MODEL: &str = "intel-v2,counters=8,fixed=0";

/// A tool that reads no messages, of a machine that knows no quantities.
#[derive(Debug)]
struct Deaf;

impl MessageQueue for Deaf {
    fn waiting(&self) -> usize {
        0
    }

    fn post(&mut self, _: Option<&Message>) {}
}

impl Quantities for Deaf {
    fn read(&self, _: VirtualPmd) -> Option<u64> {
        None
    }
}

/// Nanoseconds of a set, where a context has several.
const SET_NS: u64 = 100_000;

/// A context with `sets` sets of four counters each, ready to be loaded.
fn hosted(id: u32, flags: u32, sets: u16, select: u64) -> Box<AttachedContext> {
    let model = PmuModel::parse(MODEL).unwrap_or_else(|e| panic!("{e}"));
    let pmu = std::sync::Arc::new(LogicalPmu::new(model));
    let mut context = Context::new(pmu, flags, None).unwrap_or_else(|e| panic!("{e}"));
    let mut call = |mut call| {
        let done = context.call(&mut call, &Deaf, &mut Deaf);
        done.unwrap_or_else(|e| panic!("{e}"));
    };
    for set in 0..sets {
        if sets > 1 {
            call(Call::CreateEvtsets(vec![SetDesc {
                id: set,
                flags: PFM_SETFL_TIME_SWITCH,
                timeout: Timespec::from_ns(SET_NS),
                ..SetDesc::default()
            }]));
        }
        let write = |num| PmcArg {
            num,
            set,
            value: select,
            ..PmcArg::default()
        };
        call(Call::WritePmcs((0..4).map(write).collect()));
    }
    AttachedContext::new(ContextId(id), Box::new(context), Box::new(Deaf))
}

/// A core that takes host contexts; a tick is a nanosecond.
fn hosting(source: &Source) -> CorePmu {
    let mut core = CorePmu::new((source.open)());
    let khz = std::num::NonZeroU32::new(1_000_000).unwrap_or(std::num::NonZeroU32::MIN);
    core.enable_hosting(HostPolicy::GuestFirst, khz);
    core
}

/// A vCPU that is not on `core` yet, with this many counters programmed and
/// enabled.
fn vcpu(core: &mut CorePmu, owner: u32, counters: u32, select: u64) -> VcpuPmu {
    const SELECT0: u32 = 0x186;
    const GLOBAL_CONTROL: u32 = 0x38f;
    let model = PmuModel::parse(MODEL).unwrap_or_else(|e| panic!("{e}"));
    let mut pmu = VcpuPmu::detached(OwnerId(owner), model, Grant::everything());
    for n in 0..counters {
        pmu.wrmsr(
            core,
            MsrIndex(SELECT0 + n),
            select,
            Caller::legacy(Layer::GuestKernel),
        );
    }
    pmu.wrmsr(
        core,
        MsrIndex(GLOBAL_CONTROL),
        0xff,
        Caller::legacy(Layer::GuestKernel),
    );
    pmu
}

/// vCPUs that take turns on one core.
struct Turns {
    vcpus: Vec<VcpuPmu>,
    core: CorePmu,
    next: usize,
}

impl Turns {
    fn new(source: &Source, counters: &[u32]) -> Self {
        let vcpus = (0u32..).zip(counters);
        let mut core = CorePmu::new((source.open)());
        let vcpus = vcpus.map(|(n, c)| vcpu(&mut core, n, *c, source.select));
        let mut turns = Turns {
            vcpus: vcpus.collect(),
            core,
            next: 0,
        };
        // The first time round, counters are given their places.
        counters.iter().for_each(|_| turns.switch());
        turns
    }

    /// The same with a context of four counters for each vCPU, or for the core.
    fn with_contexts(source: &Source, counters: &[u32], of_vcpus: bool) -> Self {
        let mut turns = Turns::new(source, counters);
        turns.core = hosting(source);
        let core = &mut turns.core;
        for (pmu, id) in turns.vcpus.iter_mut().zip(1..) {
            pmu.attach(core);
            if of_vcpus {
                let loaded = pmu.load_context(Some(core), hosted(id, 0, 1, source.select), 0);
                loaded.unwrap_or_else(|(_, refusal)| panic!("{refusal}"));
                let started = pmu.call_context(Some(core), &mut Call::Start(None), &Deaf);
                started.unwrap_or_else(|refusal| panic!("{refusal}"));
            }
            pmu.park(core);
        }
        if !of_vcpus {
            let context = hosted(1, PFM_FL_SYSTEM_WIDE, 1, source.select);
            let loaded = core.load_context(context, 0);
            loaded.unwrap_or_else(|(_, refusal)| panic!("{refusal}"));
            let started = core.call_context(&mut Call::Start(None), &Deaf);
            started.unwrap_or_else(|refusal| panic!("{refusal}"));
        }
        counters.iter().for_each(|_| turns.switch());
        turns
    }

    /// The next one in, and out again.
    fn switch(&mut self) {
        let pmu = &mut self.vcpus[self.next];
        pmu.attach(&mut self.core);
        pmu.park(&mut self.core);
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
        for (name, of_vcpus) in [
            (
                "4 counters each, and a host context of 4 for each vCPU",
                true,
            ),
            (
                "4 counters each, and a host context of 4 for the core",
                false,
            ),
        ] {
            let mut turns = Turns::with_contexts(source, &[4, 4], of_vcpus);
            group.bench_function(name, |bench| bench.iter(|| turns.switch()));
        }
        group.bench_function("a switch of event sets, 4 counters each", |bench| {
            let mut core = hosting(source);
            let mut pmu = vcpu(&mut core, 0, 0, source.select);
            pmu.attach(&mut core);
            let loaded = pmu.load_context(Some(&mut core), hosted(1, 0, 2, source.select), 0);
            loaded.unwrap_or_else(|(_, refusal)| panic!("{refusal}"));
            let started = pmu.call_context(Some(&mut core), &mut Call::Start(None), &Deaf);
            started.unwrap_or_else(|refusal| panic!("{refusal}"));
            let mut tsc = 0;
            bench.iter(|| {
                pmu.observe(&mut core, Progress::Entered { tsc });
                tsc += SET_NS;
                pmu.observe(
                    &mut core,
                    Progress::Left {
                        tsc,
                        halted: 0,
                        ring: None,
                    },
                );
            });
        });
        group.bench_function("4 counters move to another core", |bench| {
            let mut cores = [(); 2].map(|()| CorePmu::new((source.open)()));
            let mut pmu = vcpu(&mut cores[0], 0, 4, source.select);
            let mut at = 0;
            bench.iter(|| {
                pmu.attach(&mut cores[at]);
                pmu.depart(&mut cores[at]);
                at ^= 1;
            });
        });
        group.finish();
    }
}

criterion_group!(benches, switches);
criterion_main!(benches);
