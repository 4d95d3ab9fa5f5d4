//! x87 in a guest: when it faults, what faults leave, and what it tells of the last instruction.
//! What its instructions compute is tested in `emu-fpu` and by the oracle.

use emu::{Seg, State, VmExit};

use crate::guest::{Guest, Happened, PAGES, PRESENT, USER, WRITABLE};

const CODE: u64 = 0x20_0000_0000;
/// Two pages, with nothing behind.
const DATA: u64 = 0x20_0001_0000;
const END: u64 = DATA + 0x2000;

const MP: u64 = 1 << 1;
const EM: u64 = 1 << 2;
const TS: u64 = 1 << 3;

/// FCW, FSW, tags and FOP, as the first word of the image has them.
fn words(control: u64, status: u64, tags: u64, opcode: u64) -> u64 {
    control | status << 16 | tags << 32 | opcode << 48
}

/// Division by zero unmasked, and met.
const PENDING: u64 = 0x8084;
const OPEN: u64 = 0x37b;

fn guest() -> Guest {
    let mut guest = Guest::new();
    guest.map(CODE, PAGES, PRESENT | USER | WRITABLE);
    for page in [0, 0x1000] {
        let physical = PAGES + 0x1_0000 + page;
        guest.map(DATA + page, physical, PRESENT | USER | WRITABLE);
    }
    guest.bytes(PAGES + 0x1_0000, &[0; 0x2000]);
    guest
}

/// Executes one instruction; RBX is `rbx`. Gives the state before and after.
fn run(
    guest: &mut Guest,
    code: &[u8],
    rbx: u64,
    change: impl FnOnce(&mut State),
) -> (Happened, State, State) {
    guest.bytes(PAGES, &[0x90; 32]);
    guest.bytes(PAGES, code);
    let mut state = guest.state(3);
    state.rip = CODE;
    state.r[3] = rbx;
    change(&mut state);
    guest.cpu.set_state(state.clone());
    let happened = guest.one();
    (happened, state, guest.cpu.state().clone())
}

#[test]
fn it_is_switched_off() {
    let mut guest = guest();
    let mut check = |code: &[u8], cr0: u64, expected: Happened| {
        let (happened, ..) = run(&mut guest, code, DATA, |state| {
            state.cr0 = state.cr0 & !MP | cr0;
        });
        assert_eq!(happened, expected, "{code:x?} {cr0:#x}");
    };
    let off = Happened::Fault(7, 0, 0);
    // FLD1, FNSTSW AX, FLD m80, FNINIT.
    for code in [
        &[0xd9, 0xe8][..],
        &[0xdf, 0xe0],
        &[0xdb, 0x2b],
        &[0xdb, 0xe3],
    ] {
        check(code, 0, Happened::Retired);
        check(code, MP, Happened::Retired);
        check(code, TS, off.clone());
        check(code, EM, off.clone());
        check(code, MP | TS, off.clone());
    }
    check(&[0x9b], TS, Happened::Retired);
    check(&[0x9b], EM, Happened::Retired);
    check(&[0x9b], MP, Happened::Retired);
    check(&[0x9b], MP | TS, off);
}

#[test]
fn a_pending_exception_is_met_by_who_waits() {
    let mut guest = guest();
    let mut check = |code: &[u8], waits: bool| {
        let (happened, before, after) = run(&mut guest, code, DATA, |state| {
            state.x87[0] = words(OPEN, PENDING, 0xff, 0x7c1);
        });
        if waits {
            assert_eq!(happened, Happened::Fault(16, 0, 0), "{code:x?}");
            assert_eq!(after.x87, before.x87, "{code:x?}");
            assert_eq!(guest.frame(16)[0], CODE);
        } else {
            assert_eq!(happened, Happened::Retired, "{code:x?}");
        }
    };
    // FADD, FLDCW, FLDENV, FLD m64, FNOP, FWAIT.
    let waiting: [&[u8]; 6] = [
        &[0xd8, 0xc1],
        &[0xd9, 0x2b],
        &[0xd9, 0x23],
        &[0xdd, 0x03],
        &[0xd9, 0xd0],
        &[0x9b],
    ];
    for code in waiting {
        check(code, true);
    }
    // FNSTCW, FNSTSW, FNSTSW AX, FNSTENV, FNSAVE, FNCLEX, FNINIT.
    let others: [&[u8]; 7] = [
        &[0xd9, 0x3b],
        &[0xdd, 0x3b],
        &[0xdf, 0xe0],
        &[0xd9, 0x33],
        &[0xdd, 0x33],
        &[0xdb, 0xe2],
        &[0xdb, 0xe3],
    ];
    for code in others {
        check(code, false);
    }
}

