//! What is known of code and translations changes nothing that a guest or a count sees.

use emu::{SlowPath, State, VmExit};

use crate::guest::{Guest, PAGES, PRESENT, WRITABLE};
use crate::system::{CODE, DATA, change, guest};

/// Offset of the entry of a page of 4 KiB in the tables of `guest`.
fn entry(guest: &Guest, linear: u64) -> u64 {
    let mut table = guest.cpu.state().cr3;
    for shift in [39, 30, 21] {
        table = guest.word(table + 8 * (linear >> shift & 0x1ff)) & !0xfff;
    }
    table + 8 * (linear >> 12 & 0x1ff)
}

fn clear(guest: &mut Guest, linear: u64, bits: u64) {
    let at = entry(guest, linear);
    let value = guest.word(at) & !bits;
    guest.write(at, value);
}

#[test]
fn strings_take_the_same_time_over_code() {
    // CALL to RET in the page of data; REP STOSB downwards over it; HLT.
    let run = |forgets: bool| -> (State, VmExit) {
        let mut guest = guest(0, &[0xff, 0xd0, 0xf3, 0xaa, 0xf4]);
        guest.map(DATA + 0x1000, PAGES + 0x2000, PRESENT | WRITABLE);
        guest.bytes(PAGES + 0x1ff0, &[0xc3]);
        change(&mut guest, |state| {
            state.set_rflags(0x402);
            state.r[0] = DATA + 0xff0;
            state.r[1] = 300;
            state.r[7] = DATA + 0x1040;
        });
        assert_eq!(guest.cpu.run(2), VmExit::Budget);
        if forgets {
            guest.cpu.forget_code();
        }
        let stop = guest.cpu.run(100);
        (guest.cpu.state().clone(), stop)
    };
    let (state, stop) = run(false);
    assert_eq!((stop, state.r[1]), (VmExit::Halted, 0));
    assert_eq!((state, stop), run(true));
}

#[test]
fn each_element_from_a_device_takes_its_time() {
    // REP INSB.
    let mut one = guest(0, &[0xf3, 0x6c]);
    change(&mut one, |state| {
        state.r[1] = 3;
        state.r[2] = 0x60;
    });
    one.cpu.want_window(true);
    let mut before = one.cpu.time();
    for left in [2, 1] {
        while one.cpu.run(100) == VmExit::Window {
            one.cpu.want_window(false);
        }
        one.cpu.io_data()[0] = 7;
        one.cpu.want_window(true);
        // Interrupts may come between.
        assert_eq!(one.cpu.run(100), VmExit::Window);
        assert_eq!(one.cpu.state().r[1], left);
        assert!(one.cpu.time() > before);
        before = one.cpu.time();
    }
}

#[test]
fn what_the_loop_needs_is_no_state() {
    // MOV EAX,[RIP]; NOP.
    let mut guest = guest(0, &[0x8b, 0x05, 0, 0, 0, 0, 0x90]);
    assert_eq!(guest.cpu.run(2), VmExit::Budget);
    assert!(guest.cpu.state().r[16..].iter().all(|one| *one == 0));
    assert_eq!(guest.cpu.interrupt(0x40), None);
    assert!(guest.cpu.state().r[16..].iter().all(|one| *one == 0));
}

#[test]
fn fetches_walk_alike_where_jumps_are_known() {
    // Two pages that share a place in the TLB, and jump to each other.
    const ACCESSED: u64 = 1 << 5;
    const FAR: u64 = CODE + (1024 << 12);
    let run = |forgets: bool| {
        let mut guest = guest(0, &[0xff, 0xe0]);
        guest.map(FAR, PAGES + 0x3000, PRESENT);
        guest.bytes(PAGES + 0x3000, &[0xff, 0xe3]);
        change(&mut guest, |state| (state.r[0], state.r[3]) = (FAR, CODE));
        assert_eq!(guest.cpu.run(4), VmExit::Budget);
        clear(&mut guest, CODE, ACCESSED);
        clear(&mut guest, FAR, ACCESSED);
        if forgets {
            guest.cpu.forget_code();
        }
        assert_eq!(guest.cpu.run(4), VmExit::Budget);
        [CODE, FAR].map(|page| guest.word(entry(&guest, page)) & ACCESSED)
    };
    assert_eq!(run(false), run(true));
    assert_eq!(run(false), [ACCESSED; 2]);
}

#[test]
fn stores_walk_alike_where_code_is() {
    // CALL to RET in the page of data; MOV [RSI],AL, again and again.
    const DIRTY: u64 = 1 << 6;
    let run = |forgets: bool| {
        let code = [0xff, 0xd0, 0x88, 0x06, 0xff, 0xd0, 0x88, 0x06, 0x88, 0x06];
        let mut guest = guest(0, &code);
        guest.bytes(PAGES + 0x1ff0, &[0xc3]);
        change(&mut guest, |state| state.r[0] = DATA + 0xff0);
        assert_eq!(guest.cpu.run(3), VmExit::Budget);
        clear(&mut guest, DATA, DIRTY);
        assert_eq!(guest.cpu.run(2), VmExit::Budget);
        if forgets {
            guest.cpu.forget_code();
        }
        assert_eq!(guest.cpu.run(2), VmExit::Budget);
        (
            guest.word(entry(&guest, DATA)) & DIRTY,
            guest.word(PAGES + 0x1000) & 0xff,
        )
    };
    assert_eq!(run(false), run(true));
    // The translation was known: nobody walks.
    assert_eq!(run(false), (0, 0xf0));
}

