//! Counters that take turns while the guest keeps stopping them, and places
//! that are lost or cannot be had.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};

use pmu_virt::{
    Caller, ClockBackend, Constraint, CorePmu, CountPlan, CountRequest, CounterBackend,
    CounterReport, Grant, Layer, MsrIndex, Oversubscribe, OwnerId, PmuModel, Progress, Provenance,
    RateTable, ReadOutcome, Reading, Ring, SimBackend, SlotIndex, SlotSet, Ticks, Tsc, Unavailable,
    UnavailableReason,
};
use proptest::collection::vec;
use proptest::prelude::{Strategy, any, prop_assert_eq, prop_oneof, proptest};

use crate::limited::Limited;
use crate::seated::Seated;

const KERNEL: Caller = Caller::legacy(Layer::GuestKernel);
const TURN: u64 = 1_000;

/// Reference cycles without and with OS alone.
const CYCLES: u64 = 0x43_0076;
const GLOBAL_CONTROL: u32 = 0x38f;

fn taking_turns(spec: &str, backend: impl CounterBackend + 'static) -> Seated {
    let model = PmuModel::parse(spec).expect("a model");
    let turn = NonZeroU64::new(TURN).expect("not zero");
    let mut pmu = Seated::detached(OwnerId(0), model, Grant::everything())
        .with_oversubscription(Oversubscribe::Multiplex { timeslice: turn });
    pmu.attach(Box::new(CorePmu::new(Box::new(backend))));
    pmu
}

fn write(pmu: &mut Seated, msr: u32, value: u64) {
    pmu.wrmsr(MsrIndex(msr), value, KERNEL);
}

fn run(pmu: &mut Seated, now: &mut u64, ticks: u64) {
    pmu.observe(Progress::Entered { tsc: Tsc(*now) });
    *now += ticks;
    pmu.observe(Progress::Left {
        tsc: Tsc(*now),
        halted: Ticks(0),
        ring: Some(Ring::Kernel),
    });
}

fn count(pmu: &mut Seated, n: u32) -> u64 {
    match pmu.rdpmc(n, KERNEL) {
        ReadOutcome::Value(value) => value,
        other => panic!("{other:?}"),
    }
}

/// A driver stops all counters in an interrupt, and starts them again after a
/// timeslice was due: nobody is skipped for that.
#[test]
fn a_timeslice_that_is_due_while_counters_stand_starves_nobody() {
    let mut pmu = taking_turns("intel-v2,counters=4,fixed=3", Limited::clock(1));
    for n in 0..2 {
        write(&mut pmu, 0x186 + n, 0x43_003c);
    }
    write(&mut pmu, GLOBAL_CONTROL, 3);
    let mut now = 0;
    for _ in 0..100 {
        run(&mut pmu, &mut now, TURN);
        run(&mut pmu, &mut now, TURN / 2);
        write(&mut pmu, GLOBAL_CONTROL, 0);
        run(&mut pmu, &mut now, TURN / 2 + 100);
        write(&mut pmu, GLOBAL_CONTROL, 3);
    }
    let times: Vec<_> = pmu
        .report()
        .iter()
        .map(|report| (report.time_enabled.0, report.time_running.0))
        .collect();
    assert_eq!(times.len(), 2, "{times:?}");
    for (enabled, running) in &times {
        assert!(*running >= enabled / 4, "{times:?}");
    }
}

/// `windows` of 100 ticks each, between which the guest stops its counters for
/// 100 more. A clock counts one event a tick, so all that was enabled is known.
fn check_windows(spec: &str, wanted: u32, slots: usize, switch: impl Fn(&mut Seated, bool)) {
    const WINDOWS: u64 = 200;
    let mut pmu = taking_turns(spec, Limited::clock(slots));
    let mut now = 0;
    for _ in 0..WINDOWS {
        switch(&mut pmu, true);
        run(&mut pmu, &mut now, 100);
        switch(&mut pmu, false);
        run(&mut pmu, &mut now, 100);
    }
    let reports = pmu.report();
    for (n, report) in (0..wanted).zip(&reports) {
        let (enabled, running) = (report.time_enabled.0, report.time_running.0);
        assert_eq!(enabled, WINDOWS * 100);
        let fair = enabled * slots as u64 / u64::from(wanted);
        assert!(
            running.abs_diff(fair) <= 2 * TURN,
            "PMC{n} ran {running} of {fair}"
        );
        // What it waited last is yet to be filled.
        let value = count(&mut pmu, n);
        let owed = (u64::from(wanted) + 1) * TURN;
        assert!(
            (enabled - owed..=enabled).contains(&value),
            "PMC{n} is {value} of {enabled}"
        );
    }
}

