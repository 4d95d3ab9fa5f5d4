//! `perf` on the model of a kernel: the contract, switches, readings.

use std::num::NonZeroU64;
use std::ops::RangeInclusive;

use pmu_virt::contract::{self, Asked, Driver};
use pmu_virt::perf::PerfBackend;
use pmu_virt::{
    BackendEnv, Caller, ClockBackend, CombinedBackend, Constraint, CorePmu, CountRequest,
    CounterBackend, EventCode, EventFamily, Grant, Layer, MsrIndex, OwnerId, PmuModel, Progress,
    Provenance, ReadOutcome, Reading, Ring, SlotIndex, SlotSet, SoftwareEvent, Ticks, Tsc,
    UnavailableReason, Vendor,
};

use crate::fake::{Call, FAULTS, FakeKernel};
use crate::seated::Seated;
use crate::{Run, Verdict, ensure};

pub(crate) const TESTS: &[(&str, Run)] = &[
    ("model::contract_software", contract_software),
    ("model::contract_hardware", contract_hardware),
    ("model::contract_hardware_with_rdpmc", contract_rdpmc),
    ("model::contract_task_clock", contract_clock),
    (
        "model::without_hardware_cycles_are_the_tsc_s",
        cycles_without_hardware,
    ),
    ("model::a_vcpu_is_paused_by_one_call", paused_by_one_call),
    (
        "model::nothing_is_called_for_what_does_not_run",
        idle_is_free,
    ),
    (
        "model::one_read_serves_every_slot_until_the_next_entry",
        one_read,
    ),
    ("model::owners_do_not_see_each_other", owners),
    (
        "model::vcpus_that_take_turns_open_nothing_anew",
        turns_of_vcpus,
    ),
    ("model::hardware_has_a_last_counter", last_counter),
    ("model::hardware_counters_are_counted", room),
    ("model::a_clock_without_signals_gives_a_deadline", deadline),
    ("model::every_descriptor_is_closed", all_closed),
];

pub(crate) const ENV: BackendEnv = BackendEnv {
    // A tick is a nanosecond, so that the model's clock and counts agree.
    tsc_khz: 1_000_000,
    host_vendor: Some(Vendor::Intel),
    host_events: None,
    overflow_signal: 34,
    steps_cpl3: true,
};
pub(crate) const A: SlotIndex = SlotIndex(0);
pub(crate) const B: SlotIndex = SlotIndex(1);

pub(crate) fn software() -> CountRequest {
    CountRequest::plain(EventCode::Software(FAULTS), true, true)
}

pub(crate) fn hardware() -> CountRequest {
    CountRequest::decode(EventFamily::Intel, 0x53_00c0)
}

pub(crate) fn cycles() -> CountRequest {
    CountRequest::decode(EventFamily::Intel, 0x53_013c)
}

/// The one event that counts time, for which there are bounds of their own.
fn task_clock() -> CountRequest {
    CountRequest::plain(EventCode::Software(SoftwareEvent::TaskClock), true, true)
}

pub(crate) fn backend(kernel: &FakeKernel) -> PerfBackend {
    PerfBackend::with_syscalls(Box::new(kernel.clone()), &ENV)
}

/// Drives the model: events inside of the guest and, to be left out, outside.
struct ModelDriver {
    kernel: FakeKernel,
    request: CountRequest,
    now: u64,
}

impl Driver for ModelDriver {
    fn request(&self) -> CountRequest {
        self.request
    }

    fn uncountable(&self) -> CountRequest {
        CountRequest {
            any_thread: true,
            ..self.request
        }
    }

    fn run(
        &mut self,
        backend: &mut dyn CounterBackend,
        ring: Ring,
        events: u64,
    ) -> RangeInclusive<u64> {
        self.kernel.happen(events / 3, None);
        interval(&self.kernel, backend, &mut self.now, ring, events);
        self.kernel.happen(events / 3, None);
        events..=events
    }

    fn deadline(&mut self, _: &mut dyn CounterBackend) -> Asked {
        Asked::NotTimed
    }
}

fn interval(
    kernel: &FakeKernel,
    backend: &mut dyn CounterBackend,
    now: &mut u64,
    ring: Ring,
    events: u64,
) {
    backend.observe(&Progress::Entered { tsc: Tsc(*now) });
    kernel.happen(events, Some(ring));
    *now += events;
    backend.observe(&Progress::Left {
        tsc: Tsc(*now),
        halted: Ticks(0),
        ring: Some(ring),
    });
}

/// The guest runs for `events` events.
pub(crate) fn run(kernel: &FakeKernel, backend: &mut dyn CounterBackend, events: u64) {
    interval(kernel, backend, &mut 0, Ring::Kernel, events);
}

