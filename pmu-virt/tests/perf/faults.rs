//! What comes of a kernel that refuses, takes away or answers wrongly.

use crate::fake::{Call, FakeKernel};
use crate::model::{A, B, ENV, backend, counting, cycles, expect, finish, hardware, run, software};
use crate::seated::Seated;
use crate::{Run, Verdict, ensure};
use arbiter::abi;
use pmu_virt::accounting::MSR_BASE;
use pmu_virt::perf::PerfBackend;
use pmu_virt::{
    Caller, CounterBackend, Grant, Layer, MsrIndex, PmuModel, Progress, Provenance, ReadOutcome,
    Reading, Ring, SlotSet, Ticks, Tsc, UnavailableReason,
};
use std::num::NonZeroU64;

pub(crate) const TESTS: &[(&str, Run)] = &[
    ("faults::refusals_are_told_with_their_errno", refusals),
    (
        "faults::a_refusal_at_programming_leaves_nothing_open",
        half_opened,
    ),
    ("faults::an_interrupted_call_is_repeated", interrupted),
    ("faults::what_may_pass_is_tried_again", transient),
    ("faults::a_lost_pin_is_told", lost_pin),
    (
        "faults::a_loss_is_told_at_the_exit_that_shows_it",
        loss_at_exit,
    ),
    (
        "faults::without_a_page_a_loss_is_told_in_time",
        loss_without_page,
    ),
    (
        "faults::what_is_tried_again_costs_no_other_its_counter",
        tried_again,
    ),
    ("faults::a_guest_hears_of_a_loss", guest_hears),
    ("faults::an_owner_hears_of_a_loss", owner_hears),
    ("faults::a_short_read_is_told", short_read),
    ("faults::a_failing_call_is_told", failing_calls),
    ("faults::a_part_of_the_time_is_scaled_and_labelled", scaled),
    ("faults::never_on_a_counter_is_no_zero", never_on),
    ("faults::another_thread_is_told", other_thread),
    ("faults::a_lost_page_costs_a_read", lost_page),
    (
        "faults::another_thread_reads_by_system_call",
        read_elsewhere,
    ),
];

const NAME: &str = "perf";

fn reason(backend: &PerfBackend) -> Option<UnavailableReason> {
    match backend.read(A) {
        Reading::Unavailable(reason) => Some(reason),
        Reading::Counted { .. } => None,
    }
}

fn expect_reason(backend: &PerfBackend, expected: UnavailableReason) -> Result<(), String> {
    let seen = backend.read(A);
    ensure(seen == Reading::Unavailable(expected), || {
        format!("{seen:?}, not {expected:?}")
    })
}

fn refused(errno: i32) -> UnavailableReason {
    UnavailableReason::Refused {
        backend: NAME,
        errno,
    }
}

const LOST: UnavailableReason = UnavailableReason::Lost { backend: NAME };
const BUSY: UnavailableReason = UnavailableReason::Busy { backend: NAME };

fn refusals() -> Result<Verdict, String> {
    for errno in [
        libc::EACCES,
        libc::EPERM,
        libc::ENOENT,
        libc::ENODEV,
        libc::EOPNOTSUPP,
        libc::ENOSPC,
        libc::EMFILE,
        libc::EBUSY,
    ] {
        let expected = if errno == libc::EBUSY {
            BUSY
        } else {
            refused(errno)
        };
        let kernel = FakeKernel::new(4);
        kernel.fail(Call::Open, 1, errno);
        let mut backend = backend(&kernel);
        let answer = backend.program(A, &hardware()).map_err(|no| no.reason);
        ensure(answer == Err(expected), || {
            format!("{answer:?}, not {expected:?}")
        })?;
        run(&kernel, &mut backend, 10);
        let reading = backend.read(A);
        ensure(matches!(reading, Reading::Unavailable(_)), || {
            format!("{reading:?}")
        })?;
        finish(&kernel)?;
    }
    Ok(Verdict::Passed)
}

