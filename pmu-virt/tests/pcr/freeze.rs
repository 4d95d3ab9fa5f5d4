//! FREEZE_PERFMON_ON_PMI.

use super::machine::Op::{As, Debugctl, Pmi, R, Run, Told, W};
use super::machine::*;
use crate::hosting::shaky::{Hand, Shaky};
use arbiter::{PerKind, abi};
use pmu_virt::{Caller, MsrIndex, PmiForwarded, PmuModel, ReadOutcome, Tsc, WriteOutcome};
use std::sync::atomic::Ordering;

use crate::seated::Line;

const REF: u64 = 0x43_013c;
/// With INT.
const INT: u64 = 0x53_013c;
const NEAR: u64 = (1 << 48) - 10;
const DEBUGCTL: u32 = 0x1d9;
const FREEZE: u64 = 1 << 12;

/// PMC0 overflows after 10 ticks, with a PMI; PMC1 counts beside it.
fn busy(freeze: bool) -> Machine {
    let freeze = u64::from(freeze) * FREEZE;
    check(
        &Setup::of("intel-v2"),
        &[
            Debugctl(freeze | 1, 1),
            W(0x186, INT),
            W(counter(0), NEAR),
            W(0x187, REF),
        ],
    )
}

#[test]
fn a_pmi_clears_the_enables() {
    let ops = [
        Run(9),
        R(0x38f, 0xf),
        Run(3),
        R(0x38f, 0),
        Pmi(1),
        Run(100),
        R(0xc1, 2),
        R(0xc2, 12),
        R(0x38e, 1),
        // Software starts them again.
        W(0x390, 1),
        W(0x38f, 0xf),
        Run(5),
        R(0xc1, 7),
        R(0xc2, 17),
        R(0x38f, 0xf),
        Pmi(0),
    ];
    play(&mut busy(true), &ops);
    let ops = [Run(12), R(0x38f, 0xf), Pmi(1), Run(100), R(0xc2, 112)];
    play(&mut busy(false), &ops);
}

#[test]
fn an_overflow_without_a_pmi_freezes_nothing() {
    let ops = [W(0x186, REF), Run(100), R(0x38e, 1), R(0x38f, 0xf), Pmi(0)];
    play(&mut busy(true), &ops);
}

#[test]
fn a_write_of_global_control_after_the_pmi_is_not_undone() {
    let ops = [Run(12), W(0x38f, 0xf), R(0x38f, 0xf), Run(1), R(0x38f, 0xf)];
    play(&mut busy(true), &ops);
}

#[test]
fn it_does_not_reach_a_counter_whose_owner_says_so() {
    for (word, counted) in [
        (abi::CONTROL_INITIAL, 12),
        (abi::CONTROL_INITIAL & !abi::CONTROL_FREEZE, 112),
        // Freezing works by the global enables, which do not reach it either.
        (abi::CONTROL_INITIAL & !abi::CONTROL_GLOBAL_CTRL, 112),
    ] {
        let mut machine = busy(true);
        play(&mut machine, &private(1));
        play(&mut machine, &controlled(1, word));
        let ops = [
            Run(12),
            Run(100),
            Pmi(1),
            As(KERNEL, A),
            R(counter(1), counted),
        ];
        play(&mut machine, &ops);
    }
}

#[test]
fn a_pmi_freezes_others_if_the_owner_of_its_counter_says_so() {
    for (word, enabled, counted) in [
        (abi::CONTROL_INITIAL, 0, 12),
        (abi::CONTROL_INITIAL & !abi::CONTROL_FREEZE, 0xf, 112),
        // Its own enable bit is out of reach, those of the others are not.
        (abi::CONTROL_INITIAL & !abi::CONTROL_GLOBAL_CTRL, 0, 12),
        (abi::CONTROL_OVF_CLEAR | 0xff, 0xe, 112),
    ] {
        let mut machine = busy(true);
        play(&mut machine, &private(0));
        play(&mut machine, &controlled(0, word));
        let ops = [
            Run(12),
            Run(100),
            Pmi(1),
            As(KERNEL, 0),
            R(0x38f, enabled),
            R(counter(1), counted),
        ];
        play(&mut machine, &ops);
    }
}

