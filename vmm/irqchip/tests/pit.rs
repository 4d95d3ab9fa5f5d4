//! The 8254 and port 61h, and the masks of the 8259s. The TSC runs at 2 GHz.

use irqchip::{Answer, Chips, IoApicVersion, Machine};

use crate::board::*;

const PIT_HZ: u64 = 1_193_182;
/// The timer's entry in the I/O APIC.
const PIT_PIN: u8 = 2;

/// The first tick at which so many cycles of the 8254 are complete.
fn at(cycles: u64) -> u64 {
    (cycles * TSC_HZ).div_ceil(PIT_HZ)
}

fn program(board: &mut Board, channel: u8, mode: u8, count: u16) {
    board.set_port(0x43, channel << 6 | 0x30 | mode << 1);
    let [low, high] = count.to_le_bytes();
    board.set_port(0x40 + u16::from(channel), low);
    board.set_port(0x40 + u16::from(channel), high);
}

fn counter(board: &mut Board, channel: u8) -> u16 {
    board.set_port(0x43, channel << 6);
    let port = 0x40 + u16::from(channel);
    u16::from_le_bytes([board.port(port), board.port(port)])
}

/// Modes 2 and 3 come again, 0 and 4 once; 1 and 5 want a gate, which channel 0 has not.
#[test]
fn interrupts() {
    for (mode, deadlines) in [
        (0, vec![at(1000)]),
        (1, vec![]),
        (2, vec![at(1000), at(2000), at(3000)]),
        (3, vec![at(1000), at(2000), at(3000)]),
        (4, vec![at(1001)]),
        (5, vec![]),
        (6, vec![at(1000), at(2000), at(3000)]),
        (7, vec![at(1000), at(2000), at(3000)]),
    ] {
        let mut board = Board::new(1);
        board.wire(PIT_PIN, 0, 0x30);
        program(&mut board, 0, mode, 1000);
        for expected in &deadlines {
            assert_eq!(board.sleep(), *expected, "mode {mode}");
            assert_eq!(board.vector(0), Some(0x30));
            board.store(0, EOI, 0);
        }
        if deadlines.len() < 3 {
            assert_eq!(board.chips.next_deadline(), None, "mode {mode}");
        }
    }
}

#[test]
fn a_pin_that_is_masked_has_no_deadline() {
    let mut board = Board::new(1);
    program(&mut board, 0, 2, 1000);
    assert_eq!(board.chips.next_deadline(), None);
    board.advance(at(1500));
    assert_eq!(counter(&mut board, 0), 500);
    board.wire(PIT_PIN, 0, 0x30);
    assert_eq!(board.pending(0), []);
    assert_eq!(board.chips.next_deadline(), Some(at(2000)));
}

#[test]
fn counting_elements() {
    // Mode, cycles after the load of 1000, what is read.
    for (mode, cycles, expected) in [
        (0, 0, 1000),
        (0, 999, 1),
        (0, 1000, 0),
        (0, 1001, 0xffff),
        (2, 0, 1000),
        (2, 999, 1),
        (2, 1000, 1000),
        (3, 0, 1000),
        (3, 499, 2),
        (3, 500, 1000),
        (3, 1001, 998),
        (4, 1001, 0xffff),
    ] {
        let mut board = Board::new(1);
        program(&mut board, 0, mode, 1000);
        board.advance(at(cycles));
        assert_eq!(counter(&mut board, 0), expected, "mode {mode} at {cycles}");
    }
    let mut board = Board::new(1);
    program(&mut board, 0, 2, 0);
    board.advance(at(0xffff));
    assert_eq!(counter(&mut board, 0), 1, "0 stands for 65536");
}

