//! Registers, modes, priorities and errors of a local APIC.

use irqchip::{Answer, BadMachine, Chips, Delivery, IoApicVersion, Lint, Machine};

use crate::board::*;

#[test]
fn there_are_machines_that_cannot_be() {
    let good = machine(1, IoApicVersion::V11);
    let cases = [
        (Machine { cpus: 0, ..good }, BadMachine::Cpus(0)),
        (Machine { cpus: 256, ..good }, BadMachine::Cpus(256)),
        (Machine { tsc_hz: 0, ..good }, BadMachine::Clock),
        (Machine { apic_hz: 0, ..good }, BadMachine::Clock),
        (
            Machine {
                physical_bits: 35,
                ..good
            },
            BadMachine::PhysicalBits(35),
        ),
        (
            Machine {
                physical_bits: 53,
                ..good
            },
            BadMachine::PhysicalBits(53),
        ),
    ];
    for (machine, error) in cases {
        assert_eq!(Chips::new(&machine), Err(error));
    }
    assert!(Chips::new(&Machine { cpus: 255, ..good }).is_ok());
}

/// 11.4.7.1.
#[test]
fn registers_after_power_up() {
    let mut board = Board::reset(3, IoApicVersion::V11);
    assert_eq!(board.base(0), PAGE | ENABLE | 1 << 8);
    assert_eq!(board.base(2), PAGE | ENABLE);
    let set = [
        (0x02, 2 << 24),
        (0x03, 0x0005_0014),
        (DFR, 0xffff_ffff),
        (SVR, 0xff),
        (LVT_TIMER, 0x1_0000),
        (LVT_THERMAL, 0x1_0000),
        (LVTPC, 0x1_0000),
        (LVT_LINT0, 0x1_0000),
        (LVT_LINT1, 0x1_0000),
        (LVT_ERROR, 0x1_0000),
    ];
    for register in 0..=0xff {
        let expected = set.iter().find(|(at, _)| *at == register);
        let value = board.load(2, register);
        assert_eq!(
            value,
            expected.map_or(0, |(_, value)| *value),
            "{register:#x}"
        );
    }
}

/// Table 11-6: by MSR, what can be read, and the bits that can be written without #GP.
#[test]
fn registers_in_x2apic_mode() {
    const NO: Option<u64> = None;
    let table: &[(u8, u8, bool, Option<u64>)] = &[
        (0x02, 0x03, true, NO),
        (0x08, 0x08, true, Some(0xff)),
        (0x0a, 0x0a, true, NO),
        (0x0b, 0x0b, false, Some(0)),
        (0x0d, 0x0d, true, NO),
        (0x0f, 0x0f, true, Some(0x1ff)),
        (0x10, 0x27, true, NO),
        (0x28, 0x28, true, Some(0)),
        (0x30, 0x30, true, Some(0xffff_ffff_000c_dfff)),
        (0x32, 0x32, true, Some(0x7_10ff)),
        (0x33, 0x34, true, Some(0x1_17ff)),
        (0x35, 0x36, true, Some(0x1_f7ff)),
        (0x37, 0x37, true, Some(0x1_10ff)),
        (0x38, 0x38, true, Some(0xffff_ffff)),
        (0x39, 0x39, true, NO),
        (0x3e, 0x3e, true, Some(0xb)),
        (0x3f, 0x3f, false, Some(0xff)),
    ];
    for register in 0..=0xff {
        let row = table.iter().find(|row| (row.0..=row.1).contains(&register));
        let (readable, writable) = row.map_or((false, NO), |row| (row.2, row.3));
        let mut board = Board::x2apic(1);
        let read = board.rdmsr(0, register);
        assert_eq!(matches!(read, Answer::Value(_)), readable, "{register:#x}");
        for bit in 0..64 {
            // The whole value of ICR that a bit makes has to be one that does no harm.
            let allowed = writable.is_some_and(|bits| bits >> bit & 1 != 0);
            let expected = if allowed { Answer::Done } else { Answer::Gp };
            let mut board = Board::x2apic(1);
            let answer = board.wrmsr(0, register, 1 << bit);
            assert_eq!(answer, expected, "{register:#x} bit {bit}");
        }
        let zero = board.wrmsr(0, register, 0);
        assert_eq!(zero == Answer::Done, writable.is_some(), "{register:#x}");
    }
}