pub(crate) fn value(backend: &dyn CounterBackend, slot: SlotIndex) -> Result<u64, String> {
    match backend.read(slot) {
        Reading::Counted { value, .. } => Ok(value),
        Reading::Unavailable(reason) => Err(reason.to_string()),
    }
}

pub(crate) fn expect(
    backend: &dyn CounterBackend,
    slot: SlotIndex,
    expected: u64,
) -> Result<(), String> {
    let value = value(backend, slot)?;
    ensure(value == expected, || {
        format!("slot {} read {value} instead of {expected}", slot.0)
    })
}

fn keeps_the_contract(kernel: &FakeKernel, request: CountRequest) -> Result<Verdict, String> {
    let driver = ModelDriver {
        kernel: kernel.clone(),
        request,
        now: 0,
    };
    contract::check(|| Box::new(backend(kernel)), driver)
        .map_err(|violations| format!("{violations:#?}"))?;
    finish(kernel)
}

/// No descriptor was misused.
pub(crate) fn finish(kernel: &FakeKernel) -> Result<Verdict, String> {
    let misuse = kernel.state().misuse.clone();
    ensure(misuse.is_empty(), || format!("{misuse:?}"))?;
    Ok(Verdict::Passed)
}

fn contract_software() -> Result<Verdict, String> {
    keeps_the_contract(&FakeKernel::new(0), software())
}

fn contract_hardware() -> Result<Verdict, String> {
    keeps_the_contract(&FakeKernel::new(64), hardware())
}

fn contract_rdpmc() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(64);
    kernel.state().rdpmc = true;
    keeps_the_contract(&kernel, hardware())
}

fn contract_clock() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(0);
    let plan = backend(&kernel).plan(&task_clock());
    let provenance = plan.map(|plan| plan.provenance);
    ensure(provenance == Ok(Provenance::Exact), || {
        format!("{provenance:?}")
    })?;
    keeps_the_contract(&kernel, task_clock())
}

/// `perf` alone has none then. With `clock` behind it they cost no system call.
fn cycles_without_hardware() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(0);
    let alone = backend(&kernel).plan(&cycles()).map_err(|no| no.reason);
    let refused = Err(UnavailableReason::Refused {
        backend: "perf",
        errno: libc::ENOENT,
    });
    ensure(alone == refused, || format!("{alone:?}"))?;
    let mut both = CombinedBackend::new(vec![
        Box::new(backend(&kernel)),
        Box::new(ClockBackend::new()),
    ]);
    let plan = both.plan(&cycles()).map_err(|no| no.to_string())?;
    let slot = plan.constraint.slots.iter().next().ok_or("no slot")?;
    both.program(slot, &cycles()).map_err(|no| no.to_string())?;
    both.start(slot);
    both.arm(slot, NonZeroU64::new(150));
    kernel.take_calls();
    run(&kernel, &mut both, 100);
    run(&kernel, &mut both, 100);
    let overflows = both.take_overflows();
    ensure(overflows == SlotSet::of(slot), || format!("{overflows}"))?;
    expect(&both, slot, 200)?;
    calls(&kernel, &[], "two entries, a look and a reading")?;
    finish(&kernel)
}

/// A backend with the first `slots` slots programmed and running.
pub(crate) fn counting(
    kernel: &FakeKernel,
    request: CountRequest,
    slots: u8,
) -> Result<PerfBackend, String> {
    let mut backend = backend(kernel);
    for slot in (0..slots).map(SlotIndex) {
        backend
            .program(slot, &request)
            .map_err(|unavailable| unavailable.to_string())?;
    }
    backend.resume((0..slots).map(SlotIndex).collect());
    Ok(backend)
}

fn calls(kernel: &FakeKernel, expected: &[Call], when: &str) -> Result<(), String> {
    let calls = kernel.take_calls();
    ensure(calls == expected, || {
        format!("{when}: {calls:?}, not {expected:?}")
    })
}

