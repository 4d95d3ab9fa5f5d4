//! What the tables of registers do not say: grants, needs, deadlines, reports.

use pmu_virt::{
    Caller, ClockBackend, CorePmu, CounterBackend, CounterId, Denial, EventFamily, Grant, Layer,
    LossReason, MsrIndex, Needs, NotSettled, OwnerId, PmiForwarded, PmiRequest, PmuModel, Progress,
    Provenance, ReadOutcome, Reading, Ring, StepBackend, Ticks, Tsc, UnavailableReason, VcpuPmu,
    WriteOutcome,
};

use crate::seated::{Line, Seated};

const GUEST: Caller = Caller::legacy(Layer::GuestKernel);
const REF: u64 = 0x43_013c;
const REF_INT: u64 = 0x53_013c;

fn pmu(spec: &str, backend_name: &str, grant: Grant) -> Seated {
    let model = PmuModel::parse(spec).expect(spec);
    let backend: Box<dyn CounterBackend> = match backend_name {
        "clock" => Box::new(ClockBackend::new()),
        "step" => Box::new(StepBackend::new()),
        other => panic!("no backend for tests is called {other}"),
    };
    Seated::new(model, backend, grant)
}

fn write(pmu: &mut Seated, msr: u32, value: u64) {
    assert_eq!(pmu.wrmsr(MsrIndex(msr), value, GUEST), WriteOutcome::Done);
}

fn run(pmu: &mut Seated, from: u64, to: u64) {
    pmu.observe(Progress::Entered { tsc: Tsc(from) });
    pmu.observe(Progress::Left {
        tsc: Tsc(to),
        halted: Ticks(0),
        ring: Some(Ring::Kernel),
    });
}

#[test]
fn a_counter_outside_of_the_grant_faults_or_drops_and_never_counts() {
    let granted = [CounterId::Programmable(0), CounterId::Fixed(1)];
    let drop = Denial::Drop { read_as: 0x55 };
    for (denial, read, wrote) in [
        (Denial::Fault, ReadOutcome::Gp, WriteOutcome::Gp),
        (drop, ReadOutcome::Value(0x55), WriteOutcome::Done),
    ] {
        let mut pmu = pmu("intel-v2", "clock", Grant::of(granted, denial));
        for msr in [0xc2, 0x187, 0x4c2, 0x30b] {
            assert_eq!(pmu.rdmsr(MsrIndex(msr), GUEST), read, "{msr:#x}");
            assert_eq!(pmu.wrmsr(MsrIndex(msr), REF, GUEST), wrote, "{msr:#x}");
        }
        assert_eq!(pmu.rdpmc(1, Caller::legacy(Layer::GuestUser)), read);
        assert_eq!(
            pmu.rdpmc(0x4000_0002, Caller::legacy(Layer::GuestUser)),
            read
        );
        // A shared control is open, and has no effect on what is not granted.
        write(&mut pmu, 0x38f, 0x7_0000_000f);
        write(&mut pmu, 0x38d, 0x030);
        write(&mut pmu, 0x186, REF);
        run(&mut pmu, 0, 100);
        assert_eq!(pmu.rdpmc(0, GUEST), ReadOutcome::Value(100));
        assert_eq!(pmu.rdpmc(0x4000_0001, GUEST), ReadOutcome::Value(100));
        // The hypervisor sees past the grant: nothing was written or counted.
        for (msr, value) in [(0xc2, 0), (0x187, 0), (0x30b, 0), (0x38d, 0x030)] {
            let seen = pmu.rdmsr(MsrIndex(msr), Caller::legacy(Layer::Hypervisor));
            assert_eq!(seen, ReadOutcome::Value(value), "{msr:#x}");
        }
        let refused = Reading::Unavailable(UnavailableReason::NotGranted);
        let report = pmu.report();
        let fixed2 = report.iter().find(|r| r.counter == CounterId::Fixed(2));
        assert!(fixed2.is_none(), "its field is 0");
        write(&mut pmu, 0x38d, 0xb30);
        let report = pmu.report();
        let fixed2 = report.iter().find(|r| r.counter == CounterId::Fixed(2));
        assert_eq!(fixed2.map(|r| r.reading), Some(refused));
    }
}

