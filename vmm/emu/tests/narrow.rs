//! Paging outside of long mode: tables of 32 bits, and PAE's (SDM vol. 3A, 5.3 and 5.4).

use emu::VmExit;

use crate::guest::{Guest, announcing};
use crate::legacy::{HANDLER, INNER, OUTER, PROGRAM, gate, protected_on, words};
use crate::system::change;

const DIRECTORY: u64 = 0x20_0000;
const SECOND: u64 = 0x20_3000;
const TABLE: u64 = 0x20_1000;
const TOP: u64 = 0x20_2020;
const FRAME: u64 = 0x30_0000;
/// The page under test: of entry 256 of tables of 32 bits, and of PAE's second top entry.
const PAGE: u64 = 0x4000_0000;

const PG: u64 = 1 << 31;
const WP: u64 = 1 << 16;
const PSE: u64 = 1 << 4;
const PAE: u64 = 1 << 5;
const NXE: u64 = 1 << 11;
const NX: u64 = 1 << 63;

const LOAD: [u8; 2] = [0x8b, 0x06];
const STORE: [u8; 2] = [0x89, 0x06];

/// What decides, besides the tables.
#[derive(Clone, Copy)]
struct Mode {
    cpl: u8,
    cr0: u64,
    cr4: u64,
    efer: u64,
}

const KERNEL: Mode = Mode {
    cpl: 0,
    cr0: PG | WP,
    cr4: PSE,
    efer: 0,
};
const PAE_KERNEL: Mode = Mode {
    cr4: PAE,
    efer: NXE,
    ..KERNEL
};

/// A guest with one instruction at hand, with ESI at `at`; all of its RAM is mapped as it is.
fn guest(mode: Mode, code: &[u8], at: u64) -> Guest {
    guest_on(Guest::new(), mode, code, at)
}

fn guest_on(guest: Guest, mode: Mode, code: &[u8], at: u64) -> Guest {
    let mut guest = protected_on(guest, mode.cpl, code, &[]);
    gate(&mut guest, 14, 14, 0);
    gate(&mut guest, 13, 14, 0);
    if mode.cr4 & PAE != 0 {
        guest.write(DIRECTORY, 0x87);
        guest.write(DIRECTORY + 8, 0x20_0087);
        guest.write(TOP, DIRECTORY | 1);
        guest.write(TOP + 8, SECOND | 1);
    } else {
        guest.write(DIRECTORY, 0x87);
    }
    let cr3 = if mode.cr4 & PAE != 0 { TOP } else { DIRECTORY };
    let pdptes = std::array::from_fn(|n| guest.word(TOP + 8 * n as u64));
    change(&mut guest, |state| {
        state.cr0 |= mode.cr0;
        state.cr4 = mode.cr4;
        state.efer = mode.efer;
        state.cr3 = cr3;
        state.pdptes = pdptes;
        state.r[6] = at;
    });
    guest
}

/// Entries that lead to the page under test.
fn tables(guest: &mut Guest, mode: Mode, above: u64, leaf: u64) {
    if mode.cr4 & PAE != 0 {
        guest.write(SECOND, TABLE | above);
        guest.write(TABLE, FRAME | leaf);
    } else {
        guest.write(DIRECTORY + 4 * 256, TABLE | above);
        guest.write(TABLE, FRAME | leaf);
    }
}

/// #PF's error code, if the instruction raises one.
fn access(guest: &mut Guest) -> Option<u64> {
    let user = guest.cpu.state().cpl() == 3;
    let stop = guest.cpu.run(1);
    assert_eq!(stop, VmExit::Budget);
    if guest.cpu.state().rip != HANDLER {
        return None;
    }
    let frame = if user { INNER - 24 } else { OUTER - 16 };
    Some(words::<1>(guest, frame)[0])
}