fn paused_by_one_call() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(8);
    let mut backend = counting(&kernel, hardware(), 4)?;
    let all: SlotSet = (0..4).map(SlotIndex).collect();
    kernel.take_calls();
    backend.pause(all);
    calls(&kernel, &[Call::Disable], "pause")?;
    backend.resume(all);
    calls(&kernel, &[Call::Enable], "resume")?;
    run(&kernel, &mut backend, 100);
    calls(&kernel, &[], "hardware leaves the host out by itself")?;
    // A part of them is told to the kernel one by one.
    backend.pause(SlotSet::from_iter([A]));
    calls(&kernel, &[Call::Disable], "one of four")?;
    run(&kernel, &mut backend, 10);
    expect(&backend, A, 100)?;
    expect(&backend, B, 110)?;
    // What is stopped while the leader is off costs nothing until it goes on.
    backend.pause(all);
    kernel.take_calls();
    backend.start(A);
    calls(
        &kernel,
        &[
            Call::Enable,
            Call::Disable,
            Call::Disable,
            Call::Disable,
            Call::Enable,
        ],
        "another set",
    )?;
    run(&kernel, &mut backend, 1);
    expect(&backend, A, 101)?;
    expect(&backend, B, 110)?;
    finish(&kernel)
}

fn idle_is_free() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(8);
    let mut backend = counting(&kernel, software(), 3)?;
    backend.pause((0..3).map(SlotIndex).collect());
    kernel.take_calls();
    for _ in 0..3 {
        run(&kernel, &mut backend, 50);
        backend.take_overflows();
    }
    calls(&kernel, &[], "nothing runs")?;
    backend.start(A);
    calls(&kernel, &[], "a software event waits for the guest")?;
    run(&kernel, &mut backend, 50);
    backend.take_overflows();
    calls(
        &kernel,
        &[Call::Enable, Call::Enable, Call::Disable],
        "the first entry",
    )?;
    run(&kernel, &mut backend, 50);
    calls(&kernel, &[Call::Enable, Call::Disable], "a further one")?;
    finish(&kernel)
}

fn one_read() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(8);
    let mut backend = counting(&kernel, software(), 8)?;
    run(&kernel, &mut backend, 50);
    kernel.take_calls();
    for slot in (0..8).map(SlotIndex) {
        expect(&backend, slot, 50)?;
        expect(&backend, slot, 50)?;
    }
    calls(&kernel, &[Call::Read], "eight slots, twice")?;
    kernel.state().rdpmc = true;
    let mut backend = counting(&kernel, hardware(), 8)?;
    run(&kernel, &mut backend, 50);
    kernel.take_calls();
    for slot in (0..8).map(SlotIndex) {
        expect(&backend, slot, 50)?;
    }
    calls(&kernel, &[], "with RDPMC")?;
    finish(&kernel)
}

fn owners() -> Result<Verdict, String> {
    for request in [software(), hardware()] {
        let kernel = FakeKernel::new(8);
        let mut backend = counting(&kernel, request, 1)?;
        run(&kernel, &mut backend, 100);
        backend.arm(A, NonZeroU64::new(50));
        backend.pause(SlotSet::from_iter([A]));
        backend.attach(OwnerId(1));
        backend
            .program(B, &request)
            .map_err(|unavailable| unavailable.to_string())?;
        backend.start(B);
        run(&kernel, &mut backend, 1_000);
        let overflows = backend.take_overflows();
        ensure(overflows.is_empty(), || {
            format!("{overflows}: the other's events")
        })?;
        expect(&backend, A, 100)?;
        expect(&backend, B, 1_000)?;
        backend.release(B);
        backend.attach(OwnerId(0));
        backend.resume(SlotSet::from_iter([A]));
        run(&kernel, &mut backend, 50);
        let overflows = backend.take_overflows();
        ensure(overflows.contains(A), || {
            "its own overflow is not told".to_owned()
        })?;
        expect(&backend, A, 150)?;
        // The vCPU that left has nothing open here.
        let open = kernel.open_events();
        ensure(open == 2, || {
            format!("{open} events are open, not a leader and one")
        })?;
        // Nor has one that goes for good while another is here.
        backend.attach(OwnerId(1));
        backend.release(A);
        let open = kernel.open_events();
        ensure(open == 0, || format!("{open} events are still open"))?;
        finish(&kernel)?;
    }
    Ok(Verdict::Passed)
}

