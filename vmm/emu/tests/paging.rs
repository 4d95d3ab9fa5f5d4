//! Every permutation of rights, against the rules as the manual's prose has them (SDM vol. 3A,
//! 5.6 "Access Rights").

use emu::{Cpu, Cpuid, Ram};

use crate::guest::{Guest, HANDLERS, Happened, PAGES, STACK_TOP, SYSTEM};

/// Where the page under test is.
const PAGE: u64 = 0x40_0000_0000;
/// Tables of its own, and code that accesses it: for both rings.
const DIRECTORY: u64 = 0x20_0000;
const TABLE: u64 = 0x20_1000;
const CODE: u64 = 0x41_0000_0000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
    Fetch,
}

#[derive(Debug, Clone, Copy)]
struct World {
    /// P, W, U, NX of the page's entry.
    leaf: [bool; 4],
    /// W, U, NX of the one above.
    above: [bool; 3],
    write_protect: bool,
    smep: bool,
    smap: bool,
    open: bool,
    no_execute: bool,
    user: bool,
    access: Access,
}

/// #PF's error code, by the prose; `None` if the access is allowed.
fn expected(world: World) -> Option<u64> {
    let World {
        leaf: [present, ..],
        ..
    } = world;
    let mut code = 0;
    if world.access == Access::Write {
        code |= 2;
    }
    if world.user {
        code |= 4;
    }
    if world.access == Access::Fetch && (world.no_execute || world.smep) {
        code |= 16;
    }
    // The entry above is reached first: it is present always, its NX may be reserved.
    if world.above[2] && !world.no_execute {
        return Some(code | 1 | 8);
    }
    if !present {
        return Some(code);
    }
    if world.leaf[3] && !world.no_execute {
        return Some(code | 1 | 8);
    }
    let writable = world.leaf[1] && world.above[0];
    let user_page = world.leaf[2] && world.above[1];
    let never = world.leaf[3] || world.above[2];
    let allowed = match (world.user, world.access) {
        (true, _) if !user_page => false,
        (true, Access::Read) => true,
        (true, Access::Write) => writable,
        (false, Access::Read) => !user_page || !world.smap || world.open,
        (false, Access::Write) => {
            (!user_page || !world.smap || world.open) && (writable || !world.write_protect)
        }
        (true, Access::Fetch) => !never,
        (false, Access::Fetch) => !never && (!user_page || !world.smep),
    };
    (!allowed).then_some(code | 1)
}

fn entry(bits: [bool; 4], to: u64) -> u64 {
    let [present, writable, user, never] = bits.map(u64::from);
    to | present | writable << 1 | user << 2 | never << 63
}

fn prepare() -> Guest {
    let mut guest = Guest::new();
    // The way to DIRECTORY: a page mapped beside, whose upper tables are everybody's.
    guest.map(PAGE + 0x4000_0000, PAGES, 7);
    let root = guest.word(0x1000 + 8 * (PAGE >> 39)) & !0xfff;
    guest.write(root + 8 * (PAGE >> 30 & 0x1ff), DIRECTORY | 7);
    guest.map(CODE, PAGES + 0x1000, 5);
    guest.map(CODE + 0x1000, PAGES + 0x2000, 1);
    // MOV RAX,[RDI]; MOV [RDI],RAX; JMP RDI: the same for both rings.
    let code = [0x48, 0x8b, 0x07, 0x48, 0x89, 0x07, 0xff, 0xe7];
    guest.bytes(PAGES + 0x1000, &code);
    guest.bytes(PAGES + 0x2000, &code);
    guest.bytes(PAGES + 0x3000, &[0x90; 64]);
    guest
}