#[test]
fn rights_are_those_of_both_levels() {
    const P: u64 = 1;
    const W: u64 = 2;
    const U: u64 = 4;
    for base in [KERNEL, PAE_KERNEL] {
        for number in 0..256u64 {
            let bit = |n: u32| number >> n & 1 != 0;
            let leaf = number & 7;
            let above = P | if bit(3) { W } else { 0 } | if bit(4) { U } else { 0 };
            let (user, writes) = (bit(5), bit(6));
            let mode = Mode {
                cpl: if user { 3 } else { 0 },
                cr0: if bit(7) { PG | WP } else { PG },
                ..base
            };
            let mut guest = guest(mode, if writes { &STORE } else { &LOAD }, PAGE);
            tables(&mut guest, mode, above, leaf);
            let all = leaf & above;
            let allowed = match (user, writes) {
                _ if leaf & P == 0 => false,
                (true, true) => all & (W | U) == W | U,
                (true, false) => all & U != 0,
                (false, true) => all & W != 0 || !bit(7),
                (false, false) => true,
            };
            let code = leaf & P | u64::from(writes) << 1 | u64::from(user) << 2;
            let expected = (!allowed).then_some(code);
            assert_eq!(access(&mut guest), expected, "{number:#x}");
            // A and D, and nothing beside an entry of 32 bits.
            let marks = if !allowed {
                0
            } else if writes {
                0x60
            } else {
                0x20
            };
            assert_eq!(guest.word(TABLE), FRAME | leaf | marks, "{number:#x}");
        }
    }
}

#[test]
fn pages_that_are_large() {
    // 4 MiB, with PSE; without it the bit says nothing, and the entry leads to a table.
    let large = |cr4: u64, entry: u64, at: u64| {
        let mode = Mode { cr4, ..KERNEL };
        let mut guest = guest(mode, &LOAD, PAGE + at);
        guest.write(DIRECTORY + 4 * 256, entry);
        guest.write(FRAME + 8, 0x1234_5678);
        guest.write(0x30_0408, 0x9abc_def0);
        if cr4 & PSE == 0 {
            // The program needs a table as well.
            guest.write(DIRECTORY, TABLE | 7);
            for page in 0..0x400 {
                guest.bytes(TABLE + 4 * page, &((page << 12) as u32 | 7).to_le_bytes());
            }
        }
        let code = access(&mut guest);
        (code, guest.cpu.state().r[0])
    };
    assert_eq!(large(PSE, 0x87, FRAME + 8), (None, 0x1234_5678));
    // Address bits of a smaller page are reserved.
    for bit in 13..22 {
        let (code, _) = large(PSE, 0x87 | 1 << bit, FRAME + 8);
        assert_eq!(code, Some(9), "{bit}");
    }
    assert_eq!(large(0, TABLE | 0x87, FRAME + 8), (None, 0x1234_5678));
    // 2 MiB of PAE.
    for (entry, expected) in [(0x20_0087, None), (0x20_0087 | 1 << 13, Some(9))] {
        let mut guest = guest(PAE_KERNEL, &LOAD, PAGE + 0x10_0008);
        guest.write(SECOND, entry);
        guest.write(FRAME + 8, 0x1234_5678);
        assert_eq!(access(&mut guest), expected);
    }
}

#[test]
fn bits_that_pae_reserves() {
    for (bit, efer, expected) in [
        (63, NXE, None),
        (63, 0, Some(9)),
        (52, NXE, Some(9)),
        (62, NXE, Some(9)),
        (41, NXE, Some(9)),
        (40, NXE, None),
    ] {
        let mode = Mode { efer, ..PAE_KERNEL };
        let mut guest = guest(mode, &LOAD, PAGE);
        tables(&mut guest, mode, 7 | (1 << bit) & NX, 7 | 1 << bit);
        // Bit 40 leads to where nothing is: a device.
        if bit == 40 {
            let address = FRAME | 1 << 40;
            assert_eq!(guest.cpu.run(1), VmExit::MmioRead { address, len: 4 });
        } else {
            assert_eq!(access(&mut guest), expected, "{bit}");
        }
    }
    // NX, fetched: JMP ESI.
    let mut guest = guest(PAE_KERNEL, &[0xff, 0xe6], PAGE);
    tables(&mut guest, PAE_KERNEL, 7, 7 | NX);
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    assert_eq!(access(&mut guest), Some(0x11));
}

