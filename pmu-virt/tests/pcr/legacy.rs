//! Legacy names, once the firmware holds counters and its phase is over.

use super::machine::Op::{As, P, PGp, R, RAbsent, RGp, Reset, Run, W, WAbsent, WGp};
use super::machine::*;
use arbiter::{PerKind, abi};

const REF: u64 = 0x43_013c;

/// A machine whose firmware holds positions, privately, and has ended its phase.
fn machine(model: &'static str, held: &[u32], programmable: u8, fixed: u8) -> Machine {
    let setup = Setup {
        firmware: true,
        legacy: Some(PerKind {
            programmable,
            fixed,
        }),
        ..Setup::of(model)
    };
    let mut machine = Machine::new(&setup);
    for n in held {
        let ops = [
            As(FIRMWARE, 0),
            R(legacy_map(*n), u64::from(*n)),
            W(management(*n), M),
            As(FIRMWARE, M),
            W(control(*n), 0xff),
            W(access(*n), A),
            As(FIRMWARE, A),
            W(counter(*n), 0xf000 + u64::from(*n)),
        ];
        play(&mut machine, &ops);
    }
    play(&mut machine, &[As(FIRMWARE, 0), W(PHASE, 1), As(KERNEL, 0)]);
    machine
}

#[test]
fn legacy_registers_reach_the_counters_behind_their_names() {
    // PMC0 is the firmware's: PMC1 to PMC3 go by the names of PMC0 to PMC2.
    let mut machine = machine("intel-v2", &[0], 3, 3);
    let ops = [
        R(legacy_map(0), 1),
        R(legacy_map(2), 3),
        R(legacy_map(3), abi::LEGACY_NONE),
        R(legacy_map(32), 32),
        R(legacy_map(35), abi::LEGACY_NONE),
        W(0x186, REF),
        W(0x188, 0x41_013c),
        R(select(1), REF),
        R(select(3), 0x41_013c),
        R(0x186, REF),
        Run(20),
        R(0xc1, 20),
        R(0x4c1, 20),
        P(0, 20),
        R(counter(1), 20),
        R(0xc2, 0),
        W(0xc3, 5),
        R(counter(3), 5),
        // Beyond the names there is nothing.
        RAbsent(0xc4),
        WAbsent(0xc4),
        RAbsent(0x189),
        WAbsent(0x189),
        RAbsent(0x4c4),
        PGp(3),
        // The block names counters, whatever their legacy names are.
        As(FIRMWARE, A),
        R(counter(0), 0xf000),
    ];
    play(&mut machine, &ops);
}

#[test]
fn so_do_the_bits_of_shared_registers() {
    let mut machine = machine("intel-v2", &[1], 3, 1);
    let near = (1 << 48) - 1;
    let ops = [
        // After reset: every programmable counter.
        R(0x38f, 0x7),
        W(0x38f, 0x1_0000_0007),
        WGp(0x38f, 0x8),
        WGp(0x38f, 1 << 33),
        WGp(0x390, 0x8),
        // FIXED1 and FIXED2 have no name.
        WGp(0x38d, 0x30),
        W(0x38d, 0x3),
        R(0x38d, 0x3),
        RAbsent(0x30a),
        R(0x309, 0),
        PGp(0x4000_0001),
        P(0x4000_0000, 0),
        // The name of PMC1 is PMC2's.
        W(0x187, REF),
        W(counter(2), near),
        Run(3),
        R(0x38e, 0x2),
        R(overflow(2), 1),
        W(0x390, 0x1),
        R(0x38e, 0x2),
        W(0x390, 0x2),
        R(overflow(2), 0),
        W(0x38f, 0x5),
        Run(30),
        R(counter(2), 2),
        W(0x38f, 0x2),
        Run(30),
        R(counter(2), 32),
    ];
    play(&mut machine, &ops);
}

#[test]
fn a_counter_without_a_name_is_out_of_reach_of_shared_registers() {
    // Its owner lets everything reach it; nobody can name it.
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
        R(0x38f, 0x7),
        W(0x38f, 0),
        Run(12),
        As(FIRMWARE, 0),
        R(counter(0), 12),
    ];
    check(&setup, &ops);
}