#[test]
fn entries_of_page_tables_that_are_code() {
    // An entry with P and W is ADD EDX,[RAX]; ADC [RAX],AL; ADD [RAX],AL twice, if its page is
    // this. With A it is AND instead of ADD.
    const TABLE: u64 = CODE + 0x8_0000;
    const FRESH: u64 = DATA + 0x1_0000;
    let mut guest = guest(0, &[]);
    guest.map(FRESH, PAGES + 0x1000, PRESENT | WRITABLE);
    let at = entry(&guest, FRESH);
    guest.map(TABLE, at & !0xfff, PRESENT | WRITABLE);
    // MOV AL,[RSI] before it uses it; HLT behind it. Both are entries that are not present.
    guest.bytes(at - 8, &[0x8a, 0x06, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90]);
    guest.bytes(at + 8, &[0xf4]);
    guest.bytes(PAGES + 0x1000, &[2]);
    change(&mut guest, |state| {
        state.rip = TABLE + (at & 0xfff) - 8;
        state.r[6] = FRESH + 8;
        state.r[0] = DATA;
        state.r[2] = 1;
    });
    assert_eq!(guest.cpu.run(20), VmExit::Halted);
    assert_eq!(guest.word(at) & 0x21, 0x21);
    assert_eq!(guest.cpu.state().r[2], 0);
}

#[test]
fn the_fast_path_is_left_for_a_reason() {
    // MOV EAX,[RSI]; MOV EAX,[RSI]; LOCK XADD [RSI],EAX; STOSB; FNINIT; EMMS; CPUID; STMXCSR [RSI].
    let code = [
        0x8b, 0x06, 0x8b, 0x06, 0xf0, 0x0f, 0xc1, 0x06, 0xaa, 0xdb, 0xe3, 0x0f, 0x77, 0x0f, 0xa2,
        0x0f, 0xae, 0x1e,
    ];
    let mut guest = self::guest(3, &code);
    change(&mut guest, |state| state.cr4 |= 1 << 9);
    assert_eq!(guest.cpu.run(8), VmExit::Budget);
    let paths = guest.cpu.slow_paths();
    let taken: Vec<(SlowPath, u64)> = SlowPath::ALL
        .iter()
        .map(|path| (*path, paths.of(*path)))
        .filter(|(_, times)| *times > 0)
        .collect();
    assert_eq!(
        taken,
        [
            (SlowPath::Integer, 1),
            (SlowPath::String, 1),
            (SlowPath::System, 1),
            (SlowPath::Mmx, 1),
            (SlowPath::Image, 1),
            (SlowPath::X87, 1),
            // The first load and the first store.
            (SlowPath::Memory, 2),
            // Of these and of the first fetch.
            (SlowPath::Walk, 3),
            (SlowPath::Lookup, 2),
            (SlowPath::Decode, 2),
        ]
    );
}

/// Whoever drops all translations pays for it, as INVLPG and MOV CR3 do.
#[test]
fn dropping_translations_takes_time() {
    const WP: u64 = 1 << 16;
    const TS: u64 = 1 << 3;
    const PGE: u64 = 1 << 7;
    const NXE: u64 = 1 << 11;
    // MOV CR0, RAX; MOV CR4, RAX; WRMSR of EFER; MOV CR3, RAX; INVLPG [RAX].
    let time = |code: &[u8], value: &dyn Fn(&State) -> u64| {
        let mut guest = guest(0, code);
        change(&mut guest, |state| {
            let value = value(state);
            state.r[0] = value;
            state.r[1] = 0xc000_0080;
            state.r[2] = value >> 32;
        });
        assert_eq!(guest.cpu.run(1), VmExit::Budget);
        assert_eq!(guest.cpu.state().rip, CODE + code.len() as u64);
        guest.cpu.time()
    };
    let flush = time(&[0x0f, 0x22, 0xd8], &|state| state.cr3);
    assert!(flush > 1);
    assert_eq!(time(&[0x0f, 0x01, 0x38], &|_| DATA), flush);
    let cr0 = [0x0f, 0x22, 0xc0];
    assert_eq!(time(&cr0, &|state| state.cr0 ^ TS), 1);
    assert_eq!(time(&cr0, &|state| state.cr0 ^ WP), flush);
    let cr4 = [0x0f, 0x22, 0xe0];
    assert_eq!(time(&cr4, &|state| state.cr4), 1);
    assert_eq!(time(&cr4, &|state| state.cr4 ^ PGE), flush);
    let efer = [0x0f, 0x30];
    assert_eq!(time(&efer, &|state| state.efer), 1);
    assert_eq!(time(&efer, &|state| state.efer ^ NXE), flush);
}