#[test]
fn msrs_that_are_not_the_apics() {
    let mut board = Board::x2apic(1);
    for msr in [0x7ff, 0x900, 0x1a, 0x1c, 0x6df, 0x6e1] {
        assert_eq!(board.chips.rdmsr(0, 0, msr), None);
        assert_eq!(board.chips.wrmsr(0, 0, msr, 0), None);
    }
    assert_eq!(board.chips.rdmsr(0, 1, 0x1b), None, "no such CPU");
}

/// 11.12.2 and 11.12.5: ways between the modes; and each mode's registers are there alone.
#[test]
fn ways_between_modes() {
    const MODES: [u64; 4] = [0, ENABLE, ENABLE | X2APIC, X2APIC];
    let allowed = [
        [true, true, false, false],
        [true, true, true, false],
        [true, false, true, false],
    ];
    for (from, row) in allowed.iter().enumerate() {
        for (to, expected) in row.iter().enumerate() {
            let mut board = Board::new(1);
            assert_eq!(board.set_base(0, PAGE | MODES[1]), Answer::Done);
            assert_eq!(board.set_base(0, PAGE | MODES[from]), Answer::Done);
            let answer = board.set_base(0, PAGE | MODES[to]);
            assert_eq!(answer == Answer::Done, *expected, "{from} to {to}");
            let now = if *expected { to } else { from };
            assert_eq!(board.base(0), PAGE | MODES[now]);
            let msrs = matches!(board.rdmsr(0, TPR), Answer::Value(_));
            assert_eq!(msrs, now == 2);
            let memory = board.chips.mmio_read(0, 0, PAGE + 0x80, 4).is_some();
            assert_eq!(memory, now == 1);
        }
    }
}

#[test]
fn the_base_has_reserved_bits_and_moves() {
    let mut board = Board::new(1);
    for bit in 0..64 {
        let value = PAGE | ENABLE | 1 << bit;
        let allowed = matches!(bit, 8 | 10 | 11 | 12..41);
        let mut board = Board::new(1);
        let answer = board.set_base(0, value);
        assert_eq!(answer == Answer::Done, allowed, "bit {bit}");
    }
    let elsewhere = 0x1_2345_6000;
    assert_eq!(board.set_base(0, elsewhere | ENABLE), Answer::Done);
    assert_eq!(board.chips.mmio_read(0, 0, PAGE + 0x30, 4), None);
    let version = board.chips.mmio_read(0, 0, elsewhere + 0x30, 4);
    assert_eq!(version, Some(Answer::Value(0x5_0014)));
}

/// 11.4.3: an APIC that was disabled begins anew; 11.12.5: one that changes to x2APIC keeps
/// what it has, but for its IDs and half of ICR.
#[test]
fn what_a_mode_keeps() {
    let mut board = Board::new(18);
    board.store(17, TPR, 0x20);
    board.store(17, LDR, 0x0400_0000);
    board.store(17, ICR_HIGH, 0x0300_0000);
    board.chips.raise(17, 0x80);
    let base = board.base(17);
    board.set_base(17, base | X2APIC);
    assert_eq!(board.rdmsr(17, 0x02), Answer::Value(17));
    assert_eq!(board.rdmsr(17, LDR), Answer::Value(0x0001_0002));
    assert_eq!(board.rdmsr(17, TPR), Answer::Value(0x20));
    assert_eq!(board.rdmsr(17, ICR), Answer::Value(0));
    assert_eq!(board.pending(17), [Delivery::Vector(0x80)]);
    board.set_base(17, base & !ENABLE);
    assert_eq!(board.pending(17), []);
    board.chips.raise(17, 0x80);
    board.set_base(17, base);
    assert_eq!(board.pending(17), []);
    assert_eq!(board.load(17, TPR), 0);
    assert_eq!(board.load(17, LDR), 0);
    assert_eq!(board.load(17, SVR), 0xff);
    assert_eq!(board.load(17, 0x02), 17 << 24);
}

#[test]
fn bits_that_can_be_written_in_memory() {
    let table = [
        (0x02, 0, 0),
        (0x03, 0, 0x5_0014),
        (TPR, 0xff, 0),
        (PPR, 0, 0xff),
        (LDR, 0xff00_0000, 0),
        (DFR, 0xf000_0000, 0x0fff_ffff),
        (ICR_HIGH, 0xff00_0000, 0),
        (LVT_TIMER, 0x7_00ff, 0),
        (LVT_THERMAL, 0x1_07ff, 0),
        (LVTPC, 0x1_07ff, 0),
        (LVT_LINT0, 0x1_a7ff, 0),
        (LVT_LINT1, 0x1_a7ff, 0),
        (LVT_ERROR, 0x1_00ff, 0),
        (CURRENT, 0, 0),
        (DIVIDE, 0xb, 0),
        (SVR, 0x1ff, 0),
    ];
    let mut board = Board::new(1);
    for (register, writable, fixed) in table {
        board.store(0, register, u32::MAX);
        assert_eq!(board.load(0, register), writable | fixed, "{register:#x}");
    }
}