#[test]
fn top_entries_are_loaded_with_cr3() {
    // MOV CR3, EAX; MOV EAX, [ESI].
    let code = [0x0f, 0x22, 0xd8, 0x8b, 0x06];
    let mut one = guest(PAE_KERNEL, &code, PAGE);
    tables(&mut one, PAE_KERNEL, 7, 7);
    // Its entry is gone from memory, but not from the processor.
    one.write(TOP + 8, 0);
    change(&mut one, |state| state.rip += 3);
    assert_eq!(access(&mut one), None);
    change(&mut one, |state| {
        state.rip = PROGRAM;
        state.r[0] = TOP;
    });
    assert_eq!(access(&mut one), None);
    assert_eq!(access(&mut one), Some(0));
    // Reserved bits: #GP(0), and the old ones stay.
    for bit in [1, 2, 5, 6, 7, 8, 41, 52, 63] {
        let mut one = guest(PAE_KERNEL, &code, PAGE);
        tables(&mut one, PAE_KERNEL, 7, 7);
        one.write(TOP + 16, 1 | 1 << bit);
        change(&mut one, |state| state.r[0] = TOP);
        assert_eq!(access(&mut one), Some(0), "{bit}");
        assert_eq!(one.cpu.state().pdptes[2], 0);
        change(&mut one, |state| state.rip = PROGRAM + 3);
        assert_eq!(access(&mut one), None);
    }
}

#[test]
fn a_program_switches_paging_on() {
    // MOV CR0, EAX; MOV [ESI], EBX; MOV CR0, ECX.
    let code = [0x0f, 0x22, 0xc0, 0x89, 0x1e, 0x0f, 0x22, 0xc1];
    for base in [KERNEL, PAE_KERNEL] {
        let mode = Mode { cr0: 0, ..base };
        let mut guest = guest(mode, &code, PAGE);
        tables(&mut guest, mode, 7, 7);
        change(&mut guest, |state| {
            state.pdptes = [0; 4];
            state.r[0] = state.cr0 | PG;
            state.r[1] = state.cr0;
            state.r[3] = 0x5555_aaaa;
        });
        // Until the last of them, which may take it beyond.
        assert_eq!(guest.cpu.run(66), VmExit::Budget);
        assert_eq!(guest.cpu.state().rip, PROGRAM + 8);
        assert_eq!(words::<1>(&guest, FRAME), [0x5555_aaaa]);
    }
}

/// PSE-36: bits of a page of 4 MiB are address bits from 32 on, as many as there are, 40 at most
/// (SDM vol. 3A, table 5-4).
#[test]
fn pages_of_four_mib_beyond_four_gib() {
    for (physical_bits, most) in [(36, 4), (39, 7), (40, 8), (46, 8)] {
        for bit in 0..9 {
            let cpuid = announcing(|leaf, regs| match leaf {
                1 => regs.edx |= 1 << 17,
                0x8000_0008 => regs.eax = regs.eax & !0xff | physical_bits,
                _ => {}
            });
            let mut guest = guest_on(Guest::with(cpuid), KERNEL, &LOAD, PAGE + 0x1234);
            let entry = 0x40_0087 | 1 << (13 + bit);
            guest.bytes(DIRECTORY + 4 * 256, &(entry as u32).to_le_bytes());
            if bit < most {
                let address = 1 << (32 + bit) | 0x40_1234;
                let stop = guest.cpu.run(1);
                assert_eq!(stop, VmExit::MmioRead { address, len: 4 }, "{bit}");
            } else {
                assert_eq!(access(&mut guest), Some(9), "{physical_bits} {bit}");
            }
        }
    }
}