#[test]
fn counters_that_are_stopped_within_each_turn_all_get_theirs() {
    check_windows("amd-core", 3, 1, |pmu, on| {
        for n in 0..3 {
            write(pmu, 0xc001_0200 + 2 * n, if on { CYCLES } else { 0x3_0076 });
        }
    });
    check_windows("intel-v2,counters=4", 4, 2, |pmu, on| {
        if on && pmu.report().is_empty() {
            for n in 0..4 {
                write(pmu, 0x186 + n, 0x43_013c);
            }
        }
        write(pmu, GLOBAL_CONTROL, if on { 0xf } else { 0 });
    });
}

/// What the host does to a [`Fickle`] clock.
#[derive(Debug, Default)]
struct Host {
    /// Slots whose counter is gone until they are programmed again.
    lost: SlotSet,
    /// Nothing is known now; it comes back by itself.
    busy: bool,
    /// Requests of this ring filter are refused when they are programmed.
    refuse_user_only: bool,
    programmed: usize,
}

/// A clock on a host that takes counters away.
#[derive(Debug)]
struct Fickle(Limited, Arc<Mutex<Host>>);

fn tick(pmu: &mut Seated, tsc: u64) {
    pmu.observe(Progress::Entered { tsc: Tsc(tsc) });
    pmu.observe(Progress::Left {
        tsc: Tsc(tsc + 100),
        halted: Ticks(0),
        ring: None,
    });
}

#[test]
fn a_lost_place_is_not_inherited() {
    let (fickle, host) = Fickle::new(1);
    let model = PmuModel::parse("amd-core").expect("a model");
    let vcpu = |n| Seated::detached(OwnerId(n), model.clone(), Grant::everything());
    let (mut first, mut second) = (vcpu(1), vcpu(2));
    first.attach(Box::new(CorePmu::new(Box::new(fickle))));
    write(&mut first, 0xc001_0200, 0x43_0076);
    tick(&mut first, 0);
    host.lock().expect("not poisoned").lost.insert(SlotIndex(0));
    // The first one hears of it before it goes.
    first.rdpmc(0, Caller::legacy(Layer::GuestKernel));
    write(&mut second, 0xc001_0200, 0x43_0076);
    second.attach(first.park().expect("a core"));
    tick(&mut second, 1_000);
    let count = second.rdpmc(0, Caller::legacy(Layer::GuestKernel));
    assert_eq!(count, ReadOutcome::Value(100));
}

#[test]
fn a_control_written_away_from_the_core_is_taken_up_there() {
    let model = PmuModel::parse("amd-core").expect("a model");
    let mut pmu = Seated::detached(OwnerId(1), model, Grant::everything());
    let (fickle, host) = Fickle::new(2);
    pmu.attach(Box::new(CorePmu::new(Box::new(fickle))));
    write(&mut pmu, 0xc001_0200, 0x43_0076);
    tick(&mut pmu, 0);
    let core = pmu.park().expect("a core");
    // Now it counts CPL 3 alone.
    write(&mut pmu, 0xc001_0200, 0x41_0076);
    pmu.attach(core);
    assert_eq!(host.lock().expect("not poisoned").programmed, 2);
    // And now it does not count.
    let core = pmu.park().expect("a core");
    write(&mut pmu, 0xc001_0200, 0x01_0076);
    pmu.attach(core);
    assert!(!pmu.needs().counting);
    tick(&mut pmu, 1_000);
    let before = pmu.rdpmc(0, Caller::legacy(Layer::GuestKernel));
    write(&mut pmu, 0xc001_0200, 0x41_0076);
    assert_eq!(pmu.rdpmc(0, Caller::legacy(Layer::GuestKernel)), before);
}

impl Fickle {
    fn new(slots: usize) -> (Self, Arc<Mutex<Host>>) {
        let host = Arc::new(Mutex::new(Host::default()));
        (Fickle(Limited::clock(slots), host.clone()), host)
    }
    fn host(&self) -> std::sync::MutexGuard<'_, Host> {
        self.1.lock().expect("not poisoned")
    }
}

