use perfmon_abi::wire::budget::{KindBudget, LackingCounter};
use perfmon_abi::wire::info::{ContextState, HolderInfo, Scope, VcpuState};
use pmu_model::Provenance;

use super::*;
use crate::stat::Unit;

fn machine() -> MachineInfo {
    let held = |counter: &str, holder, event| HolderInfo {
        counter: counter.to_owned(),
        holder,
        event,
    };
    let context = |id, pid| ContextInfo {
        id,
        scope: Scope::Vcpu,
        target: Some(0),
        state: ContextState::Loaded,
        started: true,
        flags: 0,
        pid,
        uid: 0,
        sets: 1,
        active_set: 0,
        format: None,
        buffer_size: 0,
        unread: 0,
        dropped: 0,
    };
    MachineInfo {
        pid: 71,
        guest: "vmlinuz\u{1b}[2J".to_owned(),
        counters: "sim".to_owned(),
        policy: "host-first".to_owned(),
        vcpus: vec![VcpuInfo {
            vcpu: 0,
            state: VcpuState::Running,
            core: Some(0),
            context: None,
            contexts: Vec::new(),
            halted: Some(true),
            reserved: Vec::new(),
        }],
        cores: vec![CoreInfo {
            core: 0,
            tid: 1,
            vcpu: Some(0),
            context: None,
            contexts: Vec::new(),
            counters: vec![
                held("sim0", Holder::Context(4), Some(0x53_0076)),
                held("sim1", Holder::Guest(0), None),
                held("sim2", Holder::Context(4), None),
                held("sim3", Holder::Context(5), None),
                held("sim4", Holder::Context(6), None),
            ],
            free: Some(3),
        }],
        contexts: vec![context(4, 99), context(5, 1000)],
    }
}

fn model() -> ModelInfo {
    ModelInfo {
        model: "amd-core".to_owned(),
        event_family: "amd-core".to_owned(),
        counters: "sim".to_owned(),
        programmable: 6,
        fixed: 0,
        fixed_map: Some(0),
        counter_width: 48,
        tsc_khz: 1,
        virtual_time: false,
        lease_within: None,
        vcpus: 1,
        cores: 1,
        core_cpus: Vec::new(),
        virtual_pmds: Vec::new(),
        countable: Vec::new(),
    }
}

fn answers(model: &ModelInfo, counted: Option<(Vec<Row>, f64)>) -> Answers<'_> {
    Answers {
        socket: "vm.sock".into(),
        model,
        machine: machine(),
        reservations: Vec::new(),
        budgets: Vec::new(),
        counted,
        observer: 99,
    }
}

fn row(event: &str, value: Value) -> Row {
    Row {
        event: event.to_owned(),
        unit: Unit::EVENTS,
        value,
        provenance: Some(Provenance::Simulated),
        enabled_ns: 0,
        running_ns: 0,
        variance: None,
        whose: Some(Target::Vcpu(0)),
        metric: None,
    }
}

#[test]
fn holders_have_a_row_each_and_this_program_is_the_last() {
    let model = model();
    let mut answers = answers(&model, None);
    let held = |counter: &str, private, lease_left_ms| ReservationInfo {
        counter: counter.to_owned(),
        layer: "hypervisor".to_owned(),
        private,
        lease_left_ms,
        revoked_in_ms: lease_left_ms,
        revoked_for: Some("administrator".to_owned()),
        event: None,
    };
    answers.reservations = vec![PcrInfo {
        vcpu: 0,
        scheme: "single".to_owned(),
        grace_ms: 1,
        layers: Vec::new(),
        reservations: vec![
            held("PMC4", true, None),
            held("PMC5", true, Some(7)),
            held("PMC3", false, None),
        ],
        read: None,
    }];
    let lacking = KindBudget {
        lacking: vec![LackingCounter {
            counter: "PMC1".to_owned(),
            reason: "it waits".to_owned(),
        }],
        ..KindBudget::default()
    };
    answers.budgets = vec![BudgetInfo {
        vcpu: 0,
        generation: 0,
        programmable: lacking,
        fixed: KindBudget::default(),
        ends_in_ms: None,
    }];
    let rows = answers.reading().holders;
    let text: Vec<String> = rows
        .iter()
        .map(|row| format!("{}|{}|{}", row.place, row.holder, row.counters.join(", ")))
        .collect();
    let expected = [
        "core 0|vCPU 0's guest|sim1",
        "core 0|context 5 of process 1000|sim3",
        "core 0|context 6|sim4",
        "core 0|this umpire top|sim0 (0x530076), sim2",
        "core 0|nobody|3 free",
        "vCPU 0|hypervisor, by cookie only|PMC4, PMC5, its lease ends in 7 ms, revoked in 7 ms: \
         administrator",
        "vCPU 0|hypervisor, shared|PMC3",
        "vCPU 0|guest, does not count|PMC1: it waits",
    ];
    assert_eq!(text, expected);
}

