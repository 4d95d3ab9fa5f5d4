//! What CPL 0 is about: delivery, returns, system calls, shadows, debug, stops.

use emu::{Answer, EventClass, EventTotals, Ring, Seg, Shadow, VmExit};

use crate::guest::{
    GDT, Guest, HANDLERS, Happened, KERNEL_CODE, KERNEL_DATA, PAGES, PRESENT, STACK_TOP, SYSTEM,
    TSS, USER, USER_CODE, USER_DATA, WRITABLE,
};

pub(crate) const CODE: u64 = 0x40_0000;
pub(crate) const DATA: u64 = 0x50_0000;
const DEVICE: u64 = 0x60_0000;

/// Code at a privilege level, a page of data in RSI and RDI, a device in R8.
pub(crate) fn guest(cpl: u8, code: &[u8]) -> Guest {
    let mut guest = Guest::new();
    let rights = PRESENT | WRITABLE | if cpl == 3 { USER } else { 0 };
    guest.map(CODE, PAGES, rights);
    guest.map(DATA, PAGES + 0x1000, rights);
    guest.map(DEVICE, 0xfee0_0000, rights);
    guest.bytes(PAGES, code);
    let mut state = guest.state(cpl);
    state.rip = CODE;
    // CPL 0 keeps its stack when it is interrupted.
    let base = if cpl == 3 {
        DATA
    } else {
        SYSTEM + PAGES + 0x1000
    };
    state.r[4] = base + 0x800;
    state.r[6] = DATA;
    state.r[7] = DATA + 0x100;
    state.r[8] = DEVICE;
    guest.cpu.set_state(state);
    guest
}

pub(crate) fn handler(vector: u64) -> u64 {
    SYSTEM + HANDLERS + 16 * vector
}

pub(crate) fn change(guest: &mut Guest, change: impl FnOnce(&mut emu::State)) {
    let mut state = guest.cpu.state().clone();
    change(&mut state);
    guest.cpu.set_state(state);
}

#[test]
fn an_interrupt_goes_to_its_handler_and_back() {
    // IRETQ at the handler; NOP, NOP.
    let mut guest = guest(3, &[0x90, 0x90, 0x90]);
    guest.bytes(HANDLERS + 16 * 0x40, &[0x48, 0xcf]);
    assert_eq!(guest.one(), Happened::Retired);
    assert!(guest.cpu.can_interrupt());
    assert_eq!(guest.cpu.interrupt(0x40), None);
    let state = guest.cpu.state();
    assert_eq!((state.rip, state.cpl()), (handler(0x40), 0));
    assert_eq!(state.r[4], SYSTEM + STACK_TOP - 40);
    assert_eq!(state.rflags() & 0x200, 0);
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    let state = guest.cpu.state();
    assert_eq!(
        (state.rip, state.cpl(), state.r[4]),
        (CODE + 1, 3, DATA + 0x800)
    );
    assert_eq!(state.segment(Seg::Cs).selector, USER_CODE | 3);
    assert_eq!(state.segment(Seg::Ss).selector, USER_DATA | 3);
    let kernel = guest.cpu.take_totals(Ring::Kernel);
    assert_eq!(kernel.of(EventClass::Loads), 5);
    assert_eq!(kernel.of(EventClass::FarBranches), 1);
}

#[test]
fn software_interrupts_and_breakpoints() {
    for (code, vector, next) in [
        (&[0xcc][..], 3, 1),
        (&[0xcd, 0x80], 0x80, 2),
        (&[0xf1], 1, 1),
    ] {
        let mut guest = guest(3, code);
        assert!(matches!(guest.one(), Happened::Fault(v, ..) if v == vector));
        assert_eq!(guest.frame(vector)[0], CODE + next, "{vector}");
    }
    // The gate is of CPL 0: #GP with the gate as its code, at the instruction.
    let mut guest = guest(3, &[0xcd, 0x21]);
    let at = crate::guest::IDT + 16 * 0x21;
    let low = guest.word(at) & !(3 << 45);
    guest.write(at, low);
    assert_eq!(guest.one(), Happened::Fault(13, 0x21 * 8 + 2, 0));
    assert_eq!(guest.frame(13)[0], CODE);
}

/// A call gate at 50h of the GDT, for code of CPL 3 to go to a handler's address.
fn gate(guest: &mut Guest, selector: u16, dpl: u64) {
    let to = handler(0);
    let low = to & 0xffff | u64::from(selector) << 16 | 0x8c << 40 | dpl << 45;
    guest.write(GDT + 0x50, low | (to >> 16 & 0xffff) << 48);
    guest.write(GDT + 0x58, to >> 32);
    change(guest, |state| state.gdtr.limit = 0x5f);
}