#[test]
fn accesses_of_other_widths() {
    let mut board = Board::new(1);
    let at = PAGE + 0x80;
    board.store(0, TPR, 0x35);
    for len in [1, 2, 8] {
        board.chips.mmio_write(0, 0, at, len, 0);
    }
    board.chips.mmio_write(0, 0, at + 4, 4, 0);
    assert_eq!(board.load(0, TPR), 0x35);
    let version = PAGE + 0x30;
    for (offset, len, expected) in [
        (0, 1, 0x14),
        (0, 2, 0x14),
        (2, 1, 5),
        (2, 2, 5),
        (0, 8, 0x5_0014),
        (4, 4, 0),
        (15, 1, 0),
    ] {
        let read = board.chips.mmio_read(0, 0, version + offset, len);
        assert_eq!(read, Some(Answer::Value(expected)), "{offset} {len}");
    }
    assert_eq!(board.chips.mmio_read(0, 0, PAGE - 1, 1), None);
    assert_eq!(board.chips.mmio_read(0, 0, PAGE + 0x1000, 4), None);
    assert_eq!(board.chips.mmio_write(0, 0, PAGE + 0x1000, 4, 0), None);
}

/// 11.5.3: a write shows what came together; a new error makes an interrupt.
#[test]
fn errors() {
    let mut board = Board::new(1);
    board.store(0, LVT_ERROR, 0xfe);
    board.load(0, 0x3f);
    assert_eq!(board.vector(0), Some(0xfe));
    board.store(0, EOI, 0);
    board.store(0, 0x40, 1);
    assert_eq!(board.pending(0), [], "the same error is none that is new");
    board.chips.raise(0, 15);
    assert_eq!(board.vector(0), Some(0xfe));
    board.store(0, EOI, 0);
    assert_eq!(board.load(0, ESR), 0);
    board.store(0, ESR, 0);
    assert_eq!(board.load(0, ESR), 1 << 7 | 1 << 6);
    board.send(0, 0, 0x0_400f);
    board.store(0, ESR, 0);
    assert_eq!(board.load(0, ESR), 1 << 6 | 1 << 5);
    board.store(0, ESR, 0);
    assert_eq!(board.load(0, ESR), 0);
    board.take(0);
    board.store(0, EOI, 0);
    // An error whose own vector is one.
    board.store(0, LVT_ERROR, 3);
    board.load(0, 0x3f);
    board.store(0, ESR, 0);
    assert_eq!(board.load(0, ESR), 1 << 7 | 1 << 6);
    assert_eq!(board.pending(0), []);
}

#[test]
fn x2apic_errors_are_faults_but_for_vectors() {
    let mut board = Board::x2apic(1);
    assert_eq!(board.rdmsr(0, 0x40), Answer::Gp);
    board.wrmsr(0, SELF_IPI, 7);
    board.wrmsr(0, ESR, 0);
    assert_eq!(board.rdmsr(0, ESR), Answer::Value(1 << 6 | 1 << 5));
}

/// 11.8.3.1: PPR is TPR, or the class in service where that is higher.
#[test]
fn priorities() {
    let cases: [(u8, Option<u8>, u32); 6] = [
        (0, None, 0),
        (0x35, None, 0x35),
        (0x35, Some(0x41), 0x40),
        (0x45, Some(0x41), 0x45),
        (0x51, Some(0x41), 0x51),
        (0, Some(0xff), 0xf0),
    ];
    for (tpr, serving, ppr) in cases {
        let mut board = Board::new(1);
        if let Some(vector) = serving {
            board.chips.raise(0, vector);
            assert_eq!(board.vector(0), Some(vector));
        }
        board.store(0, TPR, tpr.into());
        assert_eq!(board.load(0, PPR), ppr, "{tpr:#x} {serving:?}");
        assert_eq!(board.chips.cr8(0), tpr >> 4);
        for vector in [0x21, 0x31, 0x41, 0x51, 0x61, 0xf1] {
            let mut board = Board {
                chips: board.chips.clone(),
                now: 0,
            };
            board.chips.raise(0, vector);
            let passes = u32::from(vector >> 4) > ppr >> 4;
            assert_eq!(
                !board.pending(0).is_empty(),
                passes,
                "{vector:#x} over {ppr:#x}"
            );
        }
    }
    let mut board = Board::new(1);
    board.chips.set_cr8(0, 0xfa);
    assert_eq!(board.load(0, TPR), 0xa0, "CR8 has four bits");
}