fn check(guest: &mut Guest, world: World) {
    guest.write(
        DIRECTORY,
        entry(
            [true, world.above[0], world.above[1], world.above[2]],
            TABLE,
        ),
    );
    guest.write(TABLE, entry(world.leaf, PAGES + 0x3000));
    let mut state = guest.state(if world.user { 3 } else { 0 });
    let set = |value: &mut u64, bit: u32, on: bool| {
        *value = *value & !(1 << bit) | u64::from(on) << bit;
    };
    set(&mut state.cr0, 16, world.write_protect);
    set(&mut state.cr4, 20, world.smep);
    set(&mut state.cr4, 21, world.smap);
    set(&mut state.efer, 11, world.no_execute);
    state.set_rflags(2 | u64::from(world.open) << 18);
    // AC is an alignment check in CPL 3, and all is aligned.
    // A write leaves the code there alone.
    let inside = if world.access == Access::Write {
        0x800
    } else {
        0
    };
    state.r[7] = PAGE + inside;
    state.r[4] = SYSTEM + STACK_TOP - 0x800;
    let code = if world.user { CODE } else { CODE + 0x1000 };
    state.rip = match world.access {
        Access::Read => code,
        Access::Write => code + 3,
        Access::Fetch => PAGE,
    };
    guest.cpu.set_state(state);
    let happened = guest.one();
    let expected = match expected(world) {
        None => Happened::Retired,
        Some(code) => Happened::Fault(14, code, PAGE + inside),
    };
    assert_eq!(happened, expected, "{world:?}");
    let marked = |bit: u64| guest.word(TABLE) & bit != 0;
    let retired = expected == Happened::Retired;
    assert_eq!(marked(1 << 5), retired, "A, {world:?}");
    let dirty = retired && world.access == Access::Write;
    assert_eq!(marked(1 << 6), dirty, "D, {world:?}");
}

#[test]
fn rights_are_those_of_the_manual() {
    let mut guest = prepare();
    for number in 0..1u32 << 13 {
        let bit = |n: u32| number >> n & 1 != 0;
        for access in [Access::Read, Access::Write, Access::Fetch] {
            let world = World {
                leaf: [bit(0), bit(1), bit(2), bit(3)],
                above: [bit(4), bit(5), bit(6)],
                write_protect: bit(7),
                smep: bit(8),
                smap: bit(9),
                open: bit(10),
                no_execute: bit(11),
                user: bit(12),
                access,
            };
            check(&mut guest, world);
        }
    }
    assert_eq!(HANDLERS & 0xfff, 0);
}

#[test]
fn reserved_bits_and_what_is_nowhere() {
    let fault = |code| Happened::Fault(14, code, PAGE);
    let check = |level: usize, entry: u64, expected: Happened| {
        let mut guest = prepare();
        let root = guest.word(0x1000 + 8 * (PAGE >> 39)) & !0xfff;
        let slots = [TABLE, DIRECTORY, root + 8 * (PAGE >> 30 & 0x1ff)];
        guest.write(DIRECTORY, TABLE | 7);
        guest.write(TABLE, (PAGES + 0x3000) | 7);
        guest.write(slots[level], entry);
        let mut state = guest.state(0);
        state.r[7] = PAGE;
        state.r[4] = SYSTEM + STACK_TOP - 0x800;
        state.rip = CODE + 0x1000;
        guest.cpu.set_state(state);
        assert_eq!(guest.one(), expected, "level {level}, {entry:#x}");
    };
    // Beyond 41 bits of address.
    check(0, 1 << 41 | 7, fault(9));
    check(1, 1 << 51 | 7, fault(9));
    // Large pages have their own.
    check(1, 0x20_0000 | 0x87, Happened::Retired);
    check(1, 0x20_2000 | 0x87, fault(9));
    check(2, 0x87, Happened::Retired);
    check(2, 0x20_0087, fault(9));
    // A table outside of memory reads as ones.
    check(1, 1 << 40 | 7, fault(9));
    // PAT of a page's entry is not PS.
    check(0, (PAGES + 0x3000) | 0x87, Happened::Retired);
}

#[test]
fn without_the_feature_there_are_no_gigabyte_pages() {
    let cpu = Cpu::new(Ram::zeroed(0x1000).expect("memory"), Cpuid::default());
    assert!(!Cpuid::default().has_gigabyte_pages());
    assert_eq!(cpu.time(), 0);
}