#[test]
fn needs_follow_what_runs() {
    let none = Needs::default();
    let counting = Needs {
        counting: true,
        ..none
    };
    let ring = Needs {
        ring: true,
        ..counting
    };
    let stepping = Needs {
        stepping: true,
        ..counting
    };
    for (backend, select, expected) in [
        ("clock", REF, counting),
        ("clock", REF & !(1 << 16), ring),
        ("clock", REF & !(1 << 22), none),
        ("clock", 0x43_00c0, none),
        ("step", 0x43_00c0, stepping),
        ("step", 0x41_00c0, stepping),
        ("step", REF, none),
    ] {
        let mut pmu = pmu("intel-v2", backend, Grant::everything());
        assert_eq!(pmu.needs(), none);
        write(&mut pmu, 0x186, select);
        assert_eq!(pmu.needs(), expected, "{backend} {select:#x}");
        write(&mut pmu, 0x38f, 0);
        assert_eq!(pmu.needs(), none, "disabled globally");
        write(&mut pmu, 0x38f, 1);
        assert_eq!(pmu.needs(), expected, "enabled again");
        pmu.reset();
        assert_eq!(pmu.needs(), none, "after reset");
        assert!(pmu.report().is_empty());
    }
}

/// Beside counters that count, those whose event nobody counts ask for nothing: no slot,
/// no operation, no kick, no ring. Reads of them yield what they hold.
#[test]
fn counters_that_nobody_counts_cost_nothing() {
    const HELD: u64 = 0x1234;
    // The backend, what counts, and what does not: other events, modifiers, and
    // with INT.
    for (backend, live, dead) in [
        (
            "clock",
            vec![0x43_0076, 0x53_0076],
            vec![0x53_00c0, 0x43_00c2, 0x53_ffff],
        ),
        ("clock", vec![], vec![0x53_00c0, 0x57_0076, 0x153_0076]),
        ("clock", vec![0x41_0076], vec![0xd3_0076, 0x53_00c0]),
        (
            "step",
            vec![0x53_00c0],
            vec![0x53_0076, 0x43_00c3, 0x57_00c0],
        ),
        ("step", vec![], vec![0x53_0076]),
    ] {
        let program = |pmu: &mut Seated, select: &[u64], first: usize| {
            for (n, select) in (first..).zip(select) {
                let n = u32::try_from(n).expect("a small number");
                write(pmu, 0xc001_0201 + 2 * n, HELD);
                write(pmu, 0xc001_0200 + 2 * n, *select);
            }
        };
        let mut alone = pmu("amd-core", backend, Grant::everything());
        assert!(!alone.has_enabled());
        program(&mut alone, &live, 0);
        assert_eq!(alone.has_enabled(), !live.is_empty());
        let mut both = pmu("amd-core", backend, Grant::everything());
        program(&mut both, &live, 0);
        program(&mut both, &dead, live.len());
        assert!(both.has_enabled(), "RDPMC of them is legal");

        let cost = |pmu: &mut Seated| {
            let mut seen = Vec::new();
            for tsc in [1_000, 2_000, 3_000] {
                pmu.observe(Progress::Entered { tsc: Tsc(tsc) });
                let deadline = pmu.deadline();
                pmu.observe(Progress::Retired {
                    ring: Ring::Kernel,
                    insn: Default::default(),
                });
                pmu.observe(Progress::Left {
                    tsc: Tsc(tsc + 500),
                    halted: Ticks(0),
                    ring: Some(Ring::Kernel),
                });
                let core = pmu.core().expect("a core");
                seen.push((
                    deadline,
                    pmu.needs(),
                    core.operations(),
                    core.holders().len(),
                ));
            }
            seen
        };
        assert_eq!(cost(&mut both), cost(&mut alone), "{backend} {dead:x?}");
        for n in (live.len()..).take(dead.len()) {
            let n = u32::try_from(n).expect("a small number");
            assert_eq!(
                both.rdpmc(n, GUEST),
                ReadOutcome::Value(HELD),
                "{backend} PMC{n}"
            );
        }
    }
}