#[test]
fn a_counter_that_is_given_back_takes_its_pmi_along() {
    let mut machine = busy(false);
    play(&mut machine, &private(0));
    play(&mut machine, &[Run(12)]);
    // On its way, and not sent.
    let line = &mut Line::stuck();
    let forwarded = [0, 1].map(|now| line.forward(&mut machine.pmu, Tsc(now)));
    assert_eq!(forwarded, [PmiForwarded::Nothing; 2]);
    assert_eq!(line.asked.map(|request| request.counters.bits()), Some(1));
    let pending = |machine: &mut Machine| {
        let state = serde_json::to_value(machine.pmu.save()).expect("a state");
        state["pending-pmi"].to_string()
    };
    play(&mut machine, &[As(KERNEL, M), W(management(0), 0), Pmi(0)]);
    assert_eq!(pending(&mut machine), "[]");
    let line = &mut Line::open();
    assert_eq!(
        line.forward(&mut machine.pmu, Tsc(2)),
        PmiForwarded::Nothing
    );
    assert_eq!(line.asked, None);
}

#[test]
fn a_counter_without_a_legacy_name_is_not_frozen() {
    // Nobody could start it again.
    let setup = Setup {
        firmware: true,
        legacy: Some(PerKind {
            programmable: 3,
            fixed: 3,
        }),
        ..Setup::of("intel-v2")
    };
    let ops = [
        As(FIRMWARE, 0),
        W(management(0), M),
        W(select(0), REF),
        W(PHASE, 1),
        As(KERNEL, 0),
        Debugctl(FREEZE, 0),
        W(0x186, INT),
        W(counter(1), NEAR),
        Run(12),
        R(0x38f, 0),
        Run(100),
        R(counter(1), 2),
        As(FIRMWARE, 0),
        R(counter(0), 112),
    ];
    check(&setup, &ops);
}

const CTR_FRZ: u64 = 1 << 59;

/// From version 4 on the status freezes: what its owner keeps out of it counts on, whatever
/// GLOBAL_CTRL's reach is.
#[test]
fn a_frozen_status_reaches_counters_whose_owners_let_it() {
    for (word, enabled, counted) in [
        (abi::CONTROL_INITIAL, 0xf, 12),
        (abi::CONTROL_INITIAL & !abi::CONTROL_FREEZE, 0xf, 112),
        (abi::CONTROL_INITIAL & !abi::CONTROL_GLOBAL_CTRL, 0xd, 12),
    ] {
        let mut machine = check(
            &Setup::of("intel-v4"),
            &[
                Debugctl(FREEZE | 1, 1),
                W(0x186, INT),
                W(counter(0), NEAR),
                W(0x187, REF),
            ],
        );
        play(&mut machine, &private(1));
        play(&mut machine, &controlled(1, word));
        let ops = [
            Run(12),
            R(0x38e, CTR_FRZ | 1),
            R(0x38f, enabled),
            Run(100),
            Pmi(1),
            As(KERNEL, A),
            R(counter(1), counted),
        ];
        play(&mut machine, &ops);
        // It reaches the counter from the moment on when its owner lets it.
        play(&mut machine, &controlled(1, abi::CONTROL_INITIAL));
        let ops = [As(KERNEL, A), Run(100), R(counter(1), counted)];
        play(&mut machine, &ops);
        let ops = [
            W(0x390, CTR_FRZ),
            Run(5),
            As(KERNEL, A),
            R(counter(1), counted + 5),
        ];
        play(&mut machine, &ops);
    }
}