/// 11.8.4, 11.8.5, 11.9: request, service, end; the spurious vector leaves no trace.
#[test]
fn from_request_to_end() {
    let mut board = Board::new(1);
    for vector in [0x31, 0x45, 0x44, 0x45] {
        board.chips.raise(0, vector);
    }
    assert_eq!(board.load(0, IRR + 1), 1 << 0x11);
    assert_eq!(board.load(0, IRR + 2), 1 << 5 | 1 << 4);
    assert_eq!(board.load(0, TMR + 2), 0);
    assert_eq!(board.vector(0), Some(0x45));
    assert_eq!(board.load(0, ISR + 2), 1 << 5);
    assert_eq!(board.pending(0), [], "one class at a time");
    board.chips.raise(0, 0x80);
    assert_eq!(board.vector(0), Some(0x80));
    board.store(0, EOI, 0);
    board.store(0, EOI, 0);
    assert_eq!(board.vector(0), Some(0x44));
    board.store(0, EOI, 0);
    assert_eq!(board.pending(0), [Delivery::Vector(0x31)]);
    board.store(0, TPR, 0x30);
    let taken = board.chips.acknowledge(0, Delivery::Vector(0x31));
    assert_eq!(taken, Some(Delivery::Vector(0xff)));
    assert_eq!((0..8).map(|at| board.load(0, ISR + at)).max(), Some(0));
    board.store(0, TPR, 0);
    assert_eq!(board.vector(0), Some(0x31));
    board.store(0, EOI, 0);
    board.store(0, EOI, 0);
    assert_eq!(board.pending(0), []);
}

/// 11.4.7.2: no interrupt comes in, those that are here stay, NMIs pass.
#[test]
fn disabled_by_software() {
    let mut board = Board::new(1);
    board.store(0, LVTPC, 0x400);
    board.chips.raise(0, 0x50);
    board.store(0, SVR, 0xff);
    board.chips.raise(0, 0x60);
    board.chips.raise_nmi(0);
    assert_eq!(board.pending(0), [Delivery::Nmi, Delivery::Vector(0x50)]);
    assert_eq!(board.load(0, LVTPC), 0x1_0400);
    board.store(0, LVTPC, 0x4ff);
    assert_eq!(
        board.chips.lvtpc(0),
        Some(0x1_04ff),
        "the mask cannot be cleared"
    );
    board.store(0, SVR, 0x1ff);
    assert_eq!(board.chips.lvtpc(0), Some(0x1_04ff), "and stays");
}

/// 11.5.1: what the modes of the LVT's entries bring.
#[test]
fn local_pins() {
    let cases = [
        (0x0_0033, vec![Delivery::Vector(0x33)]),
        (0x1_0033, vec![]),
        (0x0_0133, vec![]),
        (0x0_0200, vec![Delivery::Smi]),
        (0x0_0400, vec![Delivery::Nmi]),
        (0x0_0500, vec![Delivery::Init]),
        (0x0_0633, vec![]),
        (0x0_0700, vec![]),
        (0x0_000f, vec![]),
    ];
    for (pin, register) in [(Lint::Zero, LVT_LINT0), (Lint::One, LVT_LINT1)] {
        for (entry, expected) in &cases {
            let mut board = Board::new(1);
            board.store(0, register, *entry);
            board.chips.pulse(0, pin);
            assert_eq!(board.pending(0), *expected, "{entry:#x}");
        }
    }
}

#[test]
fn the_caller_delivers_pmis() {
    let mut board = Board::new(2);
    board.store(1, LVTPC, 0x4ee);
    assert_eq!(board.chips.lvtpc(1), Some(0x4ee));
    assert_eq!(board.chips.lvtpc(2), None);
    board.chips.raise_nmi(1);
    board.chips.mask_lvtpc(1);
    assert_eq!(board.load(1, LVTPC), 0x1_04ee);
    assert_eq!(board.pending(1), [Delivery::Nmi]);
    assert_eq!(
        board.chips.acknowledge(1, Delivery::Nmi),
        Some(Delivery::Nmi)
    );
    assert_eq!(board.chips.acknowledge(1, Delivery::Nmi), None);
}