/// The instruction that raises it retires, and a later one meets it.
#[test]
fn an_unmasked_exception_waits() {
    let mut guest = guest();
    // FLD1; FLDZ; FDIVP.
    let (happened, _, after) = run(&mut guest, &[0xd9, 0xe8], DATA, |state| {
        state.x87[0] = words(OPEN, 0, 0, 0);
    });
    assert_eq!(happened, Happened::Retired);
    for code in [[0xd9, 0xee], [0xde, 0xf9]] {
        let x87 = guest.cpu.state().x87;
        let (happened, ..) = run(&mut guest, &code, DATA, |state| state.x87 = x87);
        assert_eq!(happened, Happened::Retired);
    }
    let x87 = guest.cpu.state().x87;
    // Nothing is popped, and both are there: ST(0) is R6.
    assert_eq!(x87[0], words(OPEN, PENDING | 6 << 11, 0xc0, 0x6f9));
    assert_eq!(after.x87[4], 1 << 63);
    assert_eq!((x87[4], x87[6]), (0, 1 << 63));
    let (happened, ..) = run(&mut guest, &[0xd9, 0xe8], DATA, |state| state.x87 = x87);
    assert_eq!(happened, Happened::Fault(16, 0, 0));
}

#[test]
fn a_fault_leaves_the_fpu_and_memory() {
    let mut guest = guest();
    let pattern = [0x5a; 256];
    // Loads and stores of all sizes, the environment and the state, over the end and beyond.
    let loads: [&[u8]; 7] = [
        &[0xd8, 0x03],
        &[0xdd, 0x03],
        &[0xdb, 0x2b],
        &[0xdf, 0x03],
        &[0xdf, 0x23],
        &[0xd9, 0x23],
        &[0xdd, 0x23],
    ];
    let stores: [&[u8]; 8] = [
        &[0xd9, 0x1b],
        &[0xdd, 0x1b],
        &[0xdb, 0x3b],
        &[0xdf, 0x1b],
        &[0xdf, 0x33],
        &[0xd9, 0x33],
        &[0xdd, 0x33],
        &[0xd9, 0x3b],
    ];
    for (code, write) in loads
        .map(|code| (code, 0))
        .into_iter()
        .chain(stores.map(|code| (code, 2)))
    {
        for at in [END - 1, END] {
            guest.bytes(PAGES + 0x1_0000 + 0x2000 - 256, &pattern);
            let (happened, before, after) = run(&mut guest, code, at, |state| {
                state.x87 = std::array::from_fn(|n| n as u64);
                state.x87[0] = words(0x37f, 3 << 11, 0x7f, 0x123);
            });
            assert_eq!(
                happened,
                Happened::Fault(14, 4 | write, END),
                "{code:x?} {at:#x}"
            );
            assert_eq!(after.x87, before.x87, "{code:x?}");
            let mut bytes = [0; 256];
            guest.read(PAGES + 0x1_0000 + 0x2000 - 256, &mut bytes);
            assert_eq!(bytes, pattern, "{code:x?}");
        }
    }
}

/// FXRSTOR of a met exception that is unmasked, and of ES that nothing bears out.
#[test]
fn an_image_says_itself_what_is_pending() {
    let mut guest = guest();
    let mut check = |control: u64, status: u64, expected: u64, wait: Happened| {
        guest.bytes(PAGES + 0x1_0000, &[0; 512]);
        guest.write(PAGES + 0x1_0000, control | status << 16);
        let (happened, _, after) = run(&mut guest, &[0x0f, 0xae, 0x0b], DATA, |_| {});
        assert_eq!(happened, Happened::Retired);
        assert_eq!(after.x87[0] & 0xffff_ffff, 0x40 | control | expected << 16);
        let (happened, ..) = run(&mut guest, &[0x9b], DATA, |state| state.x87 = after.x87);
        assert_eq!(happened, wait);
    };
    check(0, 4, PENDING, Happened::Fault(16, 0, 0));
    check(0x3f, 0x8084, 4, Happened::Retired);
    check(0x3f, 0x3800, 0x3800, Happened::Retired);
}

/// FISTP of a NaN, which unmasked stores nothing.
#[test]
fn what_would_not_store_faults_too() {
    let mut guest = guest();
    let mut check = |at, expected| {
        let (happened, before, after) = run(&mut guest, &[0xdf, 0x3b], at, |state| {
            state.x87[0] = words(0x37e, 7 << 11, 0x80, 0);
            state.x87[4..6].copy_from_slice(&[3 << 62, 0x7fff]);
        });
        let is_fault = happened != Happened::Retired;
        assert_eq!(happened, expected);
        assert_eq!(after.x87 == before.x87, is_fault);
    };
    check(DATA, Happened::Retired);
    check(END - 4, Happened::Fault(14, 6, END));
    check(END, Happened::Fault(14, 6, END));
}