fn half_opened() -> Result<Verdict, String> {
    // The trial, the leader, the event.
    for (call, before) in [
        (Call::Id, 0),
        (Call::Signal, 0),
        (Call::Open, 1),
        (Call::Open, 2),
    ] {
        let kernel = FakeKernel::new(4);
        let mut backend = backend(&kernel);
        if call == Call::Open {
            // Let the trial through, so that the refusal meets the real thing.
            backend.plan(&hardware()).map_err(|no| no.to_string())?;
            if before == 2 {
                backend
                    .program(B, &hardware())
                    .map_err(|no| no.to_string())?;
            }
        }
        kernel.fail(call, 1, libc::EMFILE);
        let open = kernel.open_events();
        let answer = backend.program(A, &hardware()).map_err(|no| no.reason);
        ensure(answer == Err(refused(libc::EMFILE)), || {
            format!("{call:?}: {answer:?}")
        })?;
        let after = kernel.open_events();
        ensure(after <= open.max(1), || {
            format!("{call:?}: {after} open, {open} before")
        })?;
        drop(backend);
        ensure(kernel.open_events() == 0, || {
            "events stayed open".to_owned()
        })?;
        finish(&kernel)?;
    }
    Ok(Verdict::Passed)
}

fn interrupted() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(4);
    for call in [
        Call::Open,
        Call::Id,
        Call::Signal,
        Call::Enable,
        Call::Disable,
        Call::Period,
    ] {
        kernel.fail(call, 3, libc::EINTR);
    }
    kernel.fail(Call::Read, 3, libc::EINTR);
    let mut backend = counting(&kernel, software(), 1)?;
    backend.arm(A, NonZeroU64::new(20));
    run(&kernel, &mut backend, 20);
    expect(&backend, A, 20)?;
    let told = backend.take_overflows().contains(A);
    ensure(told, || "the overflow was not told".to_owned())?;
    // A storm of them is a failure like another.
    kernel.fail(Call::Read, 100, libc::EINTR);
    run(&kernel, &mut backend, 20);
    expect_reason(&backend, refused(libc::EINTR))?;
    finish(&kernel)
}

fn transient() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(4);
    let mut backend = backend(&kernel);
    for errno in [libc::EMFILE, libc::EBUSY, libc::ENOMEM] {
        kernel.fail(Call::Open, 1, errno);
        let answer = backend.program(A, &hardware());
        ensure(answer.is_err(), || format!("{answer:?}"))?;
        let answer = backend.program(A, &hardware());
        ensure(answer.is_ok(), || {
            format!("after errno {errno}: {answer:?}")
        })?;
    }
    finish(&kernel)
}

/// After a loss: unavailable, silent, and good again once programmed anew.
fn lost_then_found(
    kernel: &FakeKernel,
    backend: &mut PerfBackend,
    expected: UnavailableReason,
) -> Result<(), String> {
    expect_reason(backend, expected)?;
    expect_reason(backend, expected)?;
    let told = backend.take_overflows();
    ensure(told.contains(A), || format!("{told}: A is not told"))?;
    let told = backend.take_overflows();
    ensure(told.is_empty(), || format!("{told} is told twice"))?;
    backend.start(A);
    run(kernel, backend, 10);
    expect_reason(backend, expected)?;
    let open = kernel.open_events();
    ensure(open == 0, || {
        format!("{open} events of a lost group are open")
    })?;
    {
        let mut state = kernel.state();
        state.unpinned = false;
        state.short_by = 0;
    }
    backend
        .program(A, &hardware())
        .map_err(|no| no.to_string())?;
    backend.start(A);
    run(kernel, backend, 10);
    expect(backend, A, 10)
}

fn lost_pin() -> Result<Verdict, String> {
    for rdpmc in [false, true] {
        let kernel = FakeKernel::new(4);
        kernel.state().rdpmc = rdpmc;
        let mut backend = counting(&kernel, hardware(), 2)?;
        run(&kernel, &mut backend, 10);
        expect(&backend, A, 10)?;
        backend.arm(A, NonZeroU64::new(5));
        kernel.state().unpinned = true;
        run(&kernel, &mut backend, 10);
        lost_then_found(&kernel, &mut backend, LOST)?;
        finish(&kernel)?;
    }
    Ok(Verdict::Passed)
}

/// The event's page tells, so it costs nothing before and one call then.
fn loss_at_exit() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(4);
    kernel.state().rdpmc = true;
    let mut backend = counting(&kernel, hardware(), 2)?;
    kernel.take_calls();
    run(&kernel, &mut backend, 10);
    let told = backend.take_overflows();
    let calls = kernel.take_calls();
    ensure(told.is_empty() && calls.is_empty(), || {
        format!("{told}, {calls:?}")
    })?;
    kernel.state().unpinned = true;
    run(&kernel, &mut backend, 10);
    let asked = kernel.take_calls();
    let told = backend.take_overflows();
    let both: SlotSet = [A, B].into_iter().collect();
    ensure(told == both && asked == [Call::Read], || {
        format!("{told}, {asked:?}")
    })?;
    // What is given back is nobody's to hear of.
    let mut backend = counting(&kernel, hardware(), 1)?;
    run(&kernel, &mut backend, 10);
    backend.release(A);
    let told = backend.take_overflows();
    ensure(told.is_empty(), || format!("{told} after release"))?;
    finish(&kernel)
}