#[test]
fn names_do_not_change_before_the_phase_is_over_nor_without_a_map() {
    let setup = Setup {
        firmware: true,
        legacy: Some(PerKind {
            programmable: 3,
            fixed: 0,
        }),
        ..Setup::of("intel-v2")
    };
    let ops = [
        As(FIRMWARE, 0),
        W(management(0), M),
        R(0xc4, 0),
        W(0x38d, 0x333),
        W(0x38f, 0x7_0000_000f),
        W(PHASE, 1),
        As(KERNEL, 0),
        RAbsent(0xc4),
        R(0x38d, 0),
        R(0x38f, 0x7),
        // A reset brings the firmware's phase, and the names, back once the
        // machine restarts it.
        Op::Reset,
    ];
    check(&setup, &ops);
    let setup = Setup {
        legacy: None,
        ..setup
    };
    let ops = [
        As(FIRMWARE, 0),
        W(management(0), M),
        As(FIRMWARE, M),
        W(access(0), A),
        W(PHASE, 1),
        As(KERNEL, 0),
        W(0x186, REF),
        R(0x186, 0),
        R(0xc4, 0),
        R(legacy_map(0), 0),
    ];
    check(&setup, &ops);
}

#[test]
fn both_sets_of_amds_names_are_mapped() {
    let mut core = machine("amd-core", &[0, 3], 4, 0);
    let ops = [
        // Names 0 to 3 are positions 1, 2, 4 and 5.
        W(0xc001_0000, 0x53_0076),
        R(0xc001_0200, 0x53_0076),
        R(select(1), 0x53_0076),
        W(0xc001_0206, 0x43_0076),
        R(select(5), 0x43_0076),
        R(0xc001_0003, 0x43_0076),
        Run(6),
        R(0xc001_0007, 6),
        P(3, 6),
        RAbsent(0xc001_0208),
        RAbsent(0xc001_0209),
        PGp(4),
    ];
    play(&mut core, &ops);
    let mut v2 = machine("amd-perfmonv2", &[0, 3], 4, 0);
    let ops = [
        R(0xc000_0301, 0xf),
        W(0xc000_0301, u64::MAX),
        R(0xc000_0301, 0xf),
        W(0xc000_0303, 0x3c),
        R(0xc000_0300, 0xc),
        R(overflow(4), 1),
        R(overflow(5), 1),
        R(overflow(2), 0),
        W(0xc000_0301, 0),
        R(0xc000_0301, 0),
    ];
    play(&mut v2, &ops);
}

#[test]
fn the_accounting_page_names_counters_too() {
    let mut machine = machine("intel-v2", &[0], 3, 3);
    let ops = [
        W(0x186, REF),
        Run(20),
        R(SNAPSHOT, 1),
        R(word(1, 3), 20),
        R(word(0, 0), 0x0404),
        RGp(word(4, 0)),
    ];
    play(&mut machine, &ops);
}

/// A machine is reset while its firmware's phase is over: each vCPU first, and then the phase.
#[test]
fn firmware_that_starts_over_has_its_own_names_until_its_phase_ends() {
    for switched in [false, true] {
        let mut machine = machine("intel-v2", &[0], 3, 3);
        play(&mut machine, &[R(legacy_map(0), 1), Reset]);
        if switched {
            let core = machine.pmu.park().expect("a core");
            machine.pmu.attach(core);
        }
        let unit = machine.pmu.claims().unit().expect("reservations");
        unit.phase().restart();
        let ops = [
            As(FIRMWARE, 0),
            R(0x38f, 0xf),
            R(legacy_map(0), 0),
            R(legacy_map(3), 3),
            W(0x186, REF),
            R(select(0), REF),
            W(management(1), M),
            W(PHASE, 1),
            As(KERNEL, 0),
            R(legacy_map(0), 0),
            R(legacy_map(1), 2),
            R(legacy_map(3), abi::LEGACY_NONE),
            R(0x38f, 0x7),
            W(0x187, REF),
            R(select(2), REF),
        ];
        play(&mut machine, &ops);
    }
}
