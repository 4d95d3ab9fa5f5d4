//! Interprocessor interrupts (11.6) and how application processors start.

use irqchip::{Activity, Answer, Delivery, IoApicVersion};

use crate::board::*;

const LOGICAL: u32 = 1 << 11;
const ASSERT: u32 = 1 << 14;

/// The CPUs that got the vector.
fn receivers(board: &Board, cpus: usize, vector: u8) -> Vec<usize> {
    let has = |cpu: &usize| board.pending(*cpu).contains(&Delivery::Vector(vector));
    (0..cpus).filter(has).collect()
}

/// 11.6.1, 11.6.2.1.
#[test]
fn physical_destinations_and_shorthands() {
    let cases: [(usize, u32, &[usize]); 8] = [
        (2, 0, &[2]),
        (1, 0, &[1]),
        (7, 0, &[]),
        (0xff, 0, &[0, 1, 2, 3]),
        (0, 1 << 18, &[1]),
        (0, 2 << 18, &[0, 1, 2, 3]),
        (0, 3 << 18, &[0, 2, 3]),
        (2, 0x100, &[2]),
    ];
    for (to, command, expected) in cases {
        let mut board = Board::new(4);
        board.send(1, to, command | ASSERT | 0x77);
        assert_eq!(receivers(&board, 4, 0x77), expected, "{to} {command:#x}");
    }
}

/// 11.6.2.2: flat and cluster model.
#[test]
fn logical_destinations() {
    const FLAT: u32 = 0xffff_ffff;
    const CLUSTER: u32 = 0x0fff_ffff;
    let cases: [(u32, [u32; 4], usize, &[usize]); 9] = [
        (FLAT, [1, 2, 4, 8], 0x5, &[0, 2]),
        (FLAT, [1, 2, 4, 8], 0x10, &[]),
        (FLAT, [1, 2, 4, 8], 0xff, &[0, 1, 2, 3]),
        (FLAT, [1, 3, 0, 8], 0x2, &[1]),
        (CLUSTER, [0x01, 0x02, 0x11, 0x12], 0x03, &[0, 1]),
        (CLUSTER, [0x01, 0x02, 0x11, 0x12], 0x12, &[3]),
        (CLUSTER, [0x01, 0x02, 0x11, 0x12], 0x2f, &[]),
        (CLUSTER, [0x01, 0x02, 0x11, 0x12], 0xff, &[0, 1, 2, 3]),
        (0x7fff_ffff, [1, 2, 4, 8], 0x1, &[]),
    ];
    for (dfr, ldr, to, expected) in cases {
        let mut board = Board::new(4);
        for (cpu, ldr) in ldr.into_iter().enumerate() {
            board.store(cpu, DFR, dfr);
            board.store(cpu, LDR, ldr << 24);
        }
        board.send(3, to, LOGICAL | ASSERT | 0x77);
        assert_eq!(receivers(&board, 4, 0x77), expected, "{dfr:#x} {to:#x}");
    }
}

/// 11.12.9, 11.12.10: IDs of 32 bits; clusters of 16.
#[test]
fn x2apic_destinations() {
    let all: Vec<usize> = (0..20).collect();
    let others: Vec<usize> = (0..20).filter(|cpu| *cpu != 1).collect();
    let cases: [(u64, u32, &[usize]); 9] = [
        (18, 0, &[18]),
        (0xff, 0, &[]),
        (0x0100_0012, 0, &[]),
        (0xffff_ffff, 0, &all),
        (0xffff_ffff, LOGICAL, &all),
        (0x0001_0005, LOGICAL, &[16, 18]),
        (0x0000_8001, LOGICAL, &[0, 15]),
        (0x0002_ffff, LOGICAL, &[]),
        (0, 3 << 18, &others),
    ];
    for (to, command, expected) in cases {
        let mut board = Board::x2apic(20);
        let icr = to << 32 | u64::from(command | ASSERT | 0x77);
        assert_eq!(board.wrmsr(1, ICR, icr), Answer::Done);
        assert_eq!(
            receivers(&board, 20, 0x77),
            expected,
            "{to:#x} {command:#x}"
        );
        assert_eq!(board.rdmsr(1, ICR), Answer::Value(icr));
    }
    let mut board = Board::x2apic(2);
    assert_eq!(board.wrmsr(1, SELF_IPI, 0x99), Answer::Done);
    assert_eq!(receivers(&board, 2, 0x99), [1]);
}

/// A machine on its way from one mode to the other: an xAPIC compares eight bits.
#[test]
fn destinations_between_the_modes() {
    for (to, command, expected) in [
        (1u64, 0, &[1][..]),
        (0x101, 0, &[]),
        (2, LOGICAL, &[1]),
        (0x0001_0002, LOGICAL, &[]),
        (0xffff_ffff, 0, &[0, 1]),
    ] {
        let mut board = Board::new(2);
        board.store(1, LDR, 2 << 24);
        let base = board.base(0);
        board.set_base(0, base | X2APIC);
        board.wrmsr(0, ICR, to << 32 | u64::from(command | ASSERT | 0x77));
        assert_eq!(receivers(&board, 2, 0x77), expected, "{to:#x}");
    }
}