/// A tool of the host takes one of two counters. One of the guest's two goes on, whichever
/// is programmed first, and the other one each time it is tried is told without harm.
fn tried_again() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(2);
    kernel.state().rdpmc = true;
    let mut backend = counting(&kernel, hardware(), 2)?;
    run(&kernel, &mut backend, 10);
    kernel.state().counters = 1;
    run(&kernel, &mut backend, 10);
    let told = backend.take_overflows();
    ensure(told == [A, B].into_iter().collect(), || told.to_string())?;
    let program = |backend: &mut PerfBackend, slot| {
        let done = backend.program(slot, &hardware());
        backend.start(slot);
        done.map(drop).map_err(|refusal| refusal.reason)
    };
    ensure(program(&mut backend, A) == Ok(()), || "A".to_owned())?;
    for round in 1..4 {
        run(&kernel, &mut backend, 10);
        let again = program(&mut backend, B);
        ensure(again == Err(LOST), || format!("B: {again:?}"))?;
        expect(&backend, A, 10 * round)?;
    }
    let told = backend.take_overflows();
    ensure(told.is_empty(), || format!("{told} lost again"))?;
    kernel.state().counters = 2;
    ensure(program(&mut backend, B) == Ok(()), || "B".to_owned())?;
    run(&kernel, &mut backend, 10);
    expect(&backend, A, 40)?;
    expect(&backend, B, 10)?;
    finish(&kernel)
}

/// The guest is stopped for a look, and the look is one call.
fn loss_without_page() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(4);
    let mut backend = counting(&kernel, hardware(), 1)?;
    kernel.state().unpinned = true;
    let look = Tsc(10 * u64::from(ENV.tsc_khz));
    let mut now = 0;
    for (ticks, due) in [(look.0 - 1, false), (1, true)] {
        backend.observe(&Progress::Entered { tsc: Tsc(now) });
        let deadline = backend.deadline();
        ensure(deadline == Some(look), || format!("{deadline:?}"))?;
        kernel.take_calls();
        now += ticks;
        backend.observe(&Progress::Left {
            tsc: Tsc(now),
            halted: Ticks(0),
            ring: None,
        });
        let asked = kernel.take_calls() == [Call::Read];
        let told = backend.take_overflows().contains(A);
        ensure(told == due && asked == due, || {
            format!("at {now}: told {told}, asked {asked}")
        })?;
    }
    // Nothing is at risk any more.
    backend.observe(&Progress::Entered { tsc: Tsc(now) });
    let deadline = backend.deadline();
    ensure(deadline.is_none(), || format!("{deadline:?}"))?;
    finish(&kernel)
}

/// Its counter stands still, the page says why, and it counts once it is enabled anew.
fn guest_hears() -> Result<Verdict, String> {
    const GLOBAL_CTRL: MsrIndex = MsrIndex(0x38f);
    // Unavailable, because the host took the physical counter away.
    const TAKEN: u64 = 4 | 6 << 8;
    let guest = Caller::legacy(Layer::GuestKernel);
    let kernel = FakeKernel::new(4);
    kernel.state().rdpmc = true;
    let model =
        PmuModel::parse("intel-v2,counters=4,fixed=0").map_err(|error| error.to_string())?;
    let mut vcpu = Seated::new(model, Box::new(backend(&kernel)), Grant::everything());
    let run = |vcpu: &mut Seated| {
        vcpu.observe(Progress::Entered { tsc: Tsc(0) });
        kernel.happen(100, Some(Ring::Kernel));
        vcpu.observe(Progress::Left {
            tsc: Tsc(100),
            halted: Ticks(0),
            ring: Some(Ring::Kernel),
        });
    };
    // An overflow is due after 150 instructions.
    let begin = 150_u32.wrapping_neg();
    for (msr, value) in [(0xc1, begin.into()), (0x186, 0x53_00c0), (0x38f, 1)] {
        vcpu.wrmsr(MsrIndex(msr), value, guest);
    }
    run(&mut vcpu);
    let settled = vcpu.rdpmc(0, guest);
    kernel.state().unpinned = true;
    run(&mut vcpu);
    let pmi = vcpu.take_pmi();
    ensure(pmi.is_none(), || format!("{pmi:?} of a lost counter"))?;
    vcpu.rdmsr(MsrIndex(MSR_BASE), guest);
    let seen = [
        vcpu.rdmsr(MsrIndex(MSR_BASE + 0x100), guest),
        vcpu.rdpmc(0, guest),
    ];
    let expected = [ReadOutcome::Value(TAKEN), settled];
    ensure(seen == expected, || format!("{seen:x?}"))?;
    kernel.state().unpinned = false;
    for value in [0, 1] {
        vcpu.wrmsr(GLOBAL_CTRL, value, guest);
    }
    run(&mut vcpu);
    let count = vcpu.rdpmc(0, guest);
    ensure(
        count == ReadOutcome::Value(50) && vcpu.take_pmi().is_some(),
        || format!("{count:x?}, and no PMI"),
    )?;
    drop(vcpu);
    finish(&kernel)
}