impl CounterBackend for Fickle {
    fn name(&self) -> &'static str {
        "fickle"
    }
    fn capacity(&self) -> usize {
        self.0.capacity()
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
        let mut host = self.1.lock().expect("not poisoned");
        host.programmed += 1;
        host.lost.remove(slot);
        if host.refuse_user_only && !request.os {
            let reason = UnavailableReason::Refused {
                backend: "fickle",
                errno: 22,
            };
            return Err(Unavailable { reason });
        }
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
        let host = self.host();
        if host.busy {
            return Reading::Unavailable(UnavailableReason::Busy { backend: "fickle" });
        }
        if host.lost.contains(slot) {
            Reading::Unavailable(UnavailableReason::Lost { backend: "fickle" })
        } else {
            self.0.read(slot)
        }
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
    fn is_shared(&self, _: SlotIndex) -> bool {
        true
    }
}

fn only_report(pmu: &Seated) -> CounterReport {
    let reports = pmu.report();
    assert_eq!(reports.len(), 1);
    reports[0]
}

fn alone(backend: Fickle) -> Seated {
    let model = PmuModel::parse("amd-core").expect("a model");
    Seated::new(model, Box::new(backend), Grant::everything())
}

#[test]
fn a_lost_place_is_replaced_when_the_guest_enables_its_counter_again() {
    let (backend, host) = Fickle::new(2);
    let mut pmu = alone(backend);
    let mut now = 0;
    write(&mut pmu, 0xc001_0200, CYCLES);
    run(&mut pmu, &mut now, 100);
    assert_eq!(count(&mut pmu, 0), 100);
    host.lock().expect("not poisoned").lost = SlotSet::below(2);
    run(&mut pmu, &mut now, 100);
    assert_eq!(count(&mut pmu, 0), 100, "it keeps its value");
    let lost = only_report(&pmu);
    assert_eq!(
        lost.reading,
        Reading::Unavailable(UnavailableReason::Lost { backend: "fickle" })
    );
    assert_eq!((lost.time_enabled.0, lost.time_running.0), (200, 100));
    // What a driver does at the next event of the same kind.
    write(&mut pmu, 0xc001_0200, 0x3_0076);
    write(&mut pmu, 0xc001_0200, CYCLES);
    run(&mut pmu, &mut now, 100);
    assert_eq!(count(&mut pmu, 0), 200);
    let found = only_report(&pmu);
    assert_eq!((found.time_enabled.0, found.time_running.0), (300, 200));
    assert_eq!(
        found.reading,
        Reading::Counted {
            value: 200,
            provenance: Provenance::Scaled
        },
        "a part of the time is missing"
    );
}

#[test]
fn a_place_that_is_left_for_an_uncountable_event_goes_to_who_was_refused() {
    let (backend, _) = Fickle::new(1);
    let mut pmu = alone(backend);
    write(&mut pmu, 0xc001_0200, CYCLES);
    write(&mut pmu, 0xc001_0202, CYCLES);
    assert!(!pmu.report()[1].running);
    write(&mut pmu, 0xc001_0200, 0x43_00c0);
    assert!(pmu.report()[1].running, "{:?}", pmu.report());
}

#[test]
fn what_is_counted_again_is_no_longer_unavailable() {
    let (backend, host) = Fickle::new(1);
    let mut pmu = alone(backend);
    let mut now = 0;
    write(&mut pmu, 0xc001_0200, CYCLES);
    host.lock().expect("not poisoned").busy = true;
    run(&mut pmu, &mut now, 100);
    assert_eq!(count(&mut pmu, 0), 0);
    assert!(matches!(
        only_report(&pmu).reading,
        Reading::Unavailable(UnavailableReason::Busy { .. })
    ));
    host.lock().expect("not poisoned").busy = false;
    run(&mut pmu, &mut now, 100);
    assert_eq!(count(&mut pmu, 0), 200, "the source missed nothing");
    assert!(matches!(only_report(&pmu).reading, Reading::Counted { .. }));
    assert_eq!(host.lock().expect("not poisoned").programmed, 1);
}

#[test]
fn a_counter_that_cannot_be_programmed_does_not_starve_the_next() {
    let (backend, host) = Fickle::new(1);
    host.lock().expect("not poisoned").refuse_user_only = true;
    let mut pmu = taking_turns("amd-core", backend);
    let mut now = 0;
    write(&mut pmu, 0xc001_0202, CYCLES);
    write(&mut pmu, 0xc001_0204, CYCLES);
    write(&mut pmu, 0xc001_0200, 0x41_0076);
    for _ in 0..100 {
        run(&mut pmu, &mut now, TURN / 10);
    }
    for waited in &pmu.report()[1..] {
        assert!(waited.time_running.0 >= 2 * TURN, "{waited:?}");
    }
}

