//! Samplers of instruction-based sampling that somebody has reserved.

use arbiter::{CounterId, CounterSet, IbsKind, abi};
use pmu_virt::ibs::OpSample;
use pmu_virt::{Denial, Grant, IbsSample, ReadOutcome};

use super::machine::Op::{As, P, PGp, R, RGp, Run, Told, W, WGp};
use super::machine::*;

const MODEL: &str = "amd-core,ibs=on";
const FETCH: u32 = abi::POSITION_IBS_FETCH;
const OP: u32 = abi::POSITION_IBS_OP;
const FETCH_CTL: u32 = 0xc001_1030;
const OP_CTL: u32 = 0xc001_1033;
const OP_RIP: u32 = 0xc001_1034;
const IBSCTL: u32 = 0xc001_103a;
const OP_EN: u64 = 1 << 17;
const OP_VAL: u64 = 1 << 18;

/// The register of a sampler with a cookie.
const fn ibs(msr: u32) -> u32 {
    abi::MSR_BASE + abi::MSR_IBS + (msr - FETCH_CTL)
}

/// What a register shows that counts as time passes.
fn shown(machine: &mut Machine, msr: u32) -> u64 {
    match machine.read(msr) {
        ReadOutcome::Value(value) => value,
        other => panic!("{msr:#x}: {other:?}"),
    }
}

#[test]
fn unreserved_both_names_reach_it() {
    let ops = [
        W(OP_RIP, 0x1234),
        R(ibs(OP_RIP), 0x1234),
        W(ibs(OP_RIP), 0x5678),
        R(OP_RIP, 0x5678),
        R(status(OP), 0),
        R(legacy_map(OP), u64::from(OP)),
        // Nobody's, and none of a counter's own registers.
        R(IBSCTL, 0x100),
        RGp(ibs(IBSCTL)),
        RGp(ibs(FETCH_CTL + 0xc)),
        RGp(counter(OP)),
        WGp(select(OP), 0),
        RGp(overflow(FETCH)),
        PGp(abi::RDPMC_COOKIE + OP),
        P(0, 0),
    ];
    check(&Setup::of(MODEL), &ops);
    let absent = [RGp(ibs(OP_CTL)), RGp(status(OP)), WGp(management(OP), M)];
    check(&Setup::of("amd-core"), &absent);
    check(&Setup::of("intel-v2"), &absent);
}

#[test]
fn reserved_it_is_its_owners() {
    let mut machine = check(&Setup::of(MODEL), &private(OP));
    let ops = [
        As(KERNEL, 0),
        W(OP_CTL, 0xffff | OP_EN),
        R(OP_CTL, 0),
        R(OP_RIP, 0),
        // The other one, and what is nobody's, are as they were.
        W(FETCH_CTL, 0xffff),
        R(FETCH_CTL, 0xffff),
        R(IBSCTL, 0x100),
        As(KERNEL, X),
        R(ibs(OP_CTL), 0),
        As(KERNEL, A),
        W(ibs(OP_CTL), 0xffff | OP_EN),
        R(ibs(OP_CTL), 0xffff | OP_EN),
    ];
    machine.told();
    play(&mut machine, &ops);
    play(
        &mut machine,
        &[Told(&[
            "guest kernel IBSOP dropped-write held",
            "guest kernel IBSOP dropped-read held",
            "guest kernel IBSOP dropped-read held",
            "guest kernel IBSOP dropped-read cookie",
        ])],
    );
    // It counts, whoever may not see it.
    play(&mut machine, &[Run(1000)]);
    machine.act_as(KERNEL, A);
    assert_eq!(shown(&mut machine, ibs(OP_CTL)) >> 32, 1000);
    let mut faulting = controlled(OP, abi::CONTROL_INITIAL | abi::CONTROL_FAULT).to_vec();
    faulting.extend([RGp(OP_CTL), WGp(OP_CTL, 0), RGp(OP_RIP)]);
    play(&mut machine, &faulting);
}

#[test]
fn given_back_it_stands_with_nothing_in_it() {
    let mut machine = check(&Setup::of(MODEL), &private(OP));
    play(
        &mut machine,
        &[As(KERNEL, A), W(ibs(OP_CTL), 0x10 | OP_EN), Run(0x200)],
    );
    machine
        .pmu
        .sampled(IbsSample::Op(OpSample::Near { rip: 0x77 }));
    assert_eq!(shown(&mut machine, ibs(OP_CTL)) & OP_VAL, OP_VAL);
    assert_eq!(shown(&mut machine, ibs(OP_RIP)), 0x77);
    play(
        &mut machine,
        &[
            As(KERNEL, M),
            W(management(OP), 0),
            As(KERNEL, 0),
            R(OP_CTL, 0),
            R(OP_RIP, 0),
            Run(0x1000),
            R(OP_CTL, 0),
        ],
    );
    assert_eq!(machine.pmu.take_ibs_interrupt(), None);
}