#[test]
fn a_deadline_is_the_nearest_overflow_that_interrupts() {
    let mut pmu = pmu("intel-v2", "clock", Grant::everything());
    let deadline_at = |pmu: &mut Seated, tsc| {
        pmu.observe(Progress::Entered { tsc: Tsc(tsc) });
        let deadline = pmu.deadline();
        pmu.observe(Progress::Left {
            tsc: Tsc(tsc),
            halted: Ticks(0),
            ring: None,
        });
        deadline
    };
    write(&mut pmu, 0xc1, 0xffff_ff00);
    write(&mut pmu, 0xc2, 0xffff_f000);
    write(&mut pmu, 0x186, REF);
    assert_eq!(deadline_at(&mut pmu, 50), None, "nobody waits without INT");
    write(&mut pmu, 0x187, REF_INT);
    assert_eq!(deadline_at(&mut pmu, 50), Some(50 + 0x1000));
    write(&mut pmu, 0x186, REF_INT);
    assert_eq!(deadline_at(&mut pmu, 60), Some(60 + 0x100));
    run(&mut pmu, 100, 120);
    assert_eq!(deadline_at(&mut pmu, 200), Some(200 + 0x100 - 20));
    run(&mut pmu, 300, 300 + 0x100 - 20);
    let pmi = pmu.take_pmi().expect("an overflow");
    assert_eq!(pmi.counters.bits(), 1);
    assert_eq!(deadline_at(&mut pmu, 700), Some(700 + 0x1000 - 0x100));
    write(&mut pmu, 0x38f, 0);
    assert_eq!(deadline_at(&mut pmu, 800), None);
    assert!(pmu.take_pmi().is_none());
}

#[test]
fn halted_time_does_not_count() {
    let mut pmu = pmu("amd-core", "clock", Grant::everything());
    write(&mut pmu, 0xc001_0200, 0x43_0076);
    pmu.observe(Progress::Entered { tsc: Tsc(1_000) });
    pmu.observe(Progress::Left {
        tsc: Tsc(2_000),
        halted: Ticks(400),
        ring: None,
    });
    assert_eq!(pmu.rdpmc(0, GUEST), ReadOutcome::Value(600));
    // Nonsense does not run backwards.
    pmu.observe(Progress::Entered { tsc: Tsc(3_000) });
    pmu.observe(Progress::Left {
        tsc: Tsc(2_900),
        halted: Ticks(u64::MAX),
        ring: None,
    });
    pmu.observe(Progress::Left {
        tsc: Tsc(9_000),
        halted: Ticks(0),
        ring: None,
    });
    assert_eq!(pmu.rdpmc(0, GUEST), ReadOutcome::Value(600));
}

#[test]
fn reports_label_every_count() {
    let mut pmu = pmu("intel-v2", "clock", Grant::everything());
    let counted = |value, provenance| Reading::Counted { value, provenance };
    write(&mut pmu, 0x186, REF);
    write(&mut pmu, 0x187, 0x43_003c);
    write(&mut pmu, 0x188, 0x42_003c);
    write(&mut pmu, 0x189, 0x43_00c0);
    run(&mut pmu, 0, 100);
    let instructions = UnavailableReason::Event {
        backend: "clock",
        event: pmu_virt::CountRequest::decode(EventFamily::Intel, 0xc0).event,
    };
    let expected = [
        ("reference cycles", counted(100, Provenance::Exact), true),
        ("core cycles", counted(100, Provenance::Derived), true),
        ("core cycles:k", counted(100, Provenance::Scaled), true),
        ("instructions", Reading::Unavailable(instructions), false),
    ];
    let report = pmu.report();
    assert_eq!(report.len(), expected.len());
    for (report, (event, reading, running)) in report.iter().zip(expected) {
        assert_eq!(report.event.to_string(), event);
        assert_eq!(
            (report.reading, report.running),
            (reading, running),
            "{event}"
        );
    }
    assert_eq!(
        instructions.to_string(),
        "the clock backend cannot count instructions"
    );
}