/// A counter of the firmware's that has lost its name as the phase ended counts on.
#[test]
fn a_frozen_status_leaves_a_counter_without_a_legacy_name_alone() {
    let setup = Setup {
        firmware: true,
        legacy: Some(PerKind {
            programmable: 3,
            fixed: 3,
        }),
        ..Setup::of("intel-v4")
    };
    let ops = [
        As(FIRMWARE, 0),
        W(management(0), M),
        W(select(0), REF),
        W(0x391, CTR_FRZ),
        Run(9),
        R(counter(0), 0),
        W(PHASE, 1),
        Run(7),
        As(FIRMWARE, 0),
        R(counter(0), 7),
        As(KERNEL, 0),
        W(0x186, REF),
        Run(7),
        R(counter(1), 0),
        R(0x38e, CTR_FRZ),
        W(0x390, CTR_FRZ),
        Run(7),
        R(counter(1), 7),
    ];
    check(&setup, &ops);
}

#[test]
fn the_bit_is_the_pmus_and_the_rest_is_not() {
    let mut machine = Machine::new(&Setup::of("intel-v2"));
    let read = |machine: &mut Machine| machine.read(DEBUGCTL);
    assert_eq!(read(&mut machine), merged(0));
    let written = (machine.pmu).written(MsrIndex(DEBUGCTL), FREEZE | 0x41, Caller::legacy(KERNEL));
    assert_eq!(written.outcome, WriteOutcome::Done);
    assert_eq!(written.rest, Some(0x41));
    // The processor refuses: nothing has changed.
    assert_eq!(read(&mut machine), merged(0));
    machine.write(DEBUGCTL, FREEZE | 1);
    machine.pmu.rest_taken(MsrIndex(DEBUGCTL), FREEZE | 1);
    assert_eq!(read(&mut machine), merged(FREEZE));
    machine.pmu.rest_taken(MsrIndex(0x186), 0);
    assert_eq!(read(&mut machine), merged(FREEZE));
    machine.pmu.reset();
    assert_eq!(read(&mut machine), merged(0));
}

#[test]
fn it_exists_where_version_2_and_perf_capabilities_do() {
    for (spec, exists) in [
        ("intel-v1", false),
        ("intel-v1,full-width=on", false),
        ("intel-v2", true),
        ("intel-v2,full-width=off", false),
        ("intel-v2,full-width=off,perf-capabilities=on", true),
        ("intel-v4", true),
        ("intel-v5,full-width=off", false),
        ("amd-k7", false),
        ("amd-core", false),
        ("amd-perfmonv2", false),
    ] {
        let model = PmuModel::parse(spec).expect(spec);
        let shared: &[MsrIndex] = if exists { &[MsrIndex(DEBUGCTL)] } else { &[] };
        assert_eq!(model.shared_msrs(), shared, "{spec}");
        let mut machine = Machine::new(&Setup::of(spec));
        let (read, written) = (machine.read(DEBUGCTL), machine.write(DEBUGCTL, FREEZE));
        assert_eq!(read == ReadOutcome::NotHandled, !exists, "{spec}");
        assert_eq!(written == WriteOutcome::NotHandled, !exists, "{spec}");
    }
}

fn merged(value: u64) -> ReadOutcome {
    ReadOutcome::Merge {
        ours: FREEZE,
        value,
    }
}

/// Counters are settled before an access, which may find that nobody counts one.
#[test]
fn an_owner_hears_that_nobody_counts_before_its_access_takes_place() {
    let check = |ops: &[Op]| {
        let hand = Hand::default();
        let backend = Shaky::new(counts_all_that_is_fixed(), hand.clone());
        let mut machine = Machine::on(&Setup::of("intel-v2"), Box::new(backend));
        play(&mut machine, &[Debugctl(FREEZE | 1, 1)]);
        play(&mut machine, &private(0));
        play(&mut machine, &[As(KERNEL, A), W(select(0), REF), Run(10)]);
        let _ = machine.told();
        hand.fails.store(true, Ordering::Relaxed);
        play(&mut machine, ops);
    };
    let notice = abi::MSR_BASE + abi::MSR_NOTICE;
    let unbacked = 8 | 2 << 16 | 19 << 24;
    check(&[R(notice, unbacked), R(notice, 0)]);
    check(&[
        As(KERNEL, M),
        W(management(0), 0),
        Told(&[
            "guest kernel PMC0 refused unbacked",
            "guest kernel PMC0 released",
        ]),
        R(notice, unbacked),
    ]);
}
