//! The I/O APIC, and how its interrupts end.

use irqchip::{Answer, Delivery, IoApicVersion, Line};

use crate::board::*;

const LEVEL: u32 = 1 << 15;
const MASKED: u32 = 1 << 16;
const REMOTE_IRR: u32 = 1 << 14;
const PIN: u8 = 9;
const ENTRY: u8 = 0x10 + 2 * PIN;

fn asserted(board: &mut Board) {
    board.chips.set_line(PIN, Line::Asserted);
}

fn deasserted(board: &mut Board) {
    board.chips.set_line(PIN, Line::Deasserted);
}

#[test]
fn registers() {
    for (version, register) in [
        (IoApicVersion::V11, 0x17_0011),
        (IoApicVersion::V20, 0x17_0020),
    ] {
        let mut board = Board::with(1, version);
        assert_eq!(board.ioapic(1), register);
    }
    let mut board = Board::new(1);
    board.set_ioapic(0, u32::MAX);
    assert_eq!(
        (board.ioapic(0), board.ioapic(2)),
        (0x0f00_0000, 0x0f00_0000)
    );
    for pin in 0..24 {
        let index = 0x10 + 2 * pin;
        assert_eq!((board.ioapic(index), board.ioapic(index + 1)), (MASKED, 0));
        board.set_ioapic(index + 1, u32::MAX);
        board.set_ioapic(index, u32::MAX);
        assert_eq!(board.ioapic(index), 0x1_afff);
        assert_eq!(board.ioapic(index + 1), 0xff00_0000);
    }
    for index in (3..0x10).chain(0x40..=0xff) {
        board.set_ioapic(index, u32::MAX);
        assert_eq!(board.ioapic(index), 0, "{index:#x}");
    }
    assert_eq!(board.chips.mmio_read(0, 0, IOAPIC - 1, 1), None);
    assert_eq!(board.chips.mmio_read(0, 0, IOAPIC + 0x100, 1), None);
    assert_eq!(
        board.chips.mmio_read(0, 0, IOAPIC + 0x20, 4),
        Some(Answer::Value(0))
    );
}

/// Each rise is an interrupt, but for those that find the pin masked.
#[test]
fn edges() {
    let mut board = Board::new(2);
    asserted(&mut board);
    board.wire(PIN, 1, 0x61);
    assert_eq!(board.pending(1), [], "it rose while it was masked");
    deasserted(&mut board);
    asserted(&mut board);
    assert_eq!(board.vector(1), Some(0x61));
    assert_eq!(board.ioapic(ENTRY), 0x61);
    board.store(1, EOI, 0);
    asserted(&mut board);
    assert_eq!(board.pending(1), [], "it has not risen");
    deasserted(&mut board);
    asserted(&mut board);
    assert_eq!(board.vector(1), Some(0x61));
    assert_eq!(board.pending(0), []);
}

#[test]
fn levels() {
    let mut board = Board::new(1);
    board.wire(PIN, 0, LEVEL | MASKED | 0x61);
    asserted(&mut board);
    assert_eq!(board.pending(0), []);
    board.wire(PIN, 0, LEVEL | 0x61);
    assert_eq!(board.ioapic(ENTRY), LEVEL | REMOTE_IRR | 0x61);
    assert_eq!(board.load(0, TMR + 3), 2);
    assert_eq!(board.vector(0), Some(0x61));
    asserted(&mut board);
    assert_eq!(board.pending(0), []);
    // It still asks at the end, so it comes again.
    board.store(0, EOI, 0);
    assert_eq!(board.vector(0), Some(0x61));
    deasserted(&mut board);
    assert_eq!(board.ioapic(ENTRY), LEVEL | REMOTE_IRR | 0x61);
    board.store(0, EOI, 0);
    assert_eq!(board.ioapic(ENTRY), LEVEL | 0x61);
    assert_eq!(board.pending(0), []);
}

#[test]
fn only_the_same_vector_ends_a_level() {
    let mut board = Board::new(1);
    board.wire(PIN, 0, LEVEL | 0x61);
    asserted(&mut board);
    board.vector(0);
    board.chips.raise(0, 0x71);
    assert_eq!(board.vector(0), Some(0x71));
    board.store(0, EOI, 0);
    assert_eq!(board.ioapic(ENTRY), LEVEL | REMOTE_IRR | 0x61);
}

/// TMR says how the vector came last.
#[test]
fn an_edge_of_the_same_vector_is_not_broadcast() {
    let mut board = Board::new(1);
    board.wire(PIN, 0, LEVEL | 0x61);
    asserted(&mut board);
    board.chips.raise(0, 0x61);
    assert_eq!(board.load(0, TMR + 3), 0);
    assert_eq!(board.vector(0), Some(0x61));
    board.store(0, EOI, 0);
    assert_eq!(board.ioapic(ENTRY), LEVEL | REMOTE_IRR | 0x61);
}