#[test]
fn a_count_that_nobody_took_is_not_0() {
    let model = model();
    let check = |rows: Vec<Row>, expected: &[(Option<f64>, Option<Missing>)]| {
        let reading = answers(&model, Some((rows, 2.0))).reading();
        let rates = &reading.vcpus[0].rates;
        let found: Vec<_> = rates
            .iter()
            .map(|rate| (rate.per_second, rate.missing))
            .collect();
        assert_eq!(found, expected);
        for rate in rates {
            assert_eq!(rate.provenance.is_some(), rate.per_second.is_some());
        }
    };
    check(
        vec![
            row(RUN_TIME, Value::Counted(10)),
            row(CYCLES, Value::Counted(0)),
            row(INSTRUCTIONS, Value::NotCounted),
            row(CACHE_MISSES, Value::NotSupported),
        ],
        &[
            (Some(5.0), None),
            (Some(0.0), None),
            (None, Some(Missing::NotCounted)),
            (None, Some(Missing::NotSupported)),
        ],
    );
    check(
        vec![
            row(RUN_TIME, Value::Counted(0)),
            row(CYCLES, Value::NotCounted),
            row(EXITS, Value::NotSupported),
        ],
        &[
            (Some(0.0), None),
            (None, Some(Missing::Idle)),
            (None, Some(Missing::NotSupported)),
        ],
    );
}

#[test]
fn ratios_follow_from_rates() {
    let model = model();
    let rows = vec![
        row(RUN_TIME, Value::Counted(500_000_000)),
        row(CYCLES, Value::Counted(400)),
        row(INSTRUCTIONS, Value::Counted(100)),
    ];
    let reading = answers(&model, Some((rows, 1.0))).reading();
    let vcpu = &reading.vcpus[0];
    assert_eq!((vcpu.ipc(), vcpu.cpu_percent()), (Some(0.25), Some(50.0)));
    assert_eq!(vcpu.state, "halted");
    assert_eq!(reading.guest, "vmlinuz\u{fffd}[2J");
    let none = vec![row(CYCLES, Value::Counted(0))];
    let reading = answers(&model, Some((none, 1.0))).reading();
    assert_eq!(reading.vcpus[0].ipc(), None);
}

#[test]
fn samples_are_those_of_the_last_seconds() {
    let samples = |rows: &[(&str, u64, u64)]| SampleReading {
        event: CYCLES.to_owned(),
        hz: 99,
        totals: Totals {
            samples: rows.iter().map(|row| row.1).sum(),
            lost: 1,
            ..Totals::default()
        },
        rows: rows
            .iter()
            .map(|(symbol, samples, events)| HotRow {
                place: HotPlace {
                    symbol: (*symbol).to_owned(),
                    program: None,
                },
                samples: *samples,
                events: *events,
            })
            .collect(),
    };
    let mut window = Window::default();
    assert_eq!(window.sum(), None);
    let check = |window: &Window, seconds: f64, expected: &[(&str, u64, u64)]| {
        let sum = window.sum().unwrap();
        let found: Vec<(&str, u64, u64)> = sum
            .rows
            .iter()
            .map(|row| (row.place.symbol.as_str(), row.samples, row.events))
            .collect();
        assert_eq!(found, expected);
        assert!((window.seconds() - seconds).abs() < 1e-9);
    };
    window.push(6.0, samples(&[("a", 1, 100), ("b", 2, 300)]));
    window.push(5.0, samples(&[("a", 3, 300)]));
    check(&window, 11.0, &[("a", 4, 400), ("b", 2, 300)]);
    assert_eq!(window.sum().unwrap().totals.lost, 2);
    window.push(5.0, samples(&[("c", 9, u64::MAX)]));
    check(&window, 10.0, &[("c", 9, u64::MAX), ("a", 3, 300)]);
    // One that is longer stands for itself.
    window.push(60.0, samples(&[]));
    check(&window, 60.0, &[]);
}