/// A far pointer to the gate, with a RPL.
fn pointer(guest: &mut Guest, rpl: u64) {
    guest.write(PAGES + 0x1000, (0x50 | rpl) << 32);
}

#[test]
fn a_call_gate_leads_inward_and_back() {
    // CALL FAR [RSI]; the kernel's RETFQ.
    let mut guest = guest(3, &[0xff, 0x1e, 0x90]);
    guest.bytes(HANDLERS, &[0x48, 0xcb]);
    gate(&mut guest, KERNEL_CODE, 3);
    pointer(&mut guest, 3);
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    let state = guest.cpu.state();
    let stack = (state.r[4], state.segment(Seg::Ss).selector);
    assert_eq!((state.rip, state.cpl()), (handler(0), 0));
    assert_eq!(stack, (SYSTEM + STACK_TOP - 32, 0));
    let frame: [u64; 4] = std::array::from_fn(|n| guest.word(STACK_TOP - 32 + 8 * n as u64));
    let (code, data) = (u64::from(USER_CODE) | 3, u64::from(USER_DATA) | 3);
    assert_eq!(frame, [CODE + 2, code, DATA + 0x800, data]);
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    let state = guest.cpu.state();
    assert_eq!(
        (state.rip, state.cpl(), state.r[4]),
        (CODE + 2, 3, DATA + 0x800)
    );
    // From CPL 0 to CPL 0 with the stack as it is; JMP leaves nothing there.
    for (code, used) in [([0xff, 0x1e], 16), ([0xff, 0x2e], 0)] {
        let mut guest = self::guest(0, &code);
        gate(&mut guest, KERNEL_CODE, 0);
        pointer(&mut guest, 0);
        let before = guest.cpu.state().r[4];
        assert_eq!(guest.cpu.run(1), VmExit::Budget);
        let state = guest.cpu.state();
        assert_eq!((state.rip, state.r[4]), (handler(0), before - used));
    }
}

#[test]
fn a_call_gate_that_may_not_be_used() {
    // CALL FAR [RSI], JMP FAR [RSI]; code of the gate, its DPL, RPL; the fault.
    let call = [0xff, 0x1e];
    let table = [
        (call, KERNEL_CODE, 0, 0, 13, 0x50),
        (call, KERNEL_CODE, 2, 3, 13, 0x50),
        (call, 0, 3, 3, 13, 0),
        (call, KERNEL_DATA, 3, 3, 13, KERNEL_DATA),
        (call, 0x38, 3, 3, 13, 0x38),
        ([0xff, 0x2e], KERNEL_CODE, 3, 3, 13, KERNEL_CODE),
    ];
    for (code, selector, dpl, rpl, vector, error) in table {
        let mut guest = guest(3, &code);
        gate(&mut guest, selector, dpl);
        pointer(&mut guest, rpl);
        let happened = Happened::Fault(vector, u64::from(error), 0);
        assert_eq!(guest.one(), happened, "{selector:#x} {dpl} {rpl}");
        assert_eq!(guest.frame(vector)[0], CODE);
    }
    let mut guest = guest(3, &call);
    gate(&mut guest, KERNEL_CODE, 3);
    pointer(&mut guest, 3);
    let low = guest.word(GDT + 0x50) & !(1 << 47);
    guest.write(GDT + 0x50, low);
    assert_eq!(guest.one(), Happened::Fault(11, 0x50, 0));
}

#[test]
fn system_calls() {
    // SYSCALL; the kernel's SYSRETQ.
    let mut guest = guest(3, &[0x0f, 0x05, 0x90]);
    guest.bytes(HANDLERS, &[0x48, 0x0f, 0x07]);
    change(&mut guest, |state| {
        state.msrs.lstar = SYSTEM + HANDLERS;
        state.msrs.star = u64::from(KERNEL_CODE) << 32 | u64::from(USER_DATA - 8) << 48;
        state.msrs.sfmask = 0x200;
    });
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    let state = guest.cpu.state();
    assert_eq!((state.cpl(), state.r[1], state.r[11]), (0, CODE + 2, 0x202));
    assert_eq!(state.rflags(), 2);
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    let state = guest.cpu.state();
    assert_eq!(
        (state.cpl(), state.rip, state.rflags()),
        (3, CODE + 2, 0x202)
    );
    assert_eq!(state.segment(Seg::Cs).selector, USER_CODE | 3);
    let user = guest.cpu.take_totals(Ring::User);
    assert_eq!(
        (
            user.of(EventClass::Instructions),
            user.of(EventClass::FarBranches)
        ),
        (1, 1)
    );
    let kernel = guest.cpu.take_totals(Ring::Kernel);
    assert_eq!(
        (
            kernel.of(EventClass::Instructions),
            kernel.of(EventClass::FarBranches)
        ),
        (1, 1)
    );
}