#[test]
fn a_loss_shows_in_the_report() {
    let mut pmu = pmu("amd-core", "step", Grant::everything());
    write(&mut pmu, 0xc001_0200, 0x43_00c0);
    let reason = LossReason::EventDelivery;
    pmu.observe(Progress::Lost { reason });
    let lost = pmu.report()[0];
    assert_eq!(lost.loss, Some(reason));
    assert!(matches!(
        lost.reading,
        Reading::Counted {
            provenance: Provenance::Scaled,
            ..
        }
    ));
    // Enabling again does not mend it; programming anew does.
    write(&mut pmu, 0xc001_0200, 0x03_00c0);
    write(&mut pmu, 0xc001_0200, 0x43_00c0);
    assert_eq!(pmu.report()[0].loss, Some(reason));
    write(&mut pmu, 0xc001_0200, 0);
    write(&mut pmu, 0xc001_0200, 0x43_00c0);
    assert_eq!(pmu.report()[0].loss, None);
}

#[test]
fn deliveries_are_branches_on_amd_and_instructions_on_the_older_ones() {
    // Selects of instructions, branches, taken, far; counts after one delivery.
    let table = [
        (
            "intel-v2",
            0x186,
            1,
            [0xc0, 0xc4, 0x20c4, 0x40c4],
            [0, 0, 0, 0],
        ),
        (
            "amd-k7",
            0xc001_0000,
            1,
            [0xc0, 0xc2, 0xc4, 0xc6],
            [1, 1, 1, 1],
        ),
        (
            "amd-core",
            0xc001_0200,
            2,
            [0xc0, 0xc2, 0xc4, 0xc6],
            [0, 1, 1, 1],
        ),
    ];
    for (spec, first, stride, events, expected) in table {
        let model = PmuModel::parse(spec).expect(spec);
        let mut pmu = Seated::new(model, Box::new(StepBackend::new()), Grant::everything());
        for (n, event) in (0u32..).zip(events) {
            write(&mut pmu, first + n * stride, 0x41_0000 | event);
        }
        pmu.observe(Progress::Delivered { ring: Ring::User });
        pmu.observe(Progress::Delivered { ring: Ring::Kernel });
        let counts: Vec<_> = (0..4).map(|n| pmu.rdpmc(n, GUEST)).collect();
        assert_eq!(counts, expected.map(ReadOutcome::Value), "{spec}");
    }
}

#[test]
fn what_was_stepped_before_a_control_changes_is_not_lost() {
    let step = |pmu: &mut Seated, times: usize| {
        for _ in 0..times {
            let insn = pmu_virt::Retirement::default();
            let ring = Ring::Kernel;
            pmu.observe(Progress::Retired { ring, insn });
        }
    };
    // What stops the counters, and what starts them again.
    for (msr, off, on) in [
        (0x38f, 0, 0x1_0000_0001),
        (0x186, 0x03_00c0, 0x43_00c0),
        (0x38d, 0, 3),
    ] {
        let mut pmu = pmu("intel-v2", "step", Grant::everything());
        write(&mut pmu, 0x38f, 0x1_0000_0001);
        write(&mut pmu, 0x38d, 3);
        write(&mut pmu, 0x186, 0x43_00c0);
        step(&mut pmu, 5);
        write(&mut pmu, msr, off);
        step(&mut pmu, 7);
        write(&mut pmu, msr, on);
        step(&mut pmu, 11);
        let stopped = |affected| ReadOutcome::Value(if affected { 16 } else { 23 });
        assert_eq!(pmu.rdpmc(0, GUEST), stopped(msr != 0x38d), "{msr:#x}");
        assert_eq!(
            pmu.rdpmc(0x4000_0000, GUEST),
            stopped(msr != 0x186),
            "{msr:#x}"
        );
    }
}

#[test]
fn every_counter_of_the_largest_model_finds_a_place() {
    let mut pmu = pmu("intel-v2,counters=8", "clock", Grant::everything());
    for n in 0..8 {
        write(&mut pmu, 0x186 + n, REF);
    }
    write(&mut pmu, 0x38f, 0x7_0000_00ff);
    write(&mut pmu, 0x38d, 0x330);
    assert_eq!(pmu.report().iter().filter(|r| r.running).count(), 10);
    assert_eq!(pmu.core().expect("a core").backend().name(), "clock");
}

#[test]
fn a_counter_started_in_the_midst_of_an_interval_begins_with_the_next() {
    let mut pmu = pmu("intel-v2", "clock", Grant::everything());
    pmu.observe(Progress::Entered { tsc: Tsc(0) });
    write(&mut pmu, 0x186, REF);
    pmu.observe(Progress::Left {
        tsc: Tsc(1_000),
        halted: Ticks(0),
        ring: None,
    });
    assert_eq!(pmu.rdpmc(0, GUEST), ReadOutcome::Value(0));
    run(&mut pmu, 2_000, 2_100);
    assert_eq!(pmu.rdpmc(0, GUEST), ReadOutcome::Value(100));
}