#[test]
fn counts_are_latched() {
    let mut board = Board::new(1);
    program(&mut board, 0, 2, 1000);
    board.set_port(0x43, 0);
    board.advance(at(300));
    board.set_port(0x43, 0);
    assert_eq!([board.port(0x40), board.port(0x40)], 1000u16.to_le_bytes());
    assert_eq!([board.port(0x40), board.port(0x40)], 700u16.to_le_bytes());
    // Read back: count and status of channels 0 and 2.
    board.set_port(0x43, 0b1100_1010);
    assert_eq!(board.port(0x40), 0b1011_0100, "OUT, both halves, mode 2");
    assert_eq!([board.port(0x40), board.port(0x40)], 700u16.to_le_bytes());
    assert_eq!(
        board.port(0x42),
        0b1111_0110,
        "OUT, no count yet, both halves, mode 3"
    );
}

#[test]
fn one_half_of_a_count() {
    let mut board = Board::new(1);
    board.wire(PIT_PIN, 0, 0x30);
    board.set_port(0x43, 0x14);
    board.set_port(0x40, 200);
    assert_eq!(board.chips.next_deadline(), Some(at(200)));
    assert_eq!((board.port(0x40), board.port(0x40)), (200, 200));
    board.set_port(0x43, 0x24);
    board.set_port(0x40, 2);
    assert_eq!(board.chips.next_deadline(), Some(at(512)));
    assert_eq!(board.port(0x40), 2);
}

/// A count of 1 is not allowed in modes 2 and 3.
#[test]
fn the_shortest_period() {
    for mode in [2, 3] {
        let mut board = Board::new(1);
        board.wire(PIT_PIN, 0, 0x30);
        program(&mut board, 0, mode, 1);
        assert_eq!(board.chips.next_deadline(), Some(at(2)));
        assert_eq!(counter(&mut board, 0), 2);
    }
}

/// The first half of a new count stops mode 0.
#[test]
fn half_a_count() {
    for (mode, runs) in [(0, false), (2, true)] {
        let mut board = Board::new(1);
        board.wire(PIT_PIN, 0, 0x30);
        program(&mut board, 0, mode, 1000);
        board.set_port(0x40, 0);
        assert_eq!(board.chips.next_deadline(), runs.then_some(at(1000)));
        board.set_port(0x40, 1);
        assert_eq!(board.chips.next_deadline(), Some(at(256)));
    }
}

#[test]
fn decimal() {
    let mut board = Board::new(1);
    board.wire(PIT_PIN, 0, 0x30);
    board.set_port(0x43, 0x35);
    board.set_port(0x40, 0x34);
    board.set_port(0x40, 0x12);
    assert_eq!(board.chips.next_deadline(), Some(at(1234)));
    board.advance(at(1000));
    assert_eq!(counter(&mut board, 0), 0x234);
}

/// As Linux and others measure the TSC: channel 2 in mode 0, gate and OUT in port 61h.
#[test]
fn a_calibration() {
    let mut board = Board::new(1);
    board.set_port(
        0x61,
        board.chips.clone().port_read(0, 0x61).map_or(0, |_| 1),
    );
    program(&mut board, 2, 0, 0xffff);
    assert_eq!(board.port(0x61) & 0x2f, 1);
    board.advance(at(0xffff) - 1);
    assert_eq!(board.port(0x61) & 0x2f, 1);
    board.advance(1);
    assert_eq!(board.port(0x61) & 0x2f, 0x21);
    assert_eq!(
        board.chips.next_deadline(),
        None,
        "nobody waits for channel 2"
    );
}

#[test]
fn gates() {
    // Mode, OUT while the gate is low, after 100 of 1000 cycles.
    for (mode, out) in [
        (0, 0),
        (1, 0x20),
        (2, 0x20),
        (3, 0x20),
        (4, 0x20),
        (5, 0x20),
    ] {
        let mut board = Board::new(1);
        program(&mut board, 2, mode, 1000);
        board.advance(at(100));
        assert_eq!(board.port(0x61) & 0x20, out, "mode {mode}");
        let start = board.now;
        board.set_port(0x61, 3);
        board.advance(at(600) - start);
        board.set_port(0x61, 2);
        let held = counter(&mut board, 2);
        board.advance(at(100));
        let again = counter(&mut board, 2);
        let stops = matches!(mode, 0 | 2 | 3 | 4);
        assert_eq!(held == again, stops, "mode {mode}");
        let expected = match mode {
            0 | 4 => 500,
            2 | 3 => 1000,
            _ => 400,
        };
        assert_eq!(again, expected, "mode {mode}");
    }
}

