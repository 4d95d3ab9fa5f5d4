//! Exact counts through exceptions, interrupts and system calls.

use anyhow::{Result, ensure};
use guest_tests::micro::{DATA, Lab, Program, Test, Written};
use iced_x86::code_asm::{CodeAssembler, dword_ptr, ebx, qword_ptr, r11, r13, r15, rax, rbx, rsp};
use vmm::micro::LAPIC;

use super::cases::{in_ring, no_tf};
use super::region::{Counts, IRET, NONE, check, check_counts, counted, run, setup};

const TF: i32 = 1 << 8;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "step::interrupt_that_ends_a_hlt",
        run: hlt,
    },
    Test {
        name: "step::page_fault_at_cpl_0",
        run: |lab| page_fault(lab, 0),
    },
    Test {
        name: "step::page_fault_at_cpl_3",
        run: |lab| page_fault(lab, 3),
    },
    Test {
        name: "step::software_interrupt_at_cpl_0",
        run: |lab| software_interrupt(lab, 0),
    },
    Test {
        name: "step::software_interrupt_at_cpl_3",
        run: |lab| software_interrupt(lab, 3),
    },
    Test {
        name: "step::system_call",
        run: system_call,
    },
    Test {
        name: "step::guest_tf_at_cpl_0",
        run: |lab| guest_tf(lab, 0),
    },
    Test {
        name: "step::guest_tf_at_cpl_3",
        run: |lab| guest_tf(lab, 3),
    },
    Test {
        name: "step::general_protection",
        run: general_protection,
    },
    Test {
        name: "step::timer_interrupt",
        run: timer,
    },
];

/// Stores the flags of an interrupt's frame at [`DATA`] + 8, below `depth`
/// bytes of stack: two instructions.
fn show_flags(a: &mut CodeAssembler, depth: i32) -> Written {
    a.mov(rax, qword_ptr(rsp + 16 + depth))?;
    a.mov(qword_ptr(DATA + 8), rax)
}

const SHOW_FLAGS: Counts = Counts {
    kernel: 2,
    loads: 1,
    stores: 1,
    ..NONE
};

/// The handler maps the page and returns; the access happens once.
fn page_fault(lab: &Lab, cpl: u8) -> Result<()> {
    // The third large page of the identity map, which lies beyond the memory.
    const ENTRY: u64 = 0x3010;
    const PAGE: u64 = 0x40_0000;
    const LARGE_AT_2_MIB: i32 = 0x20_0087;
    let program = Program::new()?.handler(14, |a| {
        show_flags(a, 8)?;
        a.mov(qword_ptr(ENTRY), LARGE_AT_2_MIB)?;
        a.lea(rsp, qword_ptr(rsp + 8))?;
        a.iretq()
    })?;
    let program = counted(program, cpl, |a| {
        a.nop()?;
        a.mov(ebx, dword_ptr(PAGE + 0x1000))?;
        a.nop()
    })?;
    let handler = Counts {
        kernel: 2,
        stores: 1,
        ..NONE
    };
    let access = Counts { loads: 1, ..NONE };
    let expected = in_ring(cpl, 3)
        .and(access)
        .and(SHOW_FLAGS)
        .and(handler)
        .and(IRET);
    no_tf(check(lab, program, cpl, expected)?.word(DATA + 8)?)
}

fn software_interrupt(lab: &Lab, cpl: u8) -> Result<()> {
    let program = Program::new()?.handler(0x40, |a| {
        show_flags(a, 0)?;
        a.iretq()
    })?;
    let program = counted(program, cpl, |a| {
        a.int(0x40)?;
        a.nop()
    })?;
    let interrupt = Counts {
        branches: 1,
        far: 1,
        ..NONE
    };
    let expected = in_ring(cpl, 2).and(interrupt).and(SHOW_FLAGS).and(IRET);
    no_tf(check(lab, program, cpl, expected)?.word(DATA + 8)?)
}

fn system_call(lab: &Lab) -> Result<()> {
    let program = Program::new()?.syscall(|a| {
        a.mov(qword_ptr(DATA + 8), r11)?;
        a.sysretq()
    })?;
    let program = counted(program, 3, |a| {
        a.nop()?;
        a.syscall()?;
        a.nop()?;
        a.syscall()
    })?;
    let call = Counts {
        kernel: 2,
        user: 1,
        branches: 2,
        far: 2,
        stores: 1,
        ..NONE
    };
    let expected = in_ring(3, 2).and(call.times(2));
    no_tf(check(lab, program, 3, expected)?.word(DATA + 8)?)
}

/// A guest that steps itself gets its own traps, and they are counted.
fn guest_tf(lab: &Lab, cpl: u8) -> Result<()> {
    let program = Program::new()?.handler(1, |a| {
        a.inc(qword_ptr(DATA + 16))?;
        a.iretq()
    })?;
    let program = counted(program, cpl, |a| {
        a.pushfq()?;
        a.or(qword_ptr(rsp), TF)?;
        a.popfq()?;
        // A trap after each of these five, the last one included.
        a.nop()?;
        a.nop()?;
        a.pushfq()?;
        a.and(qword_ptr(rsp), !TF)?;
        a.popfq()?;
        // And none after this one.
        a.nop()
    })?;
    let own = Counts {
        loads: 4,
        stores: 4,
        ..NONE
    };
    let handler = Counts {
        kernel: 1,
        loads: 1,
        stores: 1,
        ..NONE
    };
    let expected = in_ring(cpl, 9).and(own).and(handler.and(IRET).times(5));
    let ran = check(lab, program, cpl, expected)?;
    let traps = ran.word(DATA + 16)?;
    ensure!(traps == 5, "the guest got {traps} traps");
    Ok(())
}