/// A state has nothing of a reserved one, and no interrupt that was its alone.
#[test]
fn what_is_reserved_is_not_saved() {
    let mut machine = check(&Setup::of(MODEL), &private(OP));
    let ops = [
        W(0x850, 0x400),
        W(FETCH_CTL, 0x1234),
        As(KERNEL, A),
        W(ibs(OP_CTL), 0x10 | OP_EN),
        Run(0x200),
    ];
    play(&mut machine, &ops);
    let sample = IbsSample::Op(OpSample::Near { rip: 0x7777 });
    machine.pmu.sampled(sample);
    let saved = machine.pmu.save();
    let mut other = check(&Setup::of(MODEL), &[]);
    other.pmu.restore(&saved).expect("a state of this model");
    let ops = [
        R(OP_CTL, 0),
        R(OP_RIP, 0),
        R(FETCH_CTL, 0x1234),
        R(0x850, 0x400),
    ];
    play(&mut other, &ops);
    assert_eq!(other.pmu.take_ibs_interrupt(), None);
    assert_eq!(machine.pmu.take_ibs_interrupt(), Some(0x400));
}

/// With a budget of two each has its turn.
#[test]
fn it_takes_turns_with_counters() {
    use std::num::NonZeroU64;

    use pmu_virt::{Oversubscribe, PmuModel};

    use crate::seated::Seated;

    let model = PmuModel::parse(MODEL).expect("a model");
    let grant = Grant::everything().at_most(arbiter::PerKind {
        programmable: 2,
        fixed: 0,
    });
    let timeslice = NonZeroU64::new(1000).expect("a time");
    let pmu = Seated::new(model, counts_all_that_is_fixed(), grant)
        .with_oversubscription(Oversubscribe::Multiplex { timeslice });
    let mut machine = Machine::of(pmu);
    play(
        &mut machine,
        &[
            W(0xc001_0200, 0x43_0076),
            W(0xc001_0202, 0x43_0076),
            W(OP_CTL, 0xffff | OP_EN),
        ],
    );
    for _ in 0..30 {
        machine.run(500);
    }
    assert_ne!(shown(&mut machine, OP_CTL) >> 32, 0);
    let lacking = machine.pmu.parts().0.lacking();
    assert_eq!(lacking.len(), 1, "{lacking:?}");
}

/// What the host did not grant is absent, or reads as it says.
#[test]
fn a_grant_may_leave_it_out() {
    let fetch = CounterId::Ibs(IbsKind::Fetch);
    let grant = |denial| Setup {
        grant: Grant::of([CounterId::Programmable(0), fetch], denial),
        ..Setup::of(MODEL)
    };
    let fault = [
        R(FETCH_CTL, 0),
        R(ibs(FETCH_CTL), 0),
        R(IBSCTL, 0x100),
        RGp(OP_CTL),
        WGp(OP_CTL, OP_EN | 1),
        RGp(ibs(OP_CTL)),
        WGp(management(OP), M),
    ];
    check(&grant(Denial::Fault), &fault);
    let drop = [R(OP_CTL, 7), W(OP_CTL, OP_EN | 1), R(OP_CTL, 7)];
    let machine = check(&grant(Denial::Drop { read_as: 7 }), &drop);
    assert!(!machine.pmu.ibs_runs());
}

/// The counters of the machine are held, and one more cannot be backed: a sampler counts
/// on a physical counter, too.
#[test]
fn it_takes_a_physical_counter() {
    use crate::limited::Limited;
    let setup = Setup::of(MODEL);
    let mut machine = Machine::on(&setup, Box::new(Limited::clock(2)));
    let mut ops = private(0).to_vec();
    ops.extend(private(OP));
    ops.extend([
        WGp(management(FETCH), M),
        WGp(management(1), M),
        As(KERNEL, M),
        W(management(0), 0),
        As(KERNEL, 0),
        W(management(FETCH), M),
    ]);
    play(&mut machine, &ops);
    let held = machine.pmu.claims().unit().map(|unit| unit.bank().held());
    assert_eq!(held, Some(CounterSet::SAMPLERS));
}