/// Memory's refresh, by which old programs wait.
#[test]
fn bit_4_of_port_61_changes() {
    let mut board = Board::new(1);
    let first = board.port(0x61) & 0x10;
    board.advance(at(18));
    assert_ne!(board.port(0x61) & 0x10, first);
    board.advance(at(18));
    assert_eq!(board.port(0x61) & 0x10, first);
}

/// It does not drift against the TSC, whatever that is.
#[test]
fn deadlines_of_odd_frequencies() {
    for tsc_hz in [1, 999, 1_193_182, 2_999_999_999, u64::MAX] {
        let machine = Machine {
            tsc_hz,
            ..machine(1, IoApicVersion::V11)
        };
        let mut board = Board {
            chips: Chips::new(&machine).unwrap(),
            now: 0,
        };
        board.store(0, SVR, 0x1ff);
        board.wire(PIT_PIN, 0, 0x30);
        program(&mut board, 0, 2, 11932);
        for period in 1..50u64 {
            let cycles = u128::from(period) * 11932;
            let exact = (cycles * u128::from(tsc_hz)).div_ceil(PIT_HZ.into());
            let Some(next) = board.chips.next_deadline() else {
                assert!(exact > u128::from(u64::MAX));
                break;
            };
            assert!(next > board.now);
            if tsc_hz > PIT_HZ {
                assert_eq!(u128::from(next), exact);
            }
            board.sleep();
        }
    }
}

/// What Linux asks before it believes in ISA interrupts.
#[test]
fn masks_of_the_8259s() {
    let mut board = Board::new(1);
    board.set_port(0xa1, 0xff);
    board.set_port(0x21, 0xfb);
    assert_eq!((board.port(0x21), board.port(0xa1)), (0xfb, 0xff));
    // Initialisation: three words after the first; or one, of a single one without a fourth.
    for (port, icw1, words) in [
        (0x20, 0x11, 3),
        (0xa0, 0x11, 3),
        (0x20, 0x12, 1),
        (0x20, 0x13, 2),
    ] {
        board.set_port(port + 1, 0x55);
        board.set_port(port, icw1);
        assert_eq!(board.port(port + 1), 0);
        for word in 0..words {
            board.set_port(port + 1, 0x30 + word);
            assert_eq!(board.port(port + 1), 0);
        }
        board.set_port(port + 1, 0xaa);
        assert_eq!(board.port(port + 1), 0xaa);
    }
    for command in [0x20, 0x60, 0x0a, 0x0b, 0x0c] {
        board.set_port(0x20, command);
        assert_eq!(
            (board.port(0x20), board.port(0x21)),
            (0, 0xaa),
            "{command:#x}"
        );
    }
    for (port, bits) in [(0x4d0, 0xf8), (0x4d1, 0xde)] {
        board.set_port(port, 0xff);
        assert_eq!(board.port(port), bits);
    }
}

#[test]
fn ports_of_others() {
    let ours = [
        0x20, 0x21, 0xa0, 0xa1, 0x4d0, 0x4d1, 0x40, 0x41, 0x42, 0x43, 0x61,
    ];
    let mut board = Board::new(1);
    for port in 0..=u16::MAX {
        let owned = ours.contains(&port);
        assert_eq!(board.chips.port_read(0, port).is_some(), owned, "{port:#x}");
        let written = board.chips.port_write(0, port, 0);
        assert_eq!(written, owned.then_some(Answer::Done), "{port:#x}");
    }
}