/// A vCPU of the model `intel-v2` that counts reference cycles on a core.
fn on_core(owner: u32, core: &mut CorePmu) -> VcpuPmu {
    let model = PmuModel::parse("intel-v2").expect("a model");
    let mut pmu = VcpuPmu::detached(OwnerId(owner), model, Grant::everything());
    pmu.attach(core);
    for (msr, value) in [(0x186, REF), (0x38f, 1)] {
        let written = pmu.wrmsr(core, MsrIndex(msr), value, GUEST);
        assert_eq!(written.outcome, WriteOutcome::Done, "{msr:#x}");
    }
    pmu.observe(core, Progress::Entered { tsc: Tsc(0) });
    let left = Progress::Left {
        tsc: Tsc(1000 * u64::from(owner)),
        halted: Ticks(0),
        ring: Some(Ring::Kernel),
    };
    pmu.observe(core, left);
    pmu
}

/// A VMM that lends the wrong core reads nothing of another vCPU, and stops
/// none of its counters.
#[test]
fn another_vcpus_core_is_left_alone() {
    let core = || CorePmu::new(Box::new(ClockBackend::new()));
    let (mut first, mut second) = (core(), core());
    let mut one = on_core(1, &mut first);
    let mut other = on_core(2, &mut second);
    let read = |pmu: &mut VcpuPmu, core: &mut CorePmu| pmu.rdmsr(core, MsrIndex(0xc1), GUEST);
    let own = read(&mut one, &mut first).outcome;
    assert_eq!(read(&mut one, &mut second).outcome, own);
    let _ = one.wrmsr(&mut second, MsrIndex(0x186), 0, GUEST);
    assert_eq!(
        read(&mut other, &mut second).outcome,
        ReadOutcome::Value(2000)
    );
    other.observe(&mut second, Progress::Entered { tsc: Tsc(5000) });
    let left = Progress::Left {
        tsc: Tsc(6000),
        halted: Ticks(0),
        ring: Some(Ring::Kernel),
    };
    other.observe(&mut second, left);
    assert_eq!(
        read(&mut other, &mut second).outcome,
        ReadOutcome::Value(3000)
    );
}

/// Writes that start counting are those of selects, the fixed control and the
/// global control, and only where they took place.
#[test]
fn a_write_says_whether_counting_may_start() {
    let mut core = CorePmu::new(Box::new(ClockBackend::new()));
    let mut pmu = on_core(1, &mut core);
    for (msr, value, starts) in [
        (0x186, REF, true),
        (0x186, 1 << 40, false),
        (0xc1, 5, false),
        (0x38d, 0x030, true),
        (0x38f, 1, true),
        (0x38f, 1 << 63, false),
        (0x390, 1, false),
        (0x999, 1, false),
    ] {
        let written = pmu.wrmsr(&mut core, MsrIndex(msr), value, GUEST);
        assert_eq!(written.starts_counting, starts, "{msr:#x} = {value:#x}");
        assert_eq!(written.sets_count, msr == 0xc1, "{msr:#x} = {value:#x}");
        assert!(!written.secret, "{msr:#x}");
        if starts {
            assert_eq!(written.outcome, WriteOutcome::Done, "{msr:#x}");
        }
    }
}