#[test]
fn faults_on_the_way_become_double_and_then_shutdown() {
    // UD2, whose gate is missing; then that of #DF too.
    let mut guest = guest(0, &[0x0f, 0x0b]);
    let gate = crate::guest::IDT + 16 * 6;
    let low = guest.word(gate) & !(1 << 47);
    guest.write(gate, low);
    // #NP of the gate: no contributory first, so it is delivered itself.
    assert_eq!(guest.one(), Happened::Fault(11, 6 * 8 + 3, 0));
    let mut guest = self::guest(0, &[0xf7, 0xf1]);
    change(&mut guest, |state| state.r[1] = 0);
    guest.write(crate::guest::IDT, 0);
    assert_eq!(guest.one(), Happened::Fault(8, 0, 0));
    let mut guest = self::guest(0, &[0xf7, 0xf1]);
    change(&mut guest, |state| state.r[1] = 0);
    guest.write(crate::guest::IDT, 0);
    guest.write(crate::guest::IDT + 16 * 8, 0);
    assert_eq!(guest.one(), Happened::Stopped(VmExit::Shutdown));
}

#[test]
fn stacks_of_the_task_state() {
    let mut guest = guest(0, &[0x0f, 0x0b]);
    guest.gate(6, handler(6), 3);
    guest.write(TSS + 0x1c + 24, SYSTEM + STACK_TOP - 0x400 + 9);
    assert!(matches!(guest.one(), Happened::Fault(6, ..)));
    // Aligned to 16 bytes.
    assert_eq!(guest.cpu.state().r[4], SYSTEM + STACK_TOP - 0x400 - 40);
}

#[test]
fn the_trap_flag_steps_and_ss_holds_back() {
    let mut guest = guest(0, &[0x90, 0x90]);
    change(&mut guest, |state| state.set_rflags(0x102));
    assert!(matches!(guest.one(), Happened::Fault(1, ..)));
    assert_eq!(guest.frame(1)[0], CODE + 1);
    assert_eq!(guest.cpu.state().dr6 & 0x4000, 0x4000);
    // MOV SS,AX; NOP; NOP: the trap is behind the NOP.
    let mut guest = self::guest(0, &[0x8e, 0xd0, 0x90, 0x90]);
    change(&mut guest, |state| {
        state.set_rflags(0x302);
        state.r[0] = u64::from(KERNEL_DATA);
    });
    assert_eq!(guest.one(), Happened::Retired);
    assert_eq!(guest.cpu.state().shadow, Shadow::MovSs);
    assert!(!guest.cpu.can_interrupt() && !guest.cpu.can_nmi());
    assert!(matches!(guest.one(), Happened::Fault(1, ..)));
    assert_eq!(guest.frame(1)[0], CODE + 3);
}

#[test]
fn a_window_opens_behind_the_shadow_of_sti() {
    let mut guest = guest(0, &[0xfb, 0x90, 0x90]);
    change(&mut guest, |state| state.set_rflags(2));
    guest.cpu.want_window(true);
    assert_eq!(guest.cpu.run(100), VmExit::Window);
    assert_eq!(guest.cpu.state().rip, CODE + 2);
}

#[test]
fn nmis_wait_for_iret() {
    let mut guest = guest(0, &[0x90]);
    guest.bytes(HANDLERS + 32, &[0x48, 0xcf]);
    assert_eq!(guest.cpu.nmi(), None);
    assert!(!guest.cpu.can_nmi());
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    assert!(guest.cpu.can_nmi());
    assert_eq!(guest.cpu.state().rip, CODE);
}

#[test]
fn breakpoints_of_instructions_and_data() {
    let mut guest = guest(0, &[0x90, 0x90, 0x48, 0x89, 0x06, 0x90]);
    change(&mut guest, |state| {
        state.dr[0] = CODE + 1;
        state.dr[1] = DATA + 4;
        // DR1: stores of 4 bytes.
        state.dr7 = 0x400 | 1 | 4 | 0xd << 20;
    });
    assert_eq!(guest.one(), Happened::Retired);
    assert!(matches!(guest.one(), Happened::Fault(1, ..)));
    let [rip, flags, _] = guest.frame(1);
    assert_eq!((rip, flags & 1 << 16), (CODE + 1, 0));
    assert_eq!(guest.cpu.state().dr6 & 0xf, 1);
    // Back with RF, which the handler sets: it passes, and the store is trapped.
    let image = guest.cpu.state().r[4] - SYSTEM + 16;
    guest.write(image, flags | 1 << 16);
    guest.bytes(HANDLERS + 16, &[0x48, 0xcf]);
    assert_eq!(guest.cpu.run(2), VmExit::Budget);
    assert_eq!(guest.cpu.state().rip, CODE + 2);
    assert!(matches!(guest.one(), Happened::Fault(1, ..)));
    assert_eq!(guest.frame(1)[0], CODE + 5);
    assert_eq!(guest.cpu.state().dr6 & 0xf, 2);
}

