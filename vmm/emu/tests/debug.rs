//! Single steps, breakpoints, and the flags about them.

use emu::VmExit;

use crate::guest::{Happened, KERNEL_CODE, KERNEL_DATA, PAGES, SYSTEM, USER_DATA};
use crate::system::{CODE, DATA, change, guest, handler};

const TF: u64 = 0x100;
const RF: u64 = 1 << 16;

#[test]
fn a_repeated_string_meets_its_breakpoint_once() {
    // REP STOSB with DF, in more than one step; a breakpoint there.
    let mut guest = guest(0, &[0xf3, 0xaa, 0xf4]);
    change(&mut guest, |state| {
        state.set_rflags(0x402 | RF);
        state.r[1] = 300;
        state.r[7] = DATA + 0x700;
        state.dr[0] = CODE;
        state.dr7 = 0x401;
    });
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    assert_eq!((guest.cpu.state().r[1], guest.cpu.state().rip), (172, CODE));
    // Who interrupts it comes back to it with RF.
    assert_eq!(guest.cpu.state().rflags() & RF, RF);
    assert_eq!(guest.cpu.run(100), VmExit::Halted);
    assert_eq!(guest.cpu.state().rflags() & RF, 0);
}

#[test]
fn what_a_load_of_ss_meets_is_told_behind_the_next_instruction() {
    // MOV SS,[RSI]; NOP; NOP: a breakpoint of data at RSI, and one of the first NOP.
    let mut guest = guest(0, &[0x8e, 0x16, 0x90, 0x90]);
    guest.write(PAGES + 0x1000, u64::from(KERNEL_DATA));
    change(&mut guest, |state| {
        state.dr[0] = DATA;
        state.dr[1] = CODE + 2;
        // DR0: loads and stores of 2 bytes.
        state.dr7 = 0x400 | 1 | 4 | 7 << 16;
    });
    assert_eq!(guest.one(), Happened::Retired);
    assert!(matches!(guest.one(), Happened::Fault(1, ..)));
    assert_eq!(guest.frame(1)[0], CODE + 3);
    assert_eq!(guest.cpu.state().dr6 & 0xf, 1);
}

#[test]
fn what_a_load_of_ss_meets_is_lost_if_the_next_instruction_faults() {
    // MOV SS,[RSI]; UD2, whose handler is HLT: a breakpoint of data at RSI.
    let mut guest = guest(0, &[0x8e, 0x16, 0x0f, 0x0b]);
    guest.write(PAGES + 0x1000, u64::from(KERNEL_DATA));
    change(&mut guest, |state| {
        state.dr[0] = DATA;
        state.dr7 = 0x401 | 7 << 16;
    });
    assert_eq!(guest.one(), Happened::Retired);
    assert!(matches!(guest.one(), Happened::Fault(6, ..)));
    assert_eq!(guest.cpu.run(10), VmExit::Halted);
    assert_eq!(guest.cpu.state().dr6 & 0xf, 0);
}

#[test]
fn lss_holds_nothing_back() {
    // LSS EAX,[RSI].
    let mut guest = guest(0, &[0x0f, 0xb2, 0x06]);
    guest.write(PAGES + 0x1000, u64::from(KERNEL_DATA) << 32);
    assert_eq!(guest.one(), Happened::Retired);
    assert!(guest.cpu.can_interrupt());
}

#[test]
fn handlers_of_debug_exceptions_may_use_the_registers() {
    // A step, with GD set; then MOV RAX,DR7 with it.
    let mut one = guest(0, &[0x90]);
    change(&mut one, |state| {
        state.set_rflags(2 | TF);
        state.dr7 |= 1 << 13;
    });
    assert!(matches!(one.one(), Happened::Fault(1, ..)));
    assert_eq!(one.cpu.state().dr7 & 1 << 13, 0);
    let mut one = guest(0, &[0x0f, 0x21, 0xf8]);
    change(&mut one, |state| state.dr7 |= 1 << 13);
    assert!(matches!(one.one(), Happened::Fault(1, ..)));
    let state = one.cpu.state();
    assert_eq!((state.dr7 & 1 << 13, state.dr6 & 1 << 13), (0, 1 << 13));
}

#[test]
fn who_steps_over_hlt_does_not_sleep() {
    let mut guest = guest(0, &[0xf4]);
    guest.bytes(crate::guest::HANDLERS + 16, &[0x90, 0xf4]);
    change(&mut guest, |state| state.set_rflags(2 | TF));
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    assert_eq!(guest.cpu.state().rip, handler(1));
    assert_eq!(guest.frame(1)[0], CODE + 1);
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
}

#[test]
fn sysret_steps_at_once() {
    let mut guest = guest(0, &[0x48, 0x0f, 0x07]);
    change(&mut guest, |state| {
        state.msrs.star = u64::from(KERNEL_CODE) << 32 | u64::from(USER_DATA - 8) << 48;
        state.r[1] = 0x1234_5000;
        state.r[11] = 2 | TF;
        state.r[4] = SYSTEM + crate::guest::STACK_TOP - 0x100;
    });
    assert!(matches!(guest.one(), Happened::Fault(1, ..)));
    assert_eq!(guest.frame(1)[0], 0x1234_5000);
}

#[test]
fn a_breakpoint_of_data_at_the_end_of_all_addresses() {
    // MOV AL,[RSI].
    let mut guest = guest(0, &[0x8a, 0x06]);
    guest.map(0xffff_ffff_ffff_f000, PAGES + 0x1000, 1);
    change(&mut guest, |state| {
        state.r[6] = u64::MAX;
        state.dr[0] = u64::MAX;
        state.dr7 = 0x401 | 3 << 16;
    });
    assert!(matches!(guest.one(), Happened::Fault(1, ..)));
    assert_eq!(guest.cpu.state().dr6 & 0xf, 1);
}