/// What a guest has set or started it may read until a reset, also after it was saved; what
/// it has read or failed to write makes no difference.
#[test]
fn what_was_programmed_stays_so_until_a_reset() {
    let check = |name: &str, writes: &[(u32, u64)], expected: bool| {
        let mut core = CorePmu::new(Box::new(ClockBackend::new()));
        let model = PmuModel::parse("intel-v2").expect("a model");
        let mut pmu = VcpuPmu::detached(OwnerId(1), model, Grant::everything());
        pmu.attach(&mut core);
        assert!(!pmu.is_programmed(), "{name}");
        for (msr, value) in writes {
            pmu.rdmsr(&mut core, MsrIndex(*msr), GUEST);
            pmu.wrmsr(&mut core, MsrIndex(*msr), *value, GUEST);
        }
        assert_eq!(pmu.is_programmed(), expected, "{name}");
        pmu.settle(Some(&mut core)).unwrap();
        let state = pmu.save().unwrap();
        pmu.reset(Some(&mut core));
        assert!(!pmu.is_programmed(), "{name}, reset");
        pmu.restore(Some(&mut core), &state).unwrap();
        assert_eq!(pmu.is_programmed(), expected, "{name}, restored");
    };
    check("nothing", &[], false);
    check("refused", &[(0x186, 1 << 40), (0x999, 1)], false);
    check("cleared overflows", &[(0x390, 1)], false);
    check("a counter", &[(0xc1, 5)], true);
    check("a counter that is 0 again", &[(0xc1, 5), (0xc1, 0)], true);
    check("global control, and back", &[(0x38f, 1), (0x38f, 0)], true);
    check("started", &[(0x186, REF), (0x38f, 1)], true);
    check(
        "stopped",
        &[(0x186, REF), (0x38f, 1), (0x38f, 0), (0x186, 0)],
        true,
    );
    check("a fixed one", &[(0x38d, 0x030), (0x38d, 0)], true);
    check("the global control", &[(0x38f, 1)], true);
}

/// What is settled may be saved until something is done to the vCPU on its core: there may be counts
/// there again, which the state would lack.
#[test]
fn what_ran_since_it_was_settled_is_not_saved() {
    let run = |pmu: &mut VcpuPmu, core: &mut CorePmu| {
        pmu.observe(core, Progress::Entered { tsc: Tsc(100) });
        pmu.observe(
            core,
            Progress::Left {
                tsc: Tsc(200),
                halted: Ticks(0),
                ring: Some(Ring::Kernel),
            },
        );
    };
    type Act = fn(&mut VcpuPmu, &mut CorePmu);
    let acts: [(&str, Act); 3] = [
        ("the guest runs", run),
        ("a counter is read", |pmu, core| {
            pmu.rdmsr(core, MsrIndex(0xc1), GUEST);
        }),
        ("a counter is set", |pmu, core| {
            pmu.wrmsr(core, MsrIndex(0xc1), 7, GUEST);
        }),
    ];
    for (name, act) in acts {
        let mut core = CorePmu::new(Box::new(ClockBackend::new()));
        let model = PmuModel::parse("intel-v2").expect("a model");
        let mut pmu = VcpuPmu::detached(OwnerId(1), model, Grant::everything());
        pmu.attach(&mut core);
        assert_eq!(
            pmu.save().map(drop),
            Err(NotSettled(OwnerId(1))),
            "it is on it"
        );
        for (msr, value) in [(0x186, REF), (0x38f, 1)] {
            pmu.wrmsr(&mut core, MsrIndex(msr), value, GUEST);
        }
        pmu.settle(Some(&mut core)).expect("its core");
        let before = pmu.save().expect("settled");
        act(&mut pmu, &mut core);
        assert_eq!(
            pmu.save().map(drop),
            Err(NotSettled(OwnerId(1))),
            "{name}: counts may be on the core"
        );
        pmu.settle(Some(&mut core)).expect("its core");
        let after = pmu.save().expect("settled again");
        assert_eq!(after == before, name == "a counter is read", "{name}");
    }
}