#[test]
fn pointers_are_of_the_last_instruction_that_is_none_of_control() {
    let mut guest = guest();
    // FLD qword ptr fs:[rbx + 8]: the offset, without the base.
    let (happened, _, after) = run(&mut guest, &[0x64, 0xdd, 0x43, 0x08], 0x10, |state| {
        let mut fs = state.segment(Seg::Fs);
        fs.base = DATA;
        state.set_segment(Seg::Fs, fs);
    });
    assert_eq!(happened, Happened::Retired);
    assert_eq!(after.x87[0] >> 48, 0x543);
    assert_eq!(after.x87[1..3], [CODE, 0x18]);
    let x87 = after.x87;
    // FNSTCW, FNSTSW, FNCLEX, FLDCW, FWAIT.
    let control: [&[u8]; 5] = [
        &[0xd9, 0x3b],
        &[0xdd, 0x3b],
        &[0xdb, 0xe2],
        &[0xd9, 0x2b],
        &[0x9b],
    ];
    for code in control {
        let (happened, _, after) = run(&mut guest, code, DATA, |state| {
            state.x87 = x87;
            state.rip = CODE;
        });
        assert_eq!(happened, Happened::Retired);
        assert_eq!(after.x87[1..3], x87[1..3], "{code:x?}");
        assert_eq!(after.x87[0] >> 48, 0x543, "{code:x?}");
    }
    // FNSTENV: no selectors.
    let (happened, ..) = run(&mut guest, &[0xd9, 0x33], DATA, |state| state.x87 = x87);
    assert_eq!(happened, Happened::Retired);
    let word = |at: u64| guest.word(PAGES + 0x1_0000 + at);
    assert_eq!(word(12) as u32, CODE as u32);
    assert_eq!(word(16) as u32, 0x543 << 16);
    assert_eq!(word(20), 0xffff_0000_0000_0018);
    // FLD1 has no operand: the address of the last one stays.
    let (.., after) = run(&mut guest, &[0x90, 0xd9, 0xe8], DATA, |state| {
        state.x87 = x87;
        state.rip = CODE + 1;
    });
    assert_eq!(after.x87[1..3], [CODE + 1, 0x18]);
    assert_eq!(after.x87[0] >> 48, 0x1e8);
}

#[test]
fn flags_and_ax_are_what_instructions_say() {
    let mut guest = guest();
    // 1 and 0 on the stack: FCOMI ST(0), ST(1) is greater, with OF, SF and AF cleared.
    let stack = |state: &mut State| {
        state.x87[0] = words(0x37f, 6 << 11, 0xc0, 0);
        state.x87[4] = 1 << 63;
        state.x87[5] = 0x3fff;
        state.set_rflags(0x202 | 0x8d5);
    };
    let (.., after) = run(&mut guest, &[0xdb, 0xf1], DATA, stack);
    assert_eq!(after.rflags() & 0x8d5, 0);
    // FCMOVB with CF set takes the 0.
    let (.., after) = run(&mut guest, &[0xda, 0xc1], DATA, stack);
    assert_eq!(after.x87[4..6], [0, 0]);
    // FNSTSW AX: the rest of RAX stays.
    let (.., after) = run(&mut guest, &[0xdf, 0xe0], DATA, |state| {
        stack(state);
        state.r[0] = u64::MAX;
    });
    assert_eq!(after.r[0], 0xffff_ffff_ffff_3000);
}

/// What takes a processor in software long takes ticks, and ends a run whose budget it is.
#[test]
fn elementary_functions_take_their_time() {
    // F2XM1, FYL2X, FPTAN, FPATAN, FYL2XP1, FSINCOS, FSIN, FCOS; FXCH, FPREM, FSQRT, FLD1.
    let codes = [
        (0xf0, 384),
        (0xf1, 1280),
        (0xf2, 768),
        (0xf3, 1280),
        (0xf9, 1280),
        (0xfb, 320),
        (0xfe, 160),
        (0xff, 160),
        (0xc9, 1),
        (0xf8, 1),
        (0xfa, 1),
        (0xe8, 1),
    ];
    for (code, ticks) in codes {
        for budget in [1, 3] {
            let mut guest = guest();
            // Behind it are FNOP and INC EAX.
            guest.bytes(PAGES, &[0xd9, code, 0xd9, 0xd0, 0xff, 0xc0]);
            let mut state = guest.state(3);
            state.rip = CODE;
            // 1 and 1 on the stack.
            state.x87[0] = words(0x37f, 6 << 11, 0xc0, 0);
            state.x87[4..8].copy_from_slice(&[1 << 63, 0x3fff, 1 << 63, 0x3fff]);
            guest.cpu.set_state(state);
            assert_eq!(guest.cpu.run(budget), VmExit::Budget);
            let short = if ticks == 1 { budget } else { 1 };
            assert_eq!(guest.cpu.time(), ticks + short - 1, "{code:#x} {budget}");
            assert_eq!(
                guest.cpu.state().rip,
                CODE + 2 * short,
                "{code:#x} {budget}"
            );
        }
    }
    // Switched off it has not been executed.
    let mut guest = guest();
    let (happened, ..) = run(&mut guest, &[0xd9, 0xf3], DATA, |state| state.cr0 |= TS);
    assert_eq!(happened, Happened::Fault(7, 0, 0));
    assert!(guest.cpu.time() < 3);
}
