//! Instruction-based sampling between its registers, a source and whoever samples.

use crate::limited::Limited;
use crate::seated::Seated;
use pmu_virt::ibs::{BranchRecord, DataAddress, MemoryRecord, OpRecord, OpSample};
use pmu_virt::{
    Caller, Claimant, ClockBackend, CorePmu, CounterBackend, Grant, IbsDue, IbsKind, IbsSample,
    Layer, MsrIndex, PmuModel, Progress, ReadOutcome, Retirement, Ring, StepBackend, Ticks, Tsc,
};

const KERNEL: Caller = Caller::legacy(Layer::GuestKernel);
const FETCH: u32 = 0xc001_1030;
const OP: u32 = 0xc001_1033;
const FETCH_EN: u64 = 1 << 48;
const OP_EN: u64 = 1 << 17;
const OP_VAL: u64 = 1 << 18;
const OPS: u64 = 1 << 19;

fn guest(spec: &str, backend: impl CounterBackend + 'static) -> Seated {
    let model = PmuModel::parse(spec).expect(spec);
    Seated::new(model, Box::new(backend), Grant::everything())
}

fn write(pmu: &mut Seated, msr: u32, value: u64) {
    pmu.wrmsr(MsrIndex(msr), value, KERNEL);
}

fn read(pmu: &mut Seated, msr: u32) -> u64 {
    match pmu.rdmsr(MsrIndex(msr), KERNEL) {
        ReadOutcome::Value(value) => value,
        other => panic!("{other:?}"),
    }
}

fn retire(pmu: &mut Seated) {
    pmu.observe(Progress::Retired {
        ring: Ring::User,
        insn: Retirement::default(),
    });
}

fn run(pmu: &mut Seated, from: u64, ticks: u64) {
    pmu.observe(Progress::Entered { tsc: Tsc(from) });
    pmu.observe(Progress::Left {
        tsc: Tsc(from + ticks),
        halted: Ticks(0),
        ring: Some(Ring::Kernel),
    });
}

#[test]
fn the_very_op_falls_due_and_is_told_as_it_was() {
    let mut pmu = guest("amd-core,ibs=on", StepBackend::new());
    for written in [0, 5, 15] {
        write(&mut pmu, OP, 1 | OP_EN | OPS | written << 32);
        assert!(pmu.needs().stepping);
        for done in written + 1..16 {
            retire(&mut pmu);
            assert_eq!(pmu.ibs_due(), None);
            assert_eq!(read(&mut pmu, OP) >> 32, done);
        }
        retire(&mut pmu);
        assert_eq!(pmu.ibs_due(), Some(IbsKind::Op));
        // Nobody sees it before it is told.
        assert_eq!(read(&mut pmu, OP) & OP_VAL, 0);
        pmu.sampled(IbsSample::Op(OpSample::Exact(OpRecord {
            rip: 0x1000,
            branch: Some(BranchRecord {
                target: Some(0x2000),
                is_return: false,
            }),
            memory: Some(MemoryRecord {
                load: false,
                store: true,
                address: Some(DataAddress {
                    linear: 0x3000,
                    physical: Some(0x4000),
                    bytes: 8,
                }),
            }),
        })));
        assert_eq!(read(&mut pmu, OP) & (OP_VAL | 0xffff), OP_VAL | 1);
        assert_eq!(read(&mut pmu, 0xc001_1034), 0x1000);
        assert_eq!(read(&mut pmu, 0xc001_1035), 1 << 37 | 1 << 35);
        assert_eq!(read(&mut pmu, 0xc001_1037), 2 | 1 << 17 | 1 << 18 | 4 << 22);
        assert_eq!(read(&mut pmu, 0xc001_1038), 0x3000);
        assert_eq!(read(&mut pmu, 0xc001_1039), 0x4000);
        assert_eq!(read(&mut pmu, 0xc001_103b), 0x2000);
        // It stands, and need not be stepped.
        assert!(!pmu.needs().stepping);
    }
}

#[test]
fn random_bits_differ_from_sample_to_sample() {
    let mut pmu = guest("amd-core,ibs=on", StepBackend::new());
    let mut counts = Vec::new();
    for _ in 0..8 {
        write(&mut pmu, OP, 1 | OP_EN | OPS | 15 << 32);
        retire(&mut pmu);
        pmu.sampled(IbsSample::Op(OpSample::Near { rip: 0 }));
        counts.push(read(&mut pmu, OP) >> 32);
    }
    assert!(counts.iter().all(|count| *count < 128));
    counts.sort_unstable();
    counts.dedup();
    assert!(counts.len() > 4, "{counts:?}");
}

/// A sampler takes a physical counter, which the others have to do without.
#[test]
fn samplers_are_placed_like_counters() {
    let mut pmu = guest("amd-core,ibs=on", Limited::clock(2));
    write(&mut pmu, OP, 0x1000 | OP_EN);
    write(&mut pmu, FETCH, 0x1000 | FETCH_EN);
    let holders = pmu.core().expect("a core").holders();
    let names: Vec<String> = holders.iter().map(|one| one.holder.to_string()).collect();
    assert_eq!(
        names,
        ["IBSOP of vCPU 0's guest", "IBSFETCH of vCPU 0's guest"]
    );
    assert!(
        holders
            .iter()
            .all(|one| matches!(one.holder, Claimant::Guest { .. }))
    );
    // The third finds none.
    write(&mut pmu, 0xc001_0200, 0x43_0076);
    run(&mut pmu, 1000, 100);
    assert_eq!(read(&mut pmu, 0xc001_0201), 0);
    assert_eq!(read(&mut pmu, OP) >> 32, 100);
    // One that stands makes room.
    write(&mut pmu, OP, 0);
    run(&mut pmu, 2000, 100);
    assert_eq!(read(&mut pmu, 0xc001_0201), 100);
}

