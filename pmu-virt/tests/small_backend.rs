//! A backend with fewer counters than the model: one counter at a time.

use std::num::NonZeroU64;

use pmu_virt::{
    Caller, ClockBackend, Constraint, CountPlan, CountRequest, CounterBackend, CounterId, Grant,
    Layer, MsrIndex, PmuModel, Progress, Provenance, ReadOutcome, Reading, SlotIndex, SlotSet,
    Ticks, Tsc, Unavailable, UnavailableReason, WriteOutcome,
};

use crate::seated::Seated;

/// A clock with a single slot.
#[derive(Debug)]
struct Small(ClockBackend);

impl CounterBackend for Small {
    fn name(&self) -> &'static str {
        "small"
    }
    fn capacity(&self) -> usize {
        1
    }
    fn plan(&self, request: &CountRequest) -> Result<CountPlan, Unavailable> {
        Ok(CountPlan {
            constraint: Constraint::any(self.capacity()),
            ..self.0.plan(request)?
        })
    }
    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable> {
        assert_eq!(slot, SlotIndex(0), "only one slot exists");
        self.0.program(slot, request)
    }
    fn release(&mut self, slot: SlotIndex) {
        self.0.release(slot);
    }
    fn start(&mut self, slot: SlotIndex) {
        self.0.start(slot);
    }
    fn stop(&mut self, slot: SlotIndex) {
        self.0.stop(slot);
    }
    fn read(&self, slot: SlotIndex) -> Reading {
        self.0.read(slot)
    }
    fn arm(&mut self, slot: SlotIndex, after: Option<NonZeroU64>) {
        self.0.arm(slot, after);
    }
    fn observe(&mut self, progress: &Progress) {
        self.0.observe(progress);
    }
    fn take_overflows(&mut self) -> SlotSet {
        self.0.take_overflows()
    }
    fn deadline(&self) -> Option<Tsc> {
        self.0.deadline()
    }
    fn needs_ring(&self) -> bool {
        self.0.needs_ring()
    }
}

#[test]
fn the_counter_that_finds_no_place_says_so_and_takes_the_place_once_free() {
    let model = PmuModel::parse("amd-core").expect("a model");
    let small = Box::new(Small(ClockBackend::new()));
    let mut pmu = Seated::new(model, small, Grant::everything());
    let write = |pmu: &mut Seated, msr, value| {
        let outcome = pmu.wrmsr(MsrIndex(msr), value, Caller::legacy(Layer::GuestKernel));
        assert_eq!(outcome, WriteOutcome::Done);
    };
    let mut now = 0;
    let mut run = |pmu: &mut Seated| {
        pmu.observe(Progress::Entered { tsc: Tsc(now) });
        now += 100;
        pmu.observe(Progress::Left {
            tsc: Tsc(now),
            halted: Ticks(0),
            ring: None,
        });
    };
    let count = |pmu: &mut Seated, n| pmu.rdpmc(n, Caller::legacy(Layer::GuestKernel));
    write(&mut pmu, 0xc001_0200, 0x43_0076);
    write(&mut pmu, 0xc001_0202, 0x43_0076);
    run(&mut pmu);
    assert_eq!(count(&mut pmu, 0), ReadOutcome::Value(100));
    assert_eq!(count(&mut pmu, 1), ReadOutcome::Value(0));
    let report = pmu.report();
    assert_eq!(report[1].counter, CounterId::Programmable(1));
    let Reading::Unavailable(reason @ UnavailableReason::Conflict(_)) = report[1].reading else {
        panic!("it has a place: {:?}", report[1]);
    };
    assert_eq!(
        reason.to_string(),
        "no place for it: counters PMC0 and PMC1 need slot 0"
    );
    // The first one is given up: the second has its place at once.
    write(&mut pmu, 0xc001_0200, 0);
    run(&mut pmu);
    assert_eq!(count(&mut pmu, 0), ReadOutcome::Value(100));
    assert_eq!(count(&mut pmu, 1), ReadOutcome::Value(100));
}