/// Linux ends one so where there is no EOI register: masked and edge-triggered, then as before.
#[test]
fn an_edge_between_clears_remote_irr() {
    let mut board = Board::new(1);
    board.wire(PIN, 0, LEVEL | 0x61);
    asserted(&mut board);
    assert_eq!(board.vector(0), Some(0x61));
    deasserted(&mut board);
    board.set_ioapic(ENTRY, LEVEL | MASKED | 0x61);
    assert_eq!(board.ioapic(ENTRY), LEVEL | MASKED | REMOTE_IRR | 0x61);
    board.set_ioapic(ENTRY, MASKED | 0x61);
    board.set_ioapic(ENTRY, LEVEL | 0x61);
    assert_eq!(board.ioapic(ENTRY), LEVEL | 0x61);
}

/// 11.8.5: an EOI that is not broadcast; the I/O APIC's own register.
#[test]
fn the_eoi_register_of_version_20() {
    let suppress = |board: &mut Board| {
        assert_eq!(board.load(0, 0x03), 0x0105_0014);
        board.store(0, SVR, 0x11ff);
        board.load(0, SVR)
    };
    let mut board = Board::with(1, IoApicVersion::V20);
    assert_eq!(suppress(&mut board), 0x11ff);
    board.wire(PIN, 0, LEVEL | 0x61);
    asserted(&mut board);
    assert_eq!(board.vector(0), Some(0x61));
    board.store(0, EOI, 0);
    assert_eq!(board.pending(0), []);
    assert_eq!(board.ioapic(ENTRY), LEVEL | REMOTE_IRR | 0x61);
    board.chips.mmio_write(0, 0, IOAPIC + 0x40, 4, 0x62);
    assert_eq!(board.pending(0), []);
    board.chips.mmio_write(0, 0, IOAPIC + 0x40, 4, 0x61);
    assert_eq!(board.vector(0), Some(0x61));
    // Version 11h has neither.
    let mut board = Board::new(1);
    board.store(0, SVR, 0x11ff);
    assert_eq!(board.load(0, SVR), 0x1ff);
    board.wire(PIN, 0, LEVEL | 0x61);
    asserted(&mut board);
    board.chips.mmio_write(0, 0, IOAPIC + 0x40, 4, 0x61);
    assert_eq!(board.ioapic(ENTRY), LEVEL | REMOTE_IRR | 0x61);
}

/// What nobody takes is still asked for.
#[test]
fn a_level_waits_for_somebody() {
    let mut board = Board::new(1);
    board.wire(PIN, 5, LEVEL | 0x61);
    asserted(&mut board);
    assert_eq!(board.ioapic(ENTRY), LEVEL | 0x61);
    board.wire(PIN, 0, LEVEL | 0x61);
    assert_eq!(board.vector(0), Some(0x61));
}

#[test]
fn delivery_modes() {
    for (entry, expected) in [
        (0x0061, vec![Delivery::Vector(0x61)]),
        (0x0161, vec![Delivery::Vector(0x61)]),
        (0x0200, vec![Delivery::Smi]),
        (0x0361, vec![]),
        (0x0400, vec![Delivery::Nmi]),
        (0x0400 | LEVEL, vec![Delivery::Nmi]),
        (0x0500, vec![Delivery::Init]),
        (0x0661, vec![]),
        (0x0761, vec![]),
        (0x2061, vec![Delivery::Vector(0x61)]),
    ] {
        let mut board = Board::new(1);
        board.wire(PIN, 0, entry);
        asserted(&mut board);
        assert_eq!(board.pending(0), expected, "{entry:#x}");
    }
}

#[test]
fn destinations() {
    const LOGICAL: u32 = 1 << 11;
    for (to, entry, expected) in [
        (1, 0x61, vec![1]),
        (0xff, 0x61, vec![0, 1, 2]),
        (0b101, LOGICAL | 0x61, vec![0, 2]),
        (0b110, LOGICAL | 0x161, vec![1]),
        (9, 0x61, vec![]),
    ] {
        // In x2APIC mode, the logical IDs of the first eight are the same.
        for mut board in [Board::new(3), Board::x2apic(3)] {
            for cpu in 0..3 {
                if board.base(cpu) & X2APIC == 0 {
                    board.store(cpu, LDR, 1 << (24 + cpu));
                }
            }
            board.wire(PIN, to, entry);
            asserted(&mut board);
            let got: Vec<usize> = (0..3)
                .filter(|cpu| !board.pending(*cpu).is_empty())
                .collect();
            assert_eq!(got, expected, "{to:#x} {entry:#x}");
        }
    }
}

#[test]
fn pins_that_are_not_there() {
    let mut board = Board::new(1);
    for pin in [24, 31, 32, 255] {
        board.chips.set_line(pin, Line::Asserted);
    }
    let same = Board::new(1);
    assert_eq!(board.chips, same.chips);
}
