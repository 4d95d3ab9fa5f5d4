//! One PEBS record without the exit that it comes with: record, debug store area, reload,
//! into plain memory.
//!
//! `cargo bench -p pmu-virt --bench pebs`; with registers and page tables the goal is at
//! most 1 µs.

use std::cell::RefCell;
use std::convert::Infallible;
use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use instruction_facts::{Operand, OperandKind};
use pmu_virt::perfmon::{self, Quantities, Wish};
use pmu_virt::{
    Caller, ClockBackend, CorePmu, Grant, Layer, LinearMemory, Moment, MomentRegisters, MsrIndex,
    OwnerId, PmuModel, Progress, Ring, Ticks, Tsc, VcpuPmu,
};

/// A page from address 0 on.
struct Page(RefCell<[u8; 4096]>);

fn range(address: u64, len: usize) -> Option<std::ops::Range<usize>> {
    let first = usize::try_from(address).ok()?;
    let end = first.checked_add(len)?;
    (end <= 4096).then_some(first..end)
}

impl LinearMemory for Page {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let range = range(address, bytes.len());
        range
            .map(|range| bytes.copy_from_slice(&self.0.borrow()[range]))
            .is_some()
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let range = range(address, bytes.len());
        range
            .map(|range| self.0.borrow_mut()[range].copy_from_slice(bytes))
            .is_some()
    }

    fn locate(&self, _: u64) -> Option<(u64, u32)> {
        None
    }
}

/// A guest with nothing in its registers.
struct Still<'a>(&'a Page);

impl Moment for Still<'_> {
    type Error = Infallible;

    fn registers(&mut self) -> Result<Option<MomentRegisters>, Infallible> {
        Ok(Some(black_box(MomentRegisters::default())))
    }

    fn xmm(&mut self) -> Result<[[u8; 16]; 16], Infallible> {
        Ok(black_box(Default::default()))
    }

    fn tsc(&mut self) -> Result<u64, Infallible> {
        Ok(black_box(0))
    }

    fn operand(&mut self, _: OperandKind) -> Option<Operand> {
        None
    }

    fn memory(&mut self) -> Result<&dyn LinearMemory, Infallible> {
        Ok(self.0)
    }

    fn host(
        &mut self,
        _: Wish,
        _: &mut dyn FnMut(&perfmon::Moment, &dyn Quantities),
    ) -> Result<(), Infallible> {
        Ok(())
    }
}

const BUFFER: u64 = 0x800;
const RESET: u64 = (1 << 48) - 100;

/// An overflow and its record, or without PEBS the overflow alone.
fn overflow((pmu, core): (&mut VcpuPmu, &mut CorePmu), now: &mut u64, memory: &Page) {
    *now += 10;
    pmu.observe(core, Progress::Entered { tsc: Tsc(*now) });
    *now += 200;
    pmu.observe(
        core,
        Progress::Left {
            tsc: Tsc(*now),
            halted: Ticks(0),
            ring: Some(Ring::Kernel),
        },
    );
    if pmu.pebs_due() {
        memory.write(0x28, &BUFFER.to_le_bytes());
        let Ok(()) = pmu.take_samples(Some(core), &mut Still(memory));
    }
}

fn records(criterion: &mut Criterion) {
    let cases = [
        ("no PEBS", "intel-v4", 0),
        ("format 3", "intel-v4,pebs=skid,pebs-format=3", 0),
        ("format 4, basic", "intel-v4,pebs=skid", 0),
        ("format 4, all groups", "intel-v4,pebs=skid", 1 << 34),
    ];
    let mut group = criterion.benchmark_group("overflow");
    for (name, model, adaptive) in cases {
        let memory = Page(RefCell::new([0; 4096]));
        let words = [BUFFER, BUFFER, 0x1000, 0x1000, RESET];
        for (word, at) in words.into_iter().zip((0x20..).step_by(8)) {
            memory.write(at, &u64::to_le_bytes(word));
        }
        let model = PmuModel::parse(model).unwrap_or_else(|error| panic!("{error}"));
        let mut core = CorePmu::new(Box::new(ClockBackend::new()));
        let mut pmu = VcpuPmu::detached(OwnerId::default(), model, Grant::everything());
        pmu.attach(&mut core);
        let caller = Caller::legacy(Layer::GuestKernel);
        let writes = [
            (0x3f2, 7),
            (0x3f1, 1),
            (0x186, 0x43_013c | adaptive),
            (0x4c1, RESET),
        ];
        for (msr, value) in writes {
            pmu.wrmsr(&mut core, MsrIndex(msr), value, caller);
        }
        let mut now = 0;
        group.bench_function(name, |bench| {
            bench.iter(|| overflow((&mut pmu, &mut core), &mut now, &memory));
        });
    }
    group.finish();
}

criterion_group!(benches, records);
criterion_main!(benches);