/// A fault that is the guest's own, on the handler that is watched for RDPMC.
fn general_protection(lab: &Lab) -> Result<()> {
    let program = Program::new()?.handler(13, |a| {
        show_flags(a, 8)?;
        a.mov(qword_ptr(rsp + 8), r15)?;
        a.lea(rsp, qword_ptr(rsp + 8))?;
        a.iretq()
    })?;
    let program = counted(program, 0, |a| {
        let mut next = a.create_label();
        a.lea(r15, qword_ptr(next))?;
        a.mov(rbx, 0x8000_0000_0000_0000u64)?;
        a.mov(rax, qword_ptr(rbx))?;
        a.ud2()?;
        a.set_label(&mut next)?;
        a.nop()
    })?;
    let handler = Counts {
        kernel: 2,
        stores: 1,
        ..NONE
    };
    let expected = in_ring(0, 3).and(SHOW_FLAGS).and(handler).and(IRET);
    no_tf(check(lab, program, 0, expected)?.word(DATA + 8)?)
}

const TIMER_VECTOR: u8 = 0x50;
/// How often the timer's handler ran.
const FLAG: u64 = DATA + 32;
/// What the handler does besides showing its flags and its IRET.
const TIMER_HANDLER: Counts = Counts {
    kernel: 2,
    loads: 1,
    stores: 2,
    ..NONE
};

/// A program that counts the timer's interrupts, with the APIC in R13.
fn timer_handler() -> Result<Program> {
    Program::new()?.handler(TIMER_VECTOR, |a| {
        show_flags(a, 0)?;
        a.inc(qword_ptr(FLAG))?;
        // End of interrupt.
        a.mov(dword_ptr(r13 + 0xb0), 0)?;
        a.iretq()
    })
}

/// Five instructions, four stores: one shot after `ticks`.
fn start_timer(a: &mut CodeAssembler, ticks: i32) -> Written {
    a.mov(r13, LAPIC)?;
    // Software enable; divide by 1; one shot.
    a.mov(dword_ptr(r13 + 0xf0), 0x1ff)?;
    a.mov(dword_ptr(r13 + 0x3e0), 0xb)?;
    a.mov(dword_ptr(r13 + 0x320), i32::from(TIMER_VECTOR))?;
    a.mov(dword_ptr(r13 + 0x380), ticks)
}

/// The local APIC's timer comes in the middle; the guest counts its own rounds.
fn timer(lab: &Lab) -> Result<()> {
    const ROUNDS: u64 = DATA + 40;
    let program = counted(timer_handler()?, 0, |a| {
        // 100 µs of KVM's 1 GHz.
        start_timer(a, 100_000)?;
        a.xor(ebx, ebx)?;
        a.sti()?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.inc(rbx)?;
        a.cmp(qword_ptr(FLAG), 0)?;
        a.je(again)?;
        a.cli()?;
        a.mov(qword_ptr(ROUNDS), rbx)
    })?;
    let (ran, _) = run(lab, &setup(), program)?;
    let rounds = ran.word(ROUNDS)?;
    ensure!(rounds > 0, "the guest made {rounds} rounds");
    let round = Counts {
        kernel: 3,
        branches: 1,
        taken: 1,
        loads: 1,
        ..NONE
    };
    let outside = Counts {
        kernel: 9,
        stores: 5,
        ..NONE
    };
    let mut expected = outside
        .and(round.times(rounds))
        .and(SHOW_FLAGS)
        .and(TIMER_HANDLER)
        .and(IRET);
    // The last round's branch falls through.
    expected.taken -= 1;
    check_counts(&ran, 0, expected)?;
    ensure!(ran.word(FLAG)? == 1, "{} interrupts", ran.word(FLAG)?);
    no_tf(ran.word(DATA + 8)?)
}

/// The interrupt that ends a HLT is taken before the CLI behind it.
fn hlt(lab: &Lab) -> Result<()> {
    const SEEN: u64 = DATA + 40;
    let program = counted(timer_handler()?, 0, |a| {
        // 20 ms of KVM's 1 GHz.
        start_timer(a, 20_000_000)?;
        a.sti()?;
        a.hlt()?;
        a.cli()?;
        a.mov(rbx, qword_ptr(FLAG))?;
        a.mov(qword_ptr(SEEN), rbx)
    })?;
    let (ran, _) = run(lab, &setup(), program)?;
    let seen = ran.word(SEEN)?;
    ensure!(seen == 1, "{seen} interrupts before the CLI");
    let outside = Counts {
        kernel: 10,
        loads: 1,
        stores: 5,
        ..NONE
    };
    check_counts(
        &ran,
        0,
        outside.and(SHOW_FLAGS).and(TIMER_HANDLER).and(IRET),
    )?;
    no_tf(ran.word(DATA + 8)?)
}
