//! A virtual PMU without a VMM: a guest programs a counter, runs, and the counter
//! overflows. The events are made up by the `sim` backend, 2 instructions a
//! microsecond.
//!
//! `cargo run -p pmu-virt --example overflow`

use std::convert::Infallible;

use pmu_virt::{
    Caller, CorePmu, Grant, Layer, MsrIndex, OwnerId, PmiLine, PmiRequest, PmuModel, Progress,
    RateTable, Ring, SimBackend, Ticks, Tsc, VcpuPmu,
};

const SELECT: MsrIndex = MsrIndex(0x186);
const COUNTER: MsrIndex = MsrIndex(0x4c1);
const TSC_KHZ: u32 = 1_000_000;

/// The guest's, which lets every PMI through.
struct LocalApic;

impl PmiLine for LocalApic {
    type Error = Infallible;

    fn latch(&mut self, _: PmiRequest) -> Result<bool, Infallible> {
        Ok(true)
    }

    fn send(&mut self, request: PmiRequest) -> Result<bool, Infallible> {
        println!("a PMI for {:?}", request.counters);
        Ok(true)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rates = RateTable::parse("[event.instructions]\nrate = 2\n", "example.toml")?;
    let backend = SimBackend::new(rates, TSC_KHZ);
    // The core belongs to a thread, and lends itself to the vCPU that runs on it.
    let mut core = CorePmu::new(Box::new(backend));
    let model = PmuModel::parse("intel-v2")?;
    let mut pmu = VcpuPmu::detached(OwnerId(0), model, Grant::everything());
    pmu.attach(&mut core);

    // What the VMM does at trapped accesses of the guest's kernel: instructions in
    // both rings, with an interrupt, 1000 events before the counter wraps.
    let kernel = Caller::legacy(Layer::GuestKernel);
    let written = pmu.wrmsr(&mut core, SELECT, 0x53_00c0, kernel);
    println!("the select is written: {written:?}");
    pmu.wrmsr(&mut core, COUNTER, (1 << 48) - 1000, kernel);

    // It runs for a millisecond, and is left.
    pmu.observe(&mut core, Progress::Entered { tsc: Tsc(0) });
    println!("to be left at {:?}", pmu.deadline(&core).map(|at| at.0));
    pmu.observe(
        &mut core,
        Progress::Left {
            tsc: Tsc(1_000_000),
            halted: Ticks(0),
            ring: Some(Ring::Kernel),
        },
    );
    let Ok(forwarded) = pmu.interrupts_mut().forward(Tsc(1_000_000), &mut LocalApic);
    println!("its PMI: {forwarded:?}");
    let count = pmu.rdmsr(&mut core, COUNTER, kernel).outcome;
    println!("the counter reads {count:?}");
    for report in pmu.report(Some(&core)) {
        println!("{}: {}, {:?}", report.counter, report.event, report.reading);
    }
    Ok(())
}