fn turns_of_vcpus() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(4);
    let model =
        PmuModel::parse("intel-v2,counters=4,fixed=0").map_err(|error| error.to_string())?;
    let mut vcpus: Vec<Seated> = (0..4)
        .map(|n| Seated::detached(OwnerId(n), model.clone(), Grant::everything()))
        .collect();
    let mut core = Box::new(CorePmu::new(Box::new(backend(&kernel))));
    for round in 0..3 {
        kernel.take_calls();
        for (n, vcpu) in vcpus.iter_mut().enumerate() {
            vcpu.attach(core);
            if round == 0 {
                for select in 0..4 {
                    vcpu.wrmsr(
                        MsrIndex(0x186 + select),
                        0x43_00c0,
                        Caller::legacy(Layer::GuestKernel),
                    );
                }
                vcpu.wrmsr(MsrIndex(0x38f), 0xf, Caller::legacy(Layer::GuestKernel));
            }
            vcpu.observe(Progress::Entered { tsc: Tsc(0) });
            kernel.happen(100, Some(Ring::Kernel));
            vcpu.observe(Progress::Left {
                tsc: Tsc(100),
                halted: Ticks(0),
                ring: Some(Ring::Kernel),
            });
            let count = vcpu.rdpmc(3, Caller::legacy(Layer::GuestKernel));
            ensure(count == ReadOutcome::Value(100 * (round + 1)), || {
                format!("vCPU {n} reads {count:?} in round {round}")
            })?;
            core = vcpu.park().ok_or("no core")?;
        }
        let opened = kernel.take_calls();
        ensure(round == 0 || !opened.contains(&Call::Open), || {
            format!("round {round}: {opened:?}")
        })?;
    }
    for vcpu in &mut vcpus {
        vcpu.leave(&mut core);
    }
    drop(core);
    finish(&kernel)
}

fn last_counter() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(2);
    let mut backend = counting(&kernel, hardware(), 2)?;
    let full = backend.program(SlotIndex(2), &hardware());
    let text = full
        .err()
        .map(|unavailable| unavailable.to_string())
        .unwrap_or_default();
    ensure(text.contains("no free counter among its 2"), || {
        text.clone()
    })?;
    run(&kernel, &mut backend, 7);
    expect(&backend, A, 7)?;
    finish(&kernel)
}

fn constraint(backend: &PerfBackend, request: &CountRequest) -> Result<Constraint, String> {
    let plan = backend.plan(request).map_err(|no| no.to_string())?;
    Ok(plan.constraint)
}

/// What the assignment of counters gets to know.
fn room() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(4);
    let mut backend = backend(&kernel);
    // What a guest is told of events is found before there is a vCPU: with one trial
    // each. How many fit is nobody's question then.
    backend.plan(&hardware()).map_err(|no| no.to_string())?;
    calls(&kernel, &[Call::Open], "no vCPU yet")?;
    backend.attach(OwnerId(0));
    for (request, room) in [
        (hardware(), 4),
        (cycles(), 4),
        (software(), backend.capacity()),
        (task_clock(), backend.capacity()),
    ] {
        for _ in 0..2 {
            let constraint = constraint(&backend, &request)?;
            ensure(constraint == Constraint::any(room), || {
                format!("'{request}': {constraint:?}, not {room} slots")
            })?;
        }
    }
    ensure(kernel.open_events() == 0, || {
        "the trial left events open".to_owned()
    })?;
    kernel.take_calls();
    constraint(&backend, &hardware())?;
    calls(&kernel, &[], "asked once more")?;
    finish(&kernel)
}

fn deadline() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(0);
    // An unprivileged user: only what leaves the kernel out is opened.
    kernel.fail(Call::Open, 1, libc::EACCES);
    let mut backend = counting(&kernel, task_clock(), 1)?;
    backend.arm(A, NonZeroU64::new(500));
    let mut now = 10_000;
    backend.observe(&Progress::Entered { tsc: Tsc(now) });
    let deadline = backend.deadline();
    ensure(deadline == Some(Tsc(10_500)), || format!("{deadline:?}"))?;
    for (events, due) in [(400, false), (100, true), (1_000, false)] {
        interval(&kernel, &mut backend, &mut now, Ring::Kernel, events);
        let told = backend.take_overflows().contains(A);
        ensure(told == due, || format!("after {events} more: {told}"))?;
    }
    // What is left is time, and the deadline is in ticks.
    kernel.fail(Call::Open, 1, libc::EACCES);
    let env = BackendEnv {
        tsc_khz: 2_500_000,
        ..ENV
    };
    let mut backend = PerfBackend::with_syscalls(Box::new(kernel.clone()), &env);
    backend
        .program(A, &task_clock())
        .map_err(|no| no.to_string())?;
    backend.start(A);
    backend.arm(A, NonZeroU64::new(500));
    backend.observe(&Progress::Entered { tsc: Tsc(10_000) });
    let deadline = backend.deadline();
    ensure(deadline == Some(Tsc(11_250)), || format!("{deadline:?}"))?;
    finish(&kernel)
}

fn all_closed() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(8);
    let mut backend = counting(&kernel, hardware(), 3)?;
    for slot in 3..6 {
        backend
            .program(SlotIndex(slot), &software())
            .map_err(|unavailable| unavailable.to_string())?;
    }
    drop(backend);
    let open = kernel.open_events();
    ensure(open == 0, || format!("{open} events are still open"))?;
    finish(&kernel)
}