#[test]
fn ports_msrs_and_counters_ask() {
    // IN AL,DX; OUT DX,EAX; RDMSR; WRMSR; RDPMC; HLT.
    let code = [0xec, 0xef, 0x0f, 0x32, 0x0f, 0x30, 0x0f, 0x33, 0xf4];
    let mut guest = guest(0, &code);
    change(&mut guest, |state| {
        state.r[0] = 0;
        state.r[1] = 0xc1;
        state.r[2] = 0x3f8;
    });
    let retired = |guest: &mut Guest| {
        guest
            .cpu
            .take_totals(Ring::Kernel)
            .of(EventClass::Instructions)
    };
    assert_eq!(
        guest.cpu.run(100),
        VmExit::IoIn {
            port: 0x3f8,
            width: 1,
            len: 1
        }
    );
    assert_eq!(retired(&mut guest), 0);
    guest.cpu.io_data()[0] = 0x55;
    let port = 0x3f8;
    assert_eq!(
        guest.cpu.run(100),
        VmExit::IoOut {
            port,
            width: 4,
            len: 4
        }
    );
    assert_eq!(guest.cpu.io_data(), [0x55, 0, 0, 0]);
    assert_eq!(retired(&mut guest), 1);
    assert_eq!(guest.cpu.run(100), VmExit::Rdmsr { index: 0xc1 });
    guest.cpu.answer(Answer::Msr(0x1_0000_0002));
    let value = 0x1_0000_0002;
    assert_eq!(guest.cpu.run(100), VmExit::Wrmsr { index: 0xc1, value });
    guest.cpu.answer(Answer::Done);
    assert_eq!(guest.cpu.run(100), VmExit::Rdpmc { index: 0xc1 });
    guest.cpu.answer(Answer::Msr(7));
    assert_eq!(guest.cpu.run(100), VmExit::Halted);
    let state = guest.cpu.state();
    assert_eq!((state.r[0], state.r[2], state.rip), (7, 0, CODE + 9));
    assert_eq!(retired(&mut guest), 5);
    // An MSR that is not there.
    let mut guest = self::guest(0, &[0x0f, 0x32]);
    assert!(matches!(guest.cpu.run(1), VmExit::Rdmsr { .. }));
    guest.cpu.answer(Answer::MsrFault);
    assert_eq!(guest.one(), Happened::Fault(13, 0, 0));
}