/// What is reserved is held: its owner hears that the host's kernel has taken the physical
/// counter, and that it counts again, without having done anything.
fn owner_hears() -> Result<Verdict, String> {
    const TICKS_PER_MS: u64 = 1_000;
    let kernel = FakeKernel::new(4);
    kernel.state().rdpmc = true;
    let model =
        PmuModel::parse("intel-v2,counters=4,fixed=0").map_err(|error| error.to_string())?;
    let seated = Seated::new(model, Box::new(backend(&kernel)), Grant::everything());
    let mut vcpu = seated.with_own_reservations(TICKS_PER_MS);
    let mut tsc = 0;
    let mut run = |vcpu: &mut Seated, ms: u64| {
        vcpu.observe(Progress::Entered { tsc: Tsc(tsc) });
        kernel.happen(100, Some(Ring::Kernel));
        tsc += ms * TICKS_PER_MS;
        vcpu.observe(Progress::Left {
            tsc: Tsc(tsc),
            halted: Ticks(0),
            ring: Some(Ring::Kernel),
        });
    };
    let owner = |presented| Caller {
        layer: Layer::GuestKernel,
        presented,
    };
    // PMC1, open to legacy accesses.
    let msr = |offset: u32| MsrIndex(abi::MSR_BASE + offset + 1);
    for (msr, value, presented) in [
        (msr(abi::MSR_MANAGEMENT_KEY), 7, 0),
        (MsrIndex(0x187), 0x53_00c0, 0),
        (MsrIndex(0x38f), 2, 0),
    ] {
        vcpu.wrmsr(msr, value, owner(presented));
    }
    let notice = |vcpu: &mut Seated| {
        let notice = MsrIndex(abi::MSR_BASE + abi::MSR_NOTICE);
        match vcpu.rdmsr(notice, owner(0)) {
            ReadOutcome::Value(word) => Ok(word & abi::NOTICE_KIND_MASK),
            other => Err(format!("{other:?}")),
        }
    };
    run(&mut vcpu, 1);
    ensure(notice(&mut vcpu)? == abi::NOTICE_NONE, || {
        "too early".to_owned()
    })?;
    kernel.state().unpinned = true;
    run(&mut vcpu, 1);
    ensure(notice(&mut vcpu)? == abi::NOTICE_TAKEN, || {
        "nobody told".to_owned()
    })?;
    for _ in 0..5 {
        run(&mut vcpu, 10);
        ensure(notice(&mut vcpu)? == abi::NOTICE_NONE, || {
            "told again".to_owned()
        })?;
    }
    kernel.state().unpinned = false;
    // It is tried after 10 ms, after 20 more, and so on.
    let mut told = [abi::NOTICE_NONE; 20];
    for told in &mut told {
        run(&mut vcpu, 10);
        *told = notice(&mut vcpu)?;
    }
    let backs = told.iter().filter(|told| **told == abi::NOTICE_BACK);
    ensure(backs.count() == 1, || format!("{told:?}"))?;
    let mut count = || match vcpu.rdpmc(1, owner(0)) {
        ReadOutcome::Value(count) => Ok(count),
        other => Err(format!("{other:?}")),
    };
    let before = count()?;
    run(&mut vcpu, 1);
    let after = vcpu.rdpmc(1, owner(0));
    ensure(after == ReadOutcome::Value(before + 100), || {
        format!("{before} {after:?}")
    })?;
    // Nothing is due any more, and the next loss is news.
    let due = vcpu.deadline();
    ensure(due.is_none_or(|due| due > vcpu.claims().time().0), || {
        format!("{due:?}")
    })?;
    kernel.state().unpinned = true;
    run(&mut vcpu, 1);
    ensure(notice(&mut vcpu)? == abi::NOTICE_TAKEN, || {
        "no news".to_owned()
    })?;
    drop(vcpu);
    finish(&kernel)
}