/// Counts are on the core where they were made, until their vCPU has left that one: another core
/// neither takes them nor the vCPU.
#[test]
fn a_vcpu_leaves_the_core_that_has_its_counts() {
    let core = || CorePmu::new(Box::new(ClockBackend::new()));
    let (mut first, mut other) = (core(), core());
    let model = PmuModel::parse("intel-v2").expect("a model");
    let mut pmu = VcpuPmu::detached(OwnerId(1), model, Grant::everything());
    pmu.attach(&mut first);
    for (msr, value) in [(0x186, REF), (0x38f, 1)] {
        let written = pmu.wrmsr(&mut first, MsrIndex(msr), value, GUEST);
        assert_eq!(written.outcome, WriteOutcome::Done, "{msr:#x}");
    }
    let run = |pmu: &mut VcpuPmu, core: &mut CorePmu, from: u64| {
        pmu.observe(core, Progress::Entered { tsc: Tsc(from) });
        pmu.observe(
            core,
            Progress::Left {
                tsc: Tsc(from + 100),
                halted: Ticks(0),
                ring: Some(Ring::Kernel),
            },
        );
    };
    run(&mut pmu, &mut first, 0);
    pmu.attach(&mut other);
    assert!(pmu.is_on(&first) && !pmu.is_on(&other));
    pmu.park(&mut first);
    pmu.leave(&mut other);
    assert!(pmu.save().is_err(), "its counts are on the first");
    pmu.attach(&mut other);
    assert!(!pmu.is_on(&other));
    assert!(pmu.settle(Some(&mut other)).is_err());
    pmu.leave(&mut first);
    assert_eq!(pmu.save().map(drop), Ok(()));
    pmu.attach(&mut other);
    run(&mut pmu, &mut other, 200);
    let read = pmu.rdmsr(&mut other, MsrIndex(0xc1), GUEST);
    assert_eq!(read.outcome, ReadOutcome::Value(200));
}

/// Overflows while the PMI of others is on its way have nothing to be routed: they go
/// with that one.
#[test]
fn a_pmi_that_is_routed_takes_later_overflows_along() {
    let model = PmuModel::parse("amd-core").expect("a model");
    let seated = Seated::new(model, Box::new(ClockBackend::new()), Grant::everything());
    let mut pmu = seated.with_pmi_floor(1_000);
    let request = |counters: &[u8]| PmiRequest {
        counters: counters
            .iter()
            .map(|n| CounterId::Programmable(*n))
            .collect(),
    };
    let overflow = |pmu: &mut Seated, n: u32, tsc: u64| {
        write(pmu, 0xc001_0201 + 2 * n, (1 << 48) - 10);
        write(pmu, 0xc001_0200 + 2 * n, 0x53_0076);
        run(pmu, tsc, tsc + 20);
        write(pmu, 0xc001_0200 + 2 * n, 0);
    };
    let open = &mut Line::open();
    let check = |pmu: &mut Seated, line: &mut Line, now: u64, expected, asked, sent| {
        assert_eq!(line.forward(pmu, Tsc(now)), expected, "at {now}");
        let (was_asked, was_sent) = (line.asked.take(), line.sent.take());
        assert_eq!((was_asked, was_sent), (asked, sent), "at {now}");
    };
    overflow(&mut pmu, 0, 0);
    let (first, second) = (Some(request(&[0])), Some(request(&[1])));
    check(&mut pmu, open, 20, PmiForwarded::Sent, first, first);

    // The next one is late; what overflows meanwhile is not asked about.
    overflow(&mut pmu, 1, 100);
    check(&mut pmu, open, 120, PmiForwarded::Late, second, None);
    check(&mut pmu, open, 130, PmiForwarded::Nothing, None, None);
    overflow(&mut pmu, 2, 200);
    check(&mut pmu, open, 220, PmiForwarded::Late, None, None);
    let both = Some(request(&[1, 2]));
    check(&mut pmu, open, 2_000, PmiForwarded::Sent, None, both);
    check(&mut pmu, open, 3_000, PmiForwarded::Nothing, None, None);
}

#[test]
fn a_pmi_that_was_dropped_is_gone_and_the_next_overflow_raises_one() {
    let mut pmu = pmu("amd-core", "clock", Grant::everything());
    write(&mut pmu, 0xc001_0201, (1 << 48) - 10);
    write(&mut pmu, 0xc001_0200, 0x53_0076);
    run(&mut pmu, 0, 20);
    let dropped = Line::masked().forward(&mut pmu, Tsc(20));
    assert_eq!(dropped, PmiForwarded::Dropped);
    let open = &mut Line::open();
    assert_eq!(open.forward(&mut pmu, Tsc(20)), PmiForwarded::Nothing);
    assert_eq!(open.asked, None);
    assert_eq!(pmu.interrupts().throttle().delivered(), 0);
    // The counter has gone on from the overflow.
    assert_eq!(pmu.rdpmc(0, GUEST), ReadOutcome::Value(10));
    write(&mut pmu, 0xc001_0201, (1 << 48) - 10);
    run(&mut pmu, 100, 120);
    assert_eq!(open.forward(&mut pmu, Tsc(120)), PmiForwarded::Sent);
}