/// 11.6.2.4: of lowest priority, one gets it.
#[test]
fn lowest_priority() {
    let lowest = 0x100 | LOGICAL | ASSERT | 0x77;
    for (tpr, expected) in [
        ([0, 0, 0], 0),
        ([0x40, 0x30, 0x30], 1),
        ([0x40, 0x30, 0x20], 2),
    ] {
        let mut board = Board::new(3);
        for (cpu, tpr) in tpr.into_iter().enumerate() {
            board.store(cpu, LDR, 1 << (24 + cpu));
            board.store(cpu, TPR, tpr);
        }
        board.send(0, 7, lowest);
        assert_eq!(receivers(&board, 3, 0x77), [expected]);
    }
    // One that takes no interrupts is not chosen.
    let mut board = Board::new(2);
    board.store(0, SVR, 0xff);
    board.send(1, 0xff, 0x100 | ASSERT | 0x77);
    assert_eq!(receivers(&board, 2, 0x77), [1]);
}

#[test]
fn orders_without_a_vector() {
    for (command, expected) in [
        (0x4200, vec![Delivery::Smi]),
        (0x4300, vec![]),
        (0x4400, vec![Delivery::Nmi]),
        (0x4500, vec![Delivery::Init]),
        (0xc500, vec![Delivery::Init]),
        (0x8500, vec![]),
        (0x4608, vec![]),
        (0x4700, vec![]),
    ] {
        let mut board = Board::new(2);
        board.send(0, 1, command);
        assert_eq!(board.pending(1), expected, "{command:#x}");
        assert_eq!(board.pending(0), []);
    }
}

/// The order in which a CPU takes what came together.
#[test]
fn the_most_urgent_comes_first() {
    let mut board = Board::new(2);
    for command in [0x4055, 0x4400, 0x4200] {
        board.send(0, 1, command);
    }
    let all = [Delivery::Smi, Delivery::Nmi, Delivery::Vector(0x55)];
    assert_eq!(board.pending(1), all);
    board.send(0, 1, 0x4500);
    assert_eq!(board.pending(1).len(), 4);
    assert_eq!(board.take(1), Some(Delivery::Init));
    board.send(0, 1, 0x4699);
    assert_eq!(board.take(1), Some(Delivery::Sipi(0x99)));
    assert_eq!(board.pending(1), [], "INIT leaves nothing");
}

/// 9.4.4: INIT, SIPI, SIPI as Linux sends them.
#[test]
fn application_processors_start() {
    let mut board = Board::reset(2, IoApicVersion::V11);
    board.store(0, SVR, 0x1ff);
    assert_eq!(board.chips.activity(0), Activity::Runs);
    assert_eq!(board.chips.activity(1), Activity::WaitsForStartup);
    assert_eq!(board.chips.activity(2), Activity::WaitsForStartup);
    board.send(0, 1, 0xc500);
    board.send(0, 1, 0x8500);
    assert_eq!(board.take(1), Some(Delivery::Init));
    board.send(0, 1, 0x4400);
    assert_eq!(board.pending(1), [], "it waits for a SIPI alone");
    board.send(0, 1, 0x4699);
    board.send(0, 1, 0x469a);
    assert_eq!(board.chips.activity(1), Activity::WaitsForStartup);
    assert_eq!(board.take(1), Some(Delivery::Sipi(0x99)));
    assert_eq!(board.chips.activity(1), Activity::Runs);
    assert_eq!(board.take(1), Some(Delivery::Nmi), "it was kept");
    board.send(0, 1, 0x469b);
    assert_eq!(board.pending(1), [], "one that runs takes none");
    // Both before it looks.
    board.send(0, 1, 0x4500);
    board.send(0, 1, 0x4698);
    assert_eq!(board.pending(1), [Delivery::Init]);
    let early = board.chips.acknowledge(1, Delivery::Sipi(0x98));
    assert_eq!(early, None, "INIT first");
    assert_eq!(board.take(1), Some(Delivery::Init));
    assert_eq!(board.take(1), Some(Delivery::Sipi(0x98)));
    // A SIPI that it has not looked at is undone by the next INIT.
    board.send(0, 1, 0x4500);
    board.take(1);
    board.send(0, 1, 0x4697);
    board.send(0, 1, 0x4500);
    board.send(0, 1, 0x4696);
    assert_eq!(board.take(1), Some(Delivery::Init));
    assert_eq!(board.take(1), Some(Delivery::Sipi(0x96)));
}

/// 11.4.7.3.
#[test]
fn init_resets_but_for_ids_and_modes() {
    let mut board = Board::x2apic(2);
    board.wrmsr(1, TPR, 0x30);
    board.wrmsr(1, LVTPC, 0x400);
    board.wrmsr(1, LVT_TIMER, 0x4_0020);
    board.chips.wrmsr(0, 1, DEADLINE, 1000);
    board.chips.raise(1, 0x80);
    assert_eq!(board.chips.next_deadline(), Some(1000));
    board.wrmsr(0, ICR, 1 << 32 | 0x4500);
    assert_eq!(board.take(1), Some(Delivery::Init));
    assert_eq!(board.base(1), PAGE | ENABLE | X2APIC);
    for (register, value) in [
        (0x02, 1),
        (LDR, 2),
        (TPR, 0),
        (SVR, 0xff),
        (LVTPC, 0x1_0000),
    ] {
        assert_eq!(
            board.rdmsr(1, register),
            Answer::Value(value),
            "{register:#x}"
        );
    }
    assert_eq!(board.chips.next_deadline(), None);
    // The bootstrap processor goes on at its reset vector.
    board.wrmsr(1, ICR, 0x4500);
    board.wrmsr(1, ICR, 0x4699);
    assert_eq!(board.take(0), Some(Delivery::Init));
    assert_eq!(board.chips.activity(0), Activity::Runs);
    assert_eq!(board.pending(0), []);
}