#[test]
fn devices_are_asked_once_for_each_access() {
    // ADD [R8],EAX; HLT.
    let mut guest = guest(0, &[0x41, 0x01, 0x00, 0xf4]);
    change(&mut guest, |state| state.r[0] = 3);
    let address = 0xfee0_0000;
    assert_eq!(guest.cpu.run(10), VmExit::MmioRead { address, len: 4 });
    guest.cpu.answer(Answer::Mmio([0xff; 8]));
    let data = [2, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(
        guest.cpu.run(10),
        VmExit::MmioWrite {
            address,
            data,
            len: 4
        }
    );
    assert_eq!(guest.cpu.state().rip, CODE);
    assert_eq!(guest.cpu.run(10), VmExit::Halted);
    assert_eq!(guest.cpu.state().rflags() & 1, 1);
    let totals = guest.cpu.take_totals(Ring::Kernel);
    assert_eq!(
        (totals.of(EventClass::Loads), totals.of(EventClass::Stores)),
        (1, 1)
    );
}

#[test]
fn code_that_rewrites_itself() {
    // MOV BYTE [RIP+1],0x48 changes the INC EAX behind it (FF C0 to FF C8, DEC EAX); HLT.
    let code = [0xc6, 0x05, 0x01, 0, 0, 0, 0xc8, 0xff, 0xc0, 0xf4];
    let mut guest = guest(0, &code);
    change(&mut guest, |state| state.r[0] = 10);
    assert_eq!(guest.cpu.run(10), VmExit::Halted);
    assert_eq!(guest.cpu.state().r[0], 9);
    let totals = guest.cpu.take_totals(Ring::Kernel);
    assert_eq!(totals.of(EventClass::Instructions), 3);
    assert_eq!(totals.of(EventClass::Stores), 1);
}

#[test]
fn a_frame_that_ends_on_a_page_of_code_is_made_once() {
    // ENTER 0x200,3; HLT. The page below the stack is that of the code once more, so the last write
    // of the new frame is looked at there, behind its words.
    let mut guest = guest(0, &[0xc8, 0x00, 0x02, 3, 0xf4]);
    guest.map(DATA - 0x1000, PAGES, PRESENT | WRITABLE);
    // The first word that is copied lies where the new frame's own address goes in the end.
    let old = 0x1122_3344_5566_7788;
    guest.write(PAGES + 0x1000 + 0xe0, old);
    change(&mut guest, |state| {
        state.r[4] = DATA + 0x100;
        state.r[5] = DATA + 0xe8;
    });
    assert_eq!(guest.cpu.run(10), VmExit::Halted);
    assert_eq!(guest.cpu.state().r[5], DATA + 0xf8);
    assert_eq!(guest.cpu.state().r[4], DATA + 0xe0 - 0x200);
    let words = [0xf8, 0xf0, 0xe0].map(|at| guest.word(PAGES + 0x1000 + at));
    assert_eq!(words, [DATA + 0xe8, old, DATA + 0xf8]);
}

#[test]
fn repeated_strings_count_once() {
    // REP STOSQ over three pages; HLT.
    let mut guest = guest(0, &[0xf3, 0x48, 0xab, 0xf4]);
    for page in 1..4 {
        guest.map(
            DATA + page * 4096,
            PAGES + 0x1000 + page * 4096,
            PRESENT | WRITABLE,
        );
    }
    change(&mut guest, |state| {
        state.r[1] = 1200;
        state.r[0] = 0x0102_0304_0506_0708;
    });
    assert_eq!(guest.cpu.run(100), VmExit::Halted);
    assert_eq!(guest.cpu.state().r[7], DATA + 0x100 + 1200 * 8);
    assert_eq!(
        guest.word(PAGES + 0x1000 + 0x100 + 1199 * 8),
        0x0102_0304_0506_0708
    );
    assert_eq!(guest.word(PAGES + 0x1000 + 0x100 + 1200 * 8), 0);
    let totals = guest.cpu.take_totals(Ring::Kernel);
    let counted = [
        EventClass::Instructions,
        EventClass::Stores,
        EventClass::Strings,
    ]
    .map(|one| totals.of(one));
    assert_eq!(counted, [2, 1, 1]);
}

#[test]
fn segments_are_checked() {
    // MOV DS,AX.
    let load = |selector: u16| {
        let mut guest = guest(3, &[0x8e, 0xd8]);
        change(&mut guest, |state| state.r[0] = u64::from(selector));
        (guest.one(), guest.cpu.state().segment(Seg::Ds))
    };
    assert_eq!(load(USER_DATA | 3).0, Happened::Retired);
    assert_eq!(load(3).0, Happened::Retired);
    assert_eq!(load(0x1000).0, Happened::Fault(13, 0x1000, 0));
    assert_eq!(
        load(KERNEL_DATA).0,
        Happened::Fault(13, u64::from(KERNEL_DATA), 0)
    );
    // Far return to the other code segment: RETFQ.
    let mut guest = guest(0, &[0x48, 0xcb]);
    guest.write(PAGES + 0x1800, CODE + 0x20);
    guest.write(PAGES + 0x1808, u64::from(KERNEL_CODE));
    assert_eq!(guest.one(), Happened::Retired);
    assert_eq!(guest.cpu.state().rip, CODE + 0x20);
    assert_eq!(guest.word(GDT + u64::from(KERNEL_CODE)) >> 40 & 1, 1);
}

#[test]
fn popf_changes_what_the_ring_may() {
    let pop = |cpl: u8| {
        let mut guest = guest(cpl, &[0x9d, 0x90]);
        guest.write(PAGES + 0x1800, 0x0024_7ed7 & !0x100);
        assert_eq!(guest.one(), Happened::Retired);
        guest.cpu.state().rflags()
    };
    // IF stays with CPL 3, and IOPL is 0.
    assert_eq!(pop(3), 0x0024_4ed7);
    assert_eq!(pop(0), 0x0024_7ed7 & !0x100 | 0x200);
}

#[test]
fn sixteen_bits_and_the_way_to_long_mode() {
    let mut guest = Guest::new();
    // MOV AX,1234; PUSH AX; POP BX; MOV CX,3; L: ADD AX,1; LOOP L; HLT.
    let code = [
        0xb8, 0x34, 0x12, 0x50, 0x5b, 0xb9, 3, 0, 0x05, 1, 0, 0xe2, 0xfb, 0xf4,
    ];
    guest.bytes(PAGES - 0x8_0000 + 0x100, &code);
    let mut state = emu::State::default();
    let mut one = state.segment(Seg::Cs);
    (one.selector, one.base) = (0x8000, 0x8_0000);
    state.set_segment(Seg::Cs, one);
    state.rip = 0x100;
    state.r[4] = 0xf000;
    guest.bytes(0x8_0100, &code);
    guest.cpu.set_state(state);
    assert_eq!(guest.cpu.run(100), VmExit::Halted);
    let state = guest.cpu.state();
    assert_eq!((state.r[0], state.r[3], state.r[1]), (0x1237, 0x1234, 0));
    let totals = guest.cpu.take_totals(Ring::Kernel);
    assert_eq!(totals.of(EventClass::Instructions), 11);
    assert_eq!(
        (
            totals.of(EventClass::ConditionalBranches),
            totals.of(EventClass::TakenBranches)
        ),
        (3, 2)
    );
}

#[test]
fn selectors_are_asked_about() {
    // VERR AX; VERW AX; LAR EBX,EAX; LSL ECX,EAX.
    let code = [
        0x0f, 0x00, 0xe0, 0x0f, 0x00, 0xe8, 0x0f, 0x02, 0xd8, 0x0f, 0x03, 0xc8,
    ];
    let ask = |selector: u16| {
        let mut guest = guest(3, &code);
        change(&mut guest, |state| {
            state.r[0] = u64::from(selector);
            state.r[3] = 7;
            state.r[1] = 7;
        });
        let zf = [(); 4].map(|()| {
            assert_eq!(guest.one(), Happened::Retired);
            guest.cpu.state().rflags() >> 6 & 1
        });
        (zf, guest.cpu.state().r[3], guest.cpu.state().r[1])
    };
    assert_eq!(ask(USER_DATA | 3), ([1; 4], 0x00cf_f300, 0xffff_ffff));
    // Code that may be read, and not written.
    assert_eq!(ask(USER_CODE | 3).0, [1, 0, 1, 1]);
    // Of CPL 0, null, beyond the table.
    for selector in [KERNEL_DATA, 0, 0x1000] {
        assert_eq!(ask(selector), ([0; 4], 7, 7), "{selector:#x}");
    }
}

#[test]
fn what_goes_wrong_on_the_way_from_a_device_says_so() {
    // The handler's segment is beyond the table: EXT is set, but not for INT n.
    let broken = |guest: &mut Guest, vector: u64| {
        let at = crate::guest::IDT + 16 * vector;
        let low = guest.word(at) & !0xffff_0000 | 0x1000 << 16;
        guest.write(at, low);
    };
    let mut one = guest(0, &[0x90]);
    broken(&mut one, 0x40);
    assert_eq!(one.cpu.interrupt(0x40), None);
    assert_eq!(one.word(one.cpu.state().r[4] - SYSTEM), 0x1001);
    let mut one = guest(0, &[0xcd, 0x40]);
    broken(&mut one, 0x40);
    assert_eq!(one.one(), Happened::Fault(13, 0x1000, 0));
}

#[test]
fn the_second_page_fault_leaves_its_address() {
    // MOV EAX,[RAX], and the stack of #PF is not there either.
    let mut guest = guest(0, &[0x8b, 0x00]);
    guest.gate(14, handler(14), 1);
    guest.gate(8, handler(8), 2);
    guest.write(TSS + 0x24, 0x7000_1000);
    guest.write(TSS + 0x2c, SYSTEM + STACK_TOP);
    change(&mut guest, |state| state.r[0] = 0x6fff_0000);
    assert_eq!(guest.one(), Happened::Fault(8, 0, 0x7000_0ff8));
}

#[test]
fn an_iret_that_faults_lets_nmis_in() {
    let mut guest = guest(0, &[0x90]);
    guest.bytes(HANDLERS + 32, &[0x48, 0xcf]);
    assert_eq!(guest.cpu.nmi(), None);
    let frame = guest.cpu.state().r[4] - SYSTEM;
    guest.write(frame + 8, 0x1000);
    assert_eq!(guest.one(), Happened::Fault(13, 0x1000, 0));
    assert!(guest.cpu.can_nmi());
}

#[test]
fn instructions_end_after_15_bytes() {
    // 15 prefixes of data size, and NOP; 14 of them are none too many.
    let mut code = [0x66; 16];
    code[15] = 0x90;
    assert_eq!(guest(0, &code).one(), Happened::Fault(13, 0, 0));
    assert_eq!(guest(0, &code[1..]).one(), Happened::Retired);
}

#[test]
fn an_instruction_does_not_reach_into_what_is_not_canonical() {
    const LAST: u64 = 0x7fff_ffff_f000;
    let mut guest = guest(0, &[]);
    guest.map(LAST, PAGES + 0x3000, PRESENT);
    // The first bytes of MOV EAX,imm32.
    guest.bytes(PAGES + 0x3ffe, &[0xb8, 0]);
    change(&mut guest, |state| state.rip = LAST + 0xffe);
    assert_eq!(guest.one(), Happened::Fault(13, 0, 0));
}

#[test]
fn code_that_reaches_into_a_device_is_looked_at_each_time() {
    // MOV EAX,imm32, of which two bytes are a device's: ones. Then there is memory.
    let mut guest = guest(0, &[]);
    guest.bytes(PAGES + 0xffd, &[0xb8, 1, 2]);
    guest.map(CODE + 0x1000, 0xfed0_0000, PRESENT);
    change(&mut guest, |state| state.rip = CODE + 0xffd);
    assert_eq!(guest.one(), Happened::Retired);
    assert_eq!(guest.cpu.state().r[0], 0xffff_0201);
    guest.bytes(PAGES + 0x3000, &[3, 4]);
    guest.map(CODE + 0x1000, PAGES + 0x3000, PRESENT);
    change(&mut guest, |state| state.rip = CODE + 0xffd);
    assert_eq!(guest.one(), Happened::Retired);
    assert_eq!(guest.cpu.state().r[0], 0x0403_0201);
}

#[test]
fn registers_of_the_system_have_the_bits_that_are_announced() {
    // MOV CR4,RAX with a bit more: OSXSAVE, without XSAVE; DE.
    let mut one = guest(0, &[0x0f, 0x22, 0xe0]);
    change(&mut one, |state| state.r[0] = state.cr4 | 1 << 18);
    assert_eq!(one.one(), Happened::Fault(13, 0, 0));
    let mut one = guest(0, &[0x0f, 0x22, 0xe0]);
    change(&mut one, |state| state.r[0] = state.cr4 | 1 << 2);
    assert_eq!(one.one(), Happened::Retired);
    // WRMSR of SFMASK and TSC_AUX with something in EDX.
    for index in [0xc000_0084, 0xc000_0103] {
        let mut one = guest(0, &[0x0f, 0x30]);
        change(&mut one, |state| {
            state.r[1] = index;
            state.r[2] = 1;
        });
        assert_eq!(one.one(), Happened::Fault(13, 0, 0), "{index:#x}");
    }
    // WBINVD, also with a prefix that without WBNOINVD means nothing.
    for code in [&[0x0f, 0x09][..], &[0xf3, 0x0f, 0x09]] {
        assert_eq!(guest(3, code).one(), Happened::Fault(13, 0, 0));
        assert_eq!(guest(0, code).one(), Happened::Retired);
    }
}

#[test]
fn an_answer_is_to_what_was_asked() {
    // IN AL,DX; then the registers are others.
    let mut guest = guest(0, &[0xec]);
    let (port, width, len) = (0x3f8, 1, 1);
    change(&mut guest, |state| state.r[2] = 0x3f8);
    assert_eq!(guest.cpu.run(1), VmExit::IoIn { port, width, len });
    guest.cpu.io_data()[0] = 5;
    // MMIO is asked for by the next instruction instead.
    guest.bytes(PAGES, &[0x41, 0x8b, 0x00]);
    let address = 0xfee0_0000;
    assert_eq!(guest.cpu.run(1), VmExit::MmioRead { address, len: 4 });
    // An answer of another kind is none, and a load without one asks again.
    guest.cpu.answer(Answer::Msr(5));
    assert_eq!(guest.cpu.run(1), VmExit::MmioRead { address, len: 4 });
}

#[test]
fn another_value_is_another_out() {
    // OUT DX,AL; then AL is another.
    let mut guest = guest(0, &[0xee]);
    change(&mut guest, |state| (state.r[0], state.r[2]) = (1, 0x3f8));
    let exit = VmExit::IoOut {
        port: 0x3f8,
        width: 1,
        len: 1,
    };
    assert_eq!((guest.cpu.run(1), guest.cpu.io_data()[0]), (exit, 1));
    change(&mut guest, |state| state.r[0] = 2);
    assert_eq!((guest.cpu.run(1), guest.cpu.io_data()[0]), (exit, 2));
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
}

#[test]
fn memory_without_bytes_is_none() {
    assert_eq!(
        emu::Ram::zeroed(0).expect_err("no memory"),
        emu::RamError::NoBytes(0)
    );
}

/// What was read from a port goes to a device: each is asked once.
#[test]
fn a_string_from_a_port_to_a_device() {
    // REP INSB of two.
    let mut guest = guest(0, &[0xf3, 0x6c]);
    change(&mut guest, |state| {
        state.r[1] = 2;
        state.r[2] = 0x60;
        state.r[7] = DEVICE + 8;
    });
    for n in 0..2 {
        let (port, width, len) = (0x60, 1, 1);
        assert_eq!(guest.cpu.run(10), VmExit::IoIn { port, width, len });
        guest.cpu.io_data()[0] = 0x55 + n;
        let stored = VmExit::MmioWrite {
            address: 0xfee0_0008 + u64::from(n),
            data: [0x55 + n, 0, 0, 0, 0, 0, 0, 0],
            len: 1,
        };
        assert_eq!(guest.cpu.run(10), stored);
    }
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    assert_eq!(guest.cpu.state().r[1], 0);
}

/// A counter's OS bit is CPL 0 alone (SDM vol. 3B, 20.2.1.1), paging's supervisor is CPL 0 to 2.
#[test]
fn rings_are_those_of_counters() {
    use Ring::{Kernel, User};
    for (cpl, ring, other) in [
        (0, Kernel, User),
        (1, User, Kernel),
        (2, User, Kernel),
        (3, User, Kernel),
    ] {
        let mut guest = guest(cpl, &[0x90, 0x90]);
        assert_eq!(guest.cpu.run(2), VmExit::Budget, "CPL {cpl}");
        assert_eq!(guest.cpu.take_totals(other), EventTotals::default());
        let counted = guest.cpu.take_totals(ring);
        assert_eq!(counted.of(EventClass::Instructions), 2, "CPL {cpl}");
        assert_eq!(counted.ticks(), 2, "CPL {cpl}");
    }
}

/// Ticks are the time that instructions take: more than one for PAUSE, none while nothing runs.
#[test]
fn ticks_are_time_that_is_executed() {
    let mut guest = guest(3, &[0xf3, 0x90, 0x90]);
    guest.cpu.pass_to(guest.cpu.time() + 1000);
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    guest.cpu.pass_to(guest.cpu.time() + 1000);
    let pause = guest.cpu.take_totals(Ring::User);
    assert_eq!(pause.of(EventClass::Instructions), 1);
    assert!(pause.ticks() > 1);
    assert_eq!(pause.ticks() + 2000, guest.cpu.time());
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    assert_eq!(guest.cpu.take_totals(Ring::User).ticks(), 1);
    // An interrupt belongs to the ring that it interrupts.
    let before = guest.cpu.time();
    assert_eq!(guest.cpu.interrupt(0x40), None);
    let delivery = guest.cpu.take_totals(Ring::User);
    assert_eq!(delivery.deliveries(), 1);
    assert_eq!(delivery.ticks(), guest.cpu.time() - before);
    assert_eq!(guest.cpu.take_totals(Ring::Kernel), EventTotals::default());
}

#[test]
fn each_interface_of_a_hypervisor_has_its_own_leaves() {
    use pmu_model::CpuidRegs;
    use pmu_model::cpuid::Leaf;
    let leaf = |leaf, eax| Leaf {
        leaf,
        subleaf: None,
        regs: CpuidRegs {
            eax,
            ..CpuidRegs::default()
        },
    };
    let cpuid = emu::Cpuid::new(
        [
            leaf(0, 1),
            leaf(1, 0x11),
            leaf(0x4000_0000, 0x4000_0001),
            leaf(0x4000_0001, 0x22),
            leaf(0x4000_0100, 0x4000_0101),
            leaf(0x4000_0101, 0x33),
        ]
        .into_iter()
        .collect(),
    );
    let eax = |leaf| cpuid.answer(leaf, 0).eax;
    assert_eq!(eax(0x4000_0001), 0x22);
    assert_eq!(eax(0x4000_0101), 0x33);
    // Above the highest one, the highest basic leaf answers.
    for above in [2, 0x4000_0002, 0x4000_0102, 0x4000_0200] {
        assert_eq!(eax(above), 0x11, "{above:#x}");
    }
}

/// SDM vol. 2B, RET: of a return outward the stack is looked at before the limit of the code.
#[test]
fn a_far_return_looks_at_the_stack_first() {
    let mut guest = guest(0, &[0x48, 0xcb]);
    let stack = guest.cpu.state().r[4] - SYSTEM;
    // RIP beyond 32-bit code of CPL 3, and a stack of CPL 0.
    let frame = [1 << 33, 0x3b, 0x1000, u64::from(KERNEL_DATA | 3)];
    for (at, word) in (stack..).step_by(8).zip(frame) {
        guest.write(at, word);
    }
    assert_eq!(guest.one(), Happened::Fault(13, u64::from(KERNEL_DATA), 0));
    guest.write(stack + 24, u64::from(USER_DATA | 3));
    change(&mut guest, |state| state.rip = CODE);
    assert_eq!(guest.cpu.state().rip, CODE);
}