#[test]
fn simulated_counts_are_simulated_in_turns_as_well() {
    let table = RateTable::parse("[event.cycles]\nrate = 1000", "t.toml").expect("a table");
    let sim = Limited::of(Box::new(SimBackend::new(table, 1_000_000)), 1);
    let mut pmu = taking_turns("amd-core", sim);
    let mut now = 0;
    write(&mut pmu, 0xc001_0200, CYCLES);
    write(&mut pmu, 0xc001_0202, CYCLES);
    for _ in 0..10 {
        run(&mut pmu, &mut now, TURN);
    }
    for report in pmu.report() {
        assert!(
            matches!(
                report.reading,
                Reading::Counted {
                    provenance: Provenance::Simulated,
                    ..
                }
            ),
            "{report:?}"
        );
    }
}

#[test]
fn a_refused_time_is_not_made_up_after_a_restore() {
    let model = PmuModel::parse("amd-core").expect("a model");
    let mut narrow = Seated::new(
        model.clone(),
        Box::new(Limited::clock(1)),
        Grant::everything(),
    );
    let mut now = 0;
    write(&mut narrow, 0xc001_0200, CYCLES);
    write(&mut narrow, 0xc001_0202, CYCLES);
    run(&mut narrow, &mut now, 500);
    let state = narrow.save();
    let mut wide = Seated::new(model, Box::new(ClockBackend::new()), Grant::everything());
    wide.restore(&state).expect("the same model");
    run(&mut wide, &mut now, 100);
    assert_eq!((count(&mut wide, 0), count(&mut wide, 1)), (600, 100));
}

/// What happens to a guest whose counters take turns.
#[derive(Clone, Debug)]
enum Step {
    Run(u64),
    Enable(u32, bool),
    Read(u32),
    /// Another vCPU with this many counters has the core meanwhile.
    Away(u32),
    /// To another core, with all counts.
    Migrate,
}

fn step(counters: u32) -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u64..2 * TURN).prop_map(Step::Run),
        4 => (0..counters, any::<bool>()).prop_map(|(n, on)| Step::Enable(n, on)),
        2 => (0..counters).prop_map(Step::Read),
        1 => (0..4u32).prop_map(Step::Away),
        1 => proptest::strategy::Just(Step::Migrate),
    ]
}

proptest! {
    /// A clock counts one event a tick, so a count is the time that it was
    /// enabled, but for what it still waits to fill, to the tick.
    #[test]
    fn every_enabled_tick_is_counted_or_owed(
        slots in 1usize..5,
        shared in any::<bool>(),
        steps in vec(step(4), 1..120),
    ) {
        let clock = || if shared { Limited::clock(slots).shared() } else { Limited::clock(slots) };
        let mut pmu = taking_turns("amd-core", clock());
        let mut other = Seated::detached(OwnerId(1), pmu.model().clone(), Grant::everything());
        let (mut now, mut last) = (0, [0; 4]);
        for step in steps {
            match step {
                Step::Run(ticks) => run(&mut pmu, &mut now, ticks),
                Step::Enable(n, on) => {
                    write(&mut pmu, 0xc001_0200 + 2 * n, if on { CYCLES } else { 0x3_0076 });
                }
                Step::Read(n) => {
                    let value = count(&mut pmu, n);
                    prop_assert_eq!(value, value.max(last[n as usize]), "it fell");
                    last[n as usize] = value;
                }
                Step::Away(counters) => {
                    other.attach(pmu.park().expect("a core"));
                    for n in 0..counters {
                        write(&mut other, 0xc001_0200 + 2 * n, CYCLES);
                    }
                    run(&mut other, &mut now, 50);
                    pmu.attach(other.park().expect("a core"));
                }
                Step::Migrate => {
                    let mut core = pmu.depart().expect("a core");
                    other.leave(&mut core);
                    pmu.attach(Box::new(CorePmu::new(Box::new(clock()))));
                }
            }
            let state = serde_json::to_value(pmu.save()).expect("a state");
            for n in 0..4 {
                let saved = &state["counters"][n];
                let [enabled, owed, events] = ["time-enabled", "time-unaccounted", "events"]
                    .map(|field| saved[field].as_u64().expect("a number"));
                prop_assert_eq!(events, enabled - owed, "PMC{} of {}", n, state);
            }
        }
    }
}
