//! The APIC's timer (11.5.4). The TSC ticks twice a cycle of the timer's clock.

use irqchip::{Answer, Delivery};

use crate::board::*;

const PERIODIC: u32 = 1 << 17;
const TSC_DEADLINE: u32 = 2 << 17;
const MASKED: u32 = 1 << 16;

#[test]
fn dividers() {
    for (register, by) in [
        (0b0000, 2),
        (0b0001, 4),
        (0b0010, 8),
        (0b0011, 16),
        (0b1000, 32),
        (0b1001, 64),
        (0b1010, 128),
        (0b1011, 1),
    ] {
        let mut board = Board::new(1);
        board.store(0, LVT_TIMER, 0x40);
        board.store(0, DIVIDE, register);
        board.store(0, INITIAL, 1000);
        assert_eq!(board.chips.next_deadline(), Some(2 * 1000 * by));
    }
}

#[test]
fn one_shot() {
    let mut board = Board::new(1);
    board.store(0, DIVIDE, 0xb);
    board.store(0, LVT_TIMER, 0x40);
    board.store(0, INITIAL, 100);
    assert_eq!(board.load(0, CURRENT), 100);
    board.advance(51);
    assert_eq!(board.load(0, CURRENT), 75);
    board.advance(148);
    assert_eq!((board.pending(0), board.load(0, CURRENT)), (vec![], 1));
    board.advance(1);
    assert_eq!(board.vector(0), Some(0x40));
    assert_eq!(board.load(0, CURRENT), 0);
    assert_eq!(board.load(0, INITIAL), 100);
    assert_eq!(board.chips.next_deadline(), None);
    board.store(0, INITIAL, 100);
    board.store(0, INITIAL, 0);
    assert_eq!(board.chips.next_deadline(), None);
}

#[test]
fn periodic() {
    let mut board = Board::new(1);
    board.advance(7);
    board.store(0, DIVIDE, 0xb);
    board.store(0, LVT_TIMER, PERIODIC | 0x40);
    board.store(0, INITIAL, 100);
    for period in 1..10 {
        assert_eq!(board.sleep(), 7 + 200 * period);
        assert_eq!(board.load(0, CURRENT), 100);
        assert_eq!(board.vector(0), Some(0x40));
        board.store(0, EOI, 0);
    }
    // Nobody looked for four and a half periods.
    board.advance(900);
    assert_eq!(board.vector(0), Some(0x40));
    assert_eq!(board.load(0, CURRENT), 50);
    board.store(0, EOI, 0);
    assert_eq!(board.pending(0), []);
    assert_eq!(board.chips.next_deadline(), Some(board.now + 100));
}

#[test]
fn a_divider_changes_the_pace_of_what_is_left() {
    let mut board = Board::new(1);
    board.store(0, DIVIDE, 0xb);
    board.store(0, LVT_TIMER, 0x40);
    board.store(0, INITIAL, 100);
    board.advance(60);
    board.store(0, DIVIDE, 0);
    assert_eq!(board.load(0, CURRENT), 70);
    assert_eq!(board.chips.next_deadline(), Some(60 + 70 * 4));
}

/// A timer that is masked counts, but nobody feels it.
#[test]
fn masked() {
    let mut board = Board::new(1);
    board.store(0, LVT_TIMER, MASKED | PERIODIC | 0x40);
    board.store(0, DIVIDE, 0xb);
    board.store(0, INITIAL, 100);
    assert_eq!(board.chips.next_deadline(), None);
    board.advance(230);
    assert_eq!(board.pending(0), []);
    assert_eq!(board.load(0, CURRENT), 85);
    board.store(0, LVT_TIMER, PERIODIC | 0x40);
    assert_eq!(board.pending(0), [], "what was missed is not made up for");
    assert_eq!(board.chips.next_deadline(), Some(400));
}

#[test]
fn tsc_deadline() {
    let mut board = Board::new(1);
    let read = |board: &mut Board| board.chips.rdmsr(board.now, 0, DEADLINE).unwrap();
    let write = |board: &mut Board, at| board.chips.wrmsr(board.now, 0, DEADLINE, at);
    write(&mut board, 500);
    assert_eq!(read(&mut board), Answer::Value(0), "not in this mode");
    board.store(0, LVT_TIMER, TSC_DEADLINE | 0x40);
    write(&mut board, 500);
    board.store(0, INITIAL, 10);
    assert_eq!(board.load(0, CURRENT), 0);
    assert_eq!(board.load(0, INITIAL), 0);
    assert_eq!(read(&mut board), Answer::Value(500));
    assert_eq!(board.chips.next_deadline(), Some(500));
    board.advance(499);
    assert_eq!(board.pending(0), []);
    board.advance(1);
    assert_eq!(board.vector(0), Some(0x40));
    board.store(0, EOI, 0);
    assert_eq!(read(&mut board), Answer::Value(0));
    assert_eq!(board.chips.next_deadline(), None);
    write(&mut board, 3);
    assert_eq!(
        board.vector(0),
        Some(0x40),
        "one in the past is due at once"
    );
    write(&mut board, u64::MAX);
    assert_eq!(board.chips.next_deadline(), Some(u64::MAX));
    write(&mut board, 0);
    assert_eq!(board.chips.next_deadline(), None);
}

#[test]
fn a_change_of_mode_disarms() {
    for from in 0..4u32 {
        for to in 0..4u32 {
            let mut board = Board::new(1);
            board.store(0, LVT_TIMER, from << 17 | 0x40);
            board.store(0, INITIAL, 1000);
            board.chips.wrmsr(0, 0, DEADLINE, 5000);
            let armed = board.chips.next_deadline();
            assert_eq!(armed.is_some(), from < 3, "mode {from}");
            board.store(0, LVT_TIMER, to << 17 | 0x41);
            let after = if from == to { armed } else { None };
            assert_eq!(board.chips.next_deadline(), after, "{from} to {to}");
        }
    }
}

#[test]
fn the_earliest_of_all() {
    let mut board = Board::new(3);
    for (cpu, deadline) in [900, 300, 600].into_iter().enumerate() {
        board.store(cpu, LVT_TIMER, TSC_DEADLINE | 0x40);
        board.chips.wrmsr(0, cpu, DEADLINE, deadline);
    }
    for (cpu, at) in [(1, 300), (2, 600), (0, 900)] {
        assert_eq!(board.sleep(), at);
        assert_eq!(board.pending(cpu), [Delivery::Vector(0x40)]);
    }
}

/// Time that goes back does not.
#[test]
fn time_stands_still_where_it_would_go_back() {
    let mut board = Board::new(1);
    board.store(0, DIVIDE, 0xb);
    board.store(0, LVT_TIMER, 0x40);
    board.store(0, INITIAL, 100);
    board.advance(150);
    board.now = 20;
    assert_eq!(board.load(0, CURRENT), 25);
}
