//! The alias registers, and what the block does not have.

use arbiter::abi;

use super::machine::Op::{As, P, PGp, Pmi, R, RAbsent, RGp, Run, Told, W, WGp};
use super::machine::*;
use crate::seated::Seated;

const REF: u64 = 0x43_013c;

#[test]
fn with_the_default_cookie_they_are_the_legacy_registers() {
    let intel = [
        As(KERNEL, 0),
        W(select(0), REF),
        R(0x186, REF),
        W(0x187, 0x41_013c),
        R(select(1), 0x41_013c),
        Run(7),
        R(counter(0), 7),
        R(0xc1, 7),
        P(abi::RDPMC_COOKIE, 7),
        P(0, 7),
        // The four bits of a fixed-function counter, at bit 0.
        W(0x38d, 0x0b3),
        R(select(32), 3),
        R(select(33), 0xb),
        R(select(34), 0),
        W(select(34), 0x2),
        R(0x38d, 0x2b3),
        W(select(33), 0),
        R(0x38d, 0x203),
        Told(&[]),
    ];
    check(&Setup::of("intel-v2"), &intel);
    let amd = [
        As(KERNEL, 0),
        W(select(5), 0x53_0076),
        R(0xc001_020a, 0x53_0076),
        W(0xc001_0003, 0x13_0076),
        R(select(3), 0x13_0076),
        R(0xc001_0206, 0x13_0076),
        Run(9),
        R(counter(5), 9),
        P(abi::RDPMC_COOKIE + 5, 9),
    ];
    check(&Setup::of("amd-core"), &amd);
}

#[test]
fn reserved_bits_are_those_of_the_models_own_register() {
    let intel = [
        As(KERNEL, 0),
        WGp(select(0), 1 << 32),
        WGp(select(0), 1 << 21),
        // Any-thread of a field, and what belongs to the next one.
        WGp(select(32), 0x4),
        WGp(select(32), 0x10),
        R(0x38d, 0),
        R(0x186, 0),
    ];
    check(&Setup::of("intel-v2"), &intel);
    let amd = [
        As(KERNEL, 0),
        W(select(0), 1 << 63 | 0x53_0076),
        R(select(0), 0x53_0076),
    ];
    check(&Setup::of("amd-perfmonv2"), &amd);
}

#[test]
fn a_count_has_the_counters_whole_width_and_no_bit_more() {
    for (model, width, fixed) in [
        ("intel-v1", 40, None),
        ("intel-v2,width=40,fixed-width=33", 40, Some(33)),
        ("amd-k7", 48, None),
    ] {
        let all = (1 << width) - 1;
        check(
            &Setup::of(model),
            &[
                W(counter(0), all),
                R(counter(0), all),
                WGp(counter(0), all + 1),
                R(counter(0), all),
            ],
        );
        if let Some(width) = fixed {
            let all = (1 << width) - 1;
            let ops = [
                W(counter(32), all),
                WGp(counter(32), 1 << 63),
                R(0x309, all),
            ];
            check(&Setup::of(model), &ops);
        }
    }
}

#[test]
fn overflow_exists_where_global_status_does() {
    let ops = [
        As(KERNEL, 0),
        W(select(1), 0x53_013c),
        W(counter(1), (1 << 48) - 5),
        Run(4),
        R(overflow(1), 0),
        Run(2),
        R(overflow(1), 1),
        R(overflow(0), 0),
        Pmi(2),
        W(overflow(1), 0),
        R(overflow(1), 1),
        WGp(overflow(1), 2),
        WGp(overflow(1), u64::MAX),
        W(overflow(0), 1),
        R(overflow(1), 1),
        W(overflow(1), 1),
        R(overflow(1), 0),
        R(counter(1), 1),
    ];
    check(&Setup::of("intel-v2"), &ops);
    let absent = [
        As(KERNEL, 0),
        RGp(overflow(0)),
        WGp(overflow(0), 1),
        WGp(overflow(0), 0),
    ];
    for model in ["intel-v1", "amd-k7", "amd-fam10h", "amd-core"] {
        check(&Setup::of(model), &absent);
        // Nor for somebody who is denied the counter.
        let mut machine = check(&Setup::of(model), &private(0));
        play(&mut machine, &absent);
    }
}

#[test]
fn what_has_no_meaning_raises_gp() {
    let base = abi::MSR_BASE;
    let ops = [
        As(KERNEL, 0),
        // Counters that the model lacks.
        RGp(counter(4)),
        RGp(select(31)),
        RGp(overflow(35)),
        WGp(counter(63), 0),
        RGp(status(4)),
        RGp(control(35)),
        WGp(management(4), M),
        PGp(abi::RDPMC_COOKIE + 4),
        PGp(abi::RDPMC_COOKIE + 35),
        PGp(abi::RDPMC_COOKIE + 64),
        // Indices kept for later.
        RGp(base + 0x249),
        WGp(base + 0x249, 0),
        RGp(base + 0xfff),
        RAbsent(base + abi::MSR_COUNT),
        // The wrong direction.
        RGp(management(0)),
        RGp(access(0)),
        WGp(status(0), 0),
        WGp(legacy_map(0), 0),
        WGp(RANDOM, 0),
        R(RANDOM, 1),
        R(RANDOM, 2),
    ];
    check(&Setup::of("intel-v2"), &ops);
}