fn short_read() -> Result<Verdict, String> {
    for short_by in [8, 16, 40] {
        let kernel = FakeKernel::new(4);
        let mut backend = counting(&kernel, hardware(), 2)?;
        run(&kernel, &mut backend, 10);
        kernel.state().short_by = short_by;
        lost_then_found(&kernel, &mut backend, LOST)?;
        finish(&kernel)?;
    }
    Ok(Verdict::Passed)
}

fn failing_calls() -> Result<Verdict, String> {
    for call in [Call::Enable, Call::Disable, Call::Period, Call::Read] {
        let kernel = FakeKernel::new(4);
        let mut backend = counting(&kernel, software(), 1)?;
        run(&kernel, &mut backend, 10);
        expect(&backend, A, 10)?;
        kernel.fail(call, 1, libc::EIO);
        backend.arm(A, NonZeroU64::new(50));
        run(&kernel, &mut backend, 10);
        ensure(reason(&backend) == Some(refused(libc::EIO)), || {
            format!("{call:?}: {:?}", backend.read(A))
        })?;
        finish(&kernel)?;
    }
    Ok(Verdict::Passed)
}

fn scaled() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(4);
    let mut backend = counting(&kernel, hardware(), 1)?;
    run(&kernel, &mut backend, 1_000);
    let label = |value, provenance| Reading::Counted { value, provenance };
    let seen = backend.read(A);
    ensure(seen == label(1_000, Provenance::Hardware), || {
        format!("{seen:?}")
    })?;
    kernel.state().running_percent = 25;
    run(&kernel, &mut backend, 1_000);
    let seen = backend.read(A);
    ensure(seen == label(2_000, Provenance::Scaled), || {
        format!("{seen:?}")
    })?;
    // The label stays, for the count contains what was extrapolated.
    kernel.state().running_percent = 100;
    run(&kernel, &mut backend, 1_000);
    let seen = backend.read(A);
    ensure(seen == label(3_000, Provenance::Scaled), || {
        format!("{seen:?}")
    })?;
    finish(&kernel)
}

fn never_on() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(4);
    let mut backend = counting(&kernel, hardware(), 1)?;
    kernel.state().running_percent = 0;
    run(&kernel, &mut backend, 1_000);
    expect_reason(&backend, BUSY)?;
    kernel.state().running_percent = 100;
    run(&kernel, &mut backend, 1_000);
    expect(&backend, A, 2_000)?;
    finish(&kernel)
}

fn other_thread() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(4);
    let mut backend = counting(&kernel, cycles(), 1)?;
    run(&kernel, &mut backend, 10);
    let moved = kernel.clone();
    let backend = std::thread::spawn(move || {
        run(&moved, &mut backend, 10);
        backend
    });
    let mut backend = backend.join().map_err(|_| "it panicked".to_owned())?;
    lost_then_found(&kernel, &mut backend, LOST)?;
    finish(&kernel)
}

fn lost_page() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(4);
    kernel.state().rdpmc = true;
    kernel.fail(Call::Map, 1, libc::EPERM);
    let mut backend = PerfBackend::with_syscalls(Box::new(kernel.clone()), &ENV);
    backend
        .program(A, &hardware())
        .map_err(|no| no.to_string())?;
    backend.start(A);
    run(&kernel, &mut backend, 10);
    kernel.take_calls();
    expect(&backend, A, 10)?;
    let calls = kernel.take_calls();
    ensure(calls == [Call::Read], || format!("{calls:?}"))?;
    finish(&kernel)
}

/// RDPMC there would read the counter of another CPU.
fn read_elsewhere() -> Result<Verdict, String> {
    let kernel = FakeKernel::new(4);
    kernel.state().rdpmc = true;
    let mut backend = counting(&kernel, hardware(), 1)?;
    run(&kernel, &mut backend, 10);
    kernel.take_calls();
    let reader = std::thread::spawn(move || (backend.read(A), backend));
    let (reading, backend) = reader.join().map_err(|_| "it panicked".to_owned())?;
    let expected = Reading::Counted {
        value: 10,
        provenance: Provenance::Hardware,
    };
    ensure(reading == expected, || format!("{reading:?}"))?;
    let calls = kernel.take_calls();
    ensure(calls == [Call::Read], || format!("{calls:?}"))?;
    drop(backend);
    finish(&kernel)
}