/// A sampler that is found to have come to its maximum stops, and another counter gets its
/// place, when the others have been saved.
#[test]
fn samplers_are_saved_last() {
    let mut pmu = guest("amd-core,ibs=on", Limited::late_clock(1).lossy());
    write(&mut pmu, OP, 1 | OP_EN);
    write(&mut pmu, 0xc001_0200, 0x43_0076);
    run(&mut pmu, 1000, 100);
    assert_eq!(pmu.ibs_due(), None);
    let state = serde_json::to_value(pmu.save()).expect("a state");
    assert_eq!(pmu.ibs_due(), Some(IbsKind::Op));
    assert!(pmu.report().iter().any(|one| one.loss.is_some()));
    let counter = &state["counters"][0];
    assert!(counter["loss"].is_null(), "{counter}");
}

#[test]
fn an_overflow_is_asked_for_in_time() {
    let mut pmu = guest("amd-core,ibs=on", ClockBackend::new());
    write(&mut pmu, OP, 0x10 | OP_EN | 0x20 << 32);
    pmu.observe(Progress::Entered { tsc: Tsc(5000) });
    assert_eq!(pmu.deadline(), Some(5000 + 0x100 - 0x20));
}

/// A vCPU that is moved goes on where it was, also to a core with other sources.
#[test]
fn it_goes_with_the_vcpu() {
    let mut pmu = guest("amd-core,ibs=on", ClockBackend::new());
    write(&mut pmu, OP, 0x10 | OP_EN);
    write(&mut pmu, FETCH, 2 | FETCH_EN);
    run(&mut pmu, 1000, 16);
    drop(pmu.depart());
    pmu.attach(Box::new(CorePmu::new(Box::new(ClockBackend::new()))));
    run(&mut pmu, 2000, 15);
    assert_eq!(pmu.ibs_due(), None);
    assert_eq!(read(&mut pmu, OP) >> 32, 31);
    drop(pmu.depart());
    // Steps have no cycles: ops stand, fetches are instructions.
    pmu.attach(Box::new(CorePmu::new(Box::new(StepBackend::new()))));
    retire(&mut pmu);
    assert_eq!(pmu.ibs_due(), Some(IbsKind::Fetch));
    assert_eq!(read(&mut pmu, OP) >> 32, 31);
}

/// Interrupts of samples are apart by the floor; none is lost, and they merge.
#[test]
fn interrupts_keep_their_distance() {
    let mut pmu = guest("amd-core,ibs=on", ClockBackend::new()).with_pmi_floor(1000);
    write(&mut pmu, 0x850, 0x400);
    let mut now = 10_000;
    let mut sample = |pmu: &mut Seated| {
        write(pmu, OP, 1 | OP_EN);
        run(pmu, now, 20);
        now += 20;
        pmu.sampled(IbsSample::Op(OpSample::Near { rip: 0 }));
        now
    };
    let send = IbsDue::Send { vector: 0x400 };
    let first = sample(&mut pmu);
    assert!(pmu.has_interrupt());
    assert_eq!(pmu.ibs_interrupt(Tsc(first)), send);
    assert_eq!(pmu.ibs_interrupt(Tsc(first)), IbsDue::Nothing);
    let second = sample(&mut pmu);
    assert_eq!(pmu.ibs_interrupt(Tsc(second)), IbsDue::Late);
    assert_eq!(pmu.ibs_interrupt(Tsc(second)), IbsDue::Nothing);
    assert_eq!(pmu.interrupt_due(), Some(Tsc(first + 1000)));
    let third = sample(&mut pmu);
    assert_eq!(pmu.ibs_interrupt(Tsc(third)), IbsDue::Nothing);
    // It was let through when the sample came, whatever the entry says now.
    write(&mut pmu, 0x850, 0x1_0400);
    assert_eq!(pmu.ibs_interrupt(Tsc(first + 1000)), send);
    assert_eq!(pmu.interrupt_due(), None);
    assert!(!pmu.has_interrupt());
}

/// A state has the section only where the model does.
#[test]
fn a_state_without_samples_is_as_it_was() {
    let plain = serde_json::to_string(&guest("amd-core", ClockBackend::new()).save());
    assert!(!plain.expect("a state").contains("ibs"));
    let mut sampling = guest("amd-core,ibs=on", ClockBackend::new());
    write(&mut sampling, OP, 0x10 | OP_EN);
    let text = serde_json::to_string(&sampling.save()).expect("a state");
    // Of before, or with less in it: the registers are as after a reset.
    let mut value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let section = value.as_object_mut().and_then(|state| state.remove("ibs"));
    let section = section.expect("a section");
    let state = serde_json::from_value(value.clone()).expect("a state");
    let mut other = guest("amd-core,ibs=on", ClockBackend::new());
    other.restore(&state).expect("a state without the section");
    assert_eq!(read(&mut other, OP), 0);
    // In the state of a model without.
    value["ibs"] = section;
    value["model"] = "amd-core,counters=6,fixed=0,width=48,fixed-width=0,full-width=off".into();
    let state = serde_json::from_value(value).expect("a state");
    let error = guest("amd-core", ClockBackend::new()).restore(&state);
    assert_eq!(
        error.expect_err("a section too many").to_string(),
        "it has the registers of IBS, and the model has none; give --pmu with ibs=on"
    );
}