#[test]
fn a_cookie_of_more_than_48_bits_raises_gp_and_nobody_else_looks_at_it() {
    const LONG: u64 = 1 << 48;
    let ops = [
        As(KERNEL, LONG),
        RGp(counter(0)),
        WGp(counter(0), 1),
        RGp(select(0)),
        RGp(overflow(32)),
        PGp(abi::RDPMC_COOKIE),
        Told(&[
            "guest kernel PMC0 faulted malformed",
            "guest kernel PMC0 faulted malformed",
            "guest kernel PMC0 faulted malformed",
            "guest kernel FIXED0 faulted malformed",
            "guest kernel PMC0 faulted malformed",
        ]),
        WGp(management(0), M),
        Told(&["guest kernel PMC0 refused malformed"]),
        // These take no cookie.
        W(0x186, REF),
        R(0xc1, 0),
        P(0, 0),
        R(status(0), 0),
        R(control(0), abi::CONTROL_INITIAL),
        R(drop_value(0), 0),
        R(PHASE, 2),
        R(RANDOM, 1),
        Told(&[]),
    ];
    check(&Setup::of("intel-v2"), &ops);
}

#[test]
fn the_layer_is_that_of_the_ring_and_the_phase() {
    use pmu_virt::Ring::{Kernel, User};
    let layers = |machine: &Machine| {
        [(Kernel, false), (Kernel, true), (User, false)]
            .map(|(r, s)| machine.pmu.claims().layer(r, s))
    };
    let machine = Machine::new(&Setup::of("intel-v2"));
    assert_eq!(layers(&machine), [KERNEL, FIRMWARE, USER]);
    let with_firmware = Setup {
        firmware: true,
        ..Setup::of("intel-v2")
    };
    let mut machine = Machine::new(&with_firmware);
    assert_eq!(layers(&machine), [FIRMWARE, FIRMWARE, USER]);
    let end = [
        As(FIRMWARE, 0),
        R(PHASE, 0),
        W(PHASE, 1),
        As(KERNEL, 0),
        WGp(PHASE, 1),
    ];
    play(&mut machine, &end);
    assert_eq!(layers(&machine), [KERNEL, FIRMWARE, USER]);
}

#[test]
fn it_is_asked_for_a_cookie_where_one_may_be_presented() {
    let machine = Machine::new(&Setup::of("intel-v2"));
    let takes = |msr, write| {
        machine
            .pmu
            .claims()
            .takes_cookie(pmu_virt::MsrIndex(msr), write)
    };
    for msr in [counter(0), select(40), overflow(1)] {
        assert!(takes(msr, false) && takes(msr, true), "{msr:#x}");
    }
    for msr in [management(0), access(0), control(0), drop_value(0)] {
        assert!(!takes(msr, false) && takes(msr, true), "{msr:#x}");
    }
    for msr in [status(0), RANDOM, PHASE, legacy_map(0), 0x186, 0xc1, 0x10] {
        assert!(!takes(msr, false) && !takes(msr, true), "{msr:#x}");
    }
}

#[test]
fn no_model_has_registers_in_the_block() {
    let block = abi::MSR_BASE..abi::MSR_BASE + abi::MSR_COUNT;
    for summary in pmu_virt::PmuModel::names() {
        let model = pmu_virt::PmuModel::parse(summary.name).expect(summary.name);
        let apart = |(first, last): &(u32, u32)| *last < block.start || *first >= block.end;
        assert!(model.msr_ranges().iter().all(apart), "{}", summary.name);
    }
    let trapped = pmu_virt::all_pmu_msr_ranges();
    let all = |(first, last): &(u32, u32)| *first <= block.start && *last >= block.end - 1;
    assert!(trapped.iter().any(all), "every index of it has to exit");
}

#[test]
fn without_reservations_there_is_no_block() {
    use pmu_virt::*;
    let model = PmuModel::parse("intel-v2").expect("a model");
    let mut pmu = Seated::new(model, Box::new(ClockBackend::new()), Grant::everything());
    let kernel = Caller::legacy(KERNEL);
    for msr in abi::MSR_BASE..abi::MSR_BASE + abi::MSR_COUNT {
        assert_eq!(
            pmu.rdmsr(MsrIndex(msr), kernel),
            ReadOutcome::Gp,
            "{msr:#x}"
        );
        assert_eq!(
            pmu.wrmsr(MsrIndex(msr), 0, kernel),
            WriteOutcome::Gp,
            "{msr:#x}"
        );
        assert!(!pmu.claims().takes_cookie(MsrIndex(msr), true));
    }
    assert_eq!(pmu.rdpmc(abi::RDPMC_COOKIE, kernel), ReadOutcome::Gp);
    assert!(pmu.claims().unit().is_none());
    assert_eq!(pmu.claims().layer(Ring::Kernel, false), KERNEL);
    assert_eq!(
        (
            pmu.claims().locked_out_until(),
            pmu.claims_mut().take_notice()
        ),
        (None, None)
    );
}
