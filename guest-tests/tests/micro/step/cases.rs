//! Exact counts.

use anyhow::{Result, ensure};
use guest_tests::micro::{DATA, Lab, Program, Test, Written};
use iced_x86::code_asm::{
    CodeAssembler, ax, dword_ptr, eax, ebx, ecx, edi, edx, esi, qword_ptr, r11, r13, r15, rax, rbx,
    rsp, ss,
};
use vmm::micro::LAPIC;

use super::region::{Counts, IRET, NONE, check, counted};

const TF: i32 = 1 << 8;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "step::instructions_at_cpl_0",
        run: |lab| at_ring(lab, 0),
    },
    Test {
        name: "step::instructions_at_cpl_3",
        run: |lab| at_ring(lab, 3),
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
        name: "step::counters_read_in_the_region",
        run: counters_read,
    },
    Test {
        name: "step::timer_interrupt",
        run: timer,
    },
];

/// Code without events, and its counts but for instructions, which go to the ring.
struct Case {
    name: &'static str,
    instructions: u64,
    counts: Counts,
    region: fn(&mut CodeAssembler) -> Written,
}

const CASES: &[Case] = &[
    Case {
        name: "nothing",
        instructions: 0,
        counts: NONE,
        region: |_| Ok(()),
    },
    Case {
        name: "loads and stores",
        instructions: 8,
        counts: Counts {
            loads: 4,
            stores: 4,
            ..NONE
        },
        region: |a| {
            a.nop()?;
            a.mov(qword_ptr(DATA), rax)?;
            a.mov(rax, qword_ptr(DATA))?;
            a.add(qword_ptr(DATA), 1)?;
            a.push(rax)?;
            a.pop(rax)?;
            a.lea(rax, qword_ptr(DATA))?;
            a.xchg(qword_ptr(DATA), rax)
        },
    },
    Case {
        name: "branches",
        instructions: 13,
        counts: Counts {
            branches: 8,
            taken: 6,
            loads: 1,
            stores: 1,
            ..NONE
        },
        region: |a| {
            let (mut again, mut function) = (a.create_label(), a.create_label());
            let (mut over, mut next) = (a.create_label(), a.create_label());
            a.mov(ecx, 3)?;
            a.set_label(&mut again)?;
            a.dec(ecx)?;
            // Taken twice.
            a.jne(again)?;
            a.jmp(over)?;
            a.set_label(&mut function)?;
            a.ret()?;
            a.set_label(&mut over)?;
            a.call(function)?;
            a.xor(eax, eax)?;
            // Not taken, then taken to where it would go anyway.
            a.jne(again)?;
            a.je(next)?;
            a.set_label(&mut next)?;
            Ok(())
        },
    },
    Case {
        name: "REP counts once",
        instructions: 6,
        counts: Counts {
            loads: 1,
            stores: 1,
            ..NONE
        },
        region: |a| {
            a.mov(ecx, 5)?;
            a.mov(esi, u32::try_from(DATA).unwrap_or(0))?;
            a.mov(edi, u32::try_from(DATA).unwrap_or(0) + 0x100)?;
            a.rep().movsb()?;
            // ECX is 0: no access.
            a.xor(edx, edx)?;
            a.rep().stosb()
        },
    },
    Case {
        name: "MOV SS holds the trap back",
        instructions: 4,
        counts: NONE,
        region: |a| {
            a.mov(ax, ss)?;
            a.mov(ss, ax)?;
            a.nop()?;
            a.nop()
        },
    },
    Case {
        name: "PUSHF shows no TF",
        instructions: 3,
        counts: Counts {
            loads: 1,
            stores: 2,
            ..NONE
        },
        region: |a| {
            a.pushfq()?;
            a.pop(rax)?;
            a.mov(qword_ptr(DATA + 8), rax)
        },
    },
    Case {
        name: "POPF keeps being stepped",
        instructions: 4,
        counts: Counts {
            loads: 1,
            stores: 1,
            ..NONE
        },
        region: |a| {
            a.push(2)?;
            a.popfq()?;
            a.nop()?;
            a.nop()
        },
    },
];

fn at_ring(lab: &Lab, cpl: u8) -> Result<()> {
    for case in CASES {
        let program = Program::new()?;
        // The last nop is for labels at the end.
        let program = counted(program, cpl, |a| {
            (case.region)(a)?;
            a.nop()
        })?;
        let expected = case.counts.and(in_ring(cpl, case.instructions + 1));
        check(lab, program, cpl, expected)
            .and_then(|ran| no_tf(ran.word(DATA + 8)?))
            .map_err(|error| error.context(format!("'{}' at CPL {cpl}", case.name)))?;
    }
    Ok(())
}

fn in_ring(cpl: u8, instructions: u64) -> Counts {
    match cpl {
        3 => Counts {
            user: instructions,
            ..NONE
        },
        _ => Counts {
            kernel: instructions,
            ..NONE
        },
    }
}

/// Flags that the guest saved.
fn no_tf(flags: u64) -> Result<()> {
    ensure!(flags & 0x100 == 0, "the guest saw TF in {flags:#x}");
    Ok(())
}

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

fn counters_read(lab: &Lab) -> Result<()> {
    let program = counted(Program::new()?, 0, |a| {
        a.xor(ecx, ecx)?;
        a.rdpmc()?;
        a.mov(qword_ptr(DATA + 16), rax)?;
        a.mov(ecx, 0xc1)?;
        a.rdmsr()?;
        a.mov(qword_ptr(DATA + 24), rax)
    })?;
    let stores = Counts { stores: 2, ..NONE };
    let ran = check(lab, program, 0, in_ring(0, 6).and(stores))?;
    let read = (ran.word(DATA + 16)?, ran.word(DATA + 24)?);
    // What had retired before them.
    ensure!(read == (1, 4), "RDPMC and RDMSR read {read:?}");
    Ok(())
}

/// The local APIC's timer comes in the middle; the guest counts its own rounds.
fn timer(lab: &Lab) -> Result<()> {
    const VECTOR: u8 = 0x50;
    const FLAG: u64 = DATA + 32;
    const ROUNDS: u64 = DATA + 40;
    let program = Program::new()?.handler(VECTOR, |a| {
        show_flags(a, 0)?;
        a.inc(qword_ptr(FLAG))?;
        // End of interrupt.
        a.mov(dword_ptr(r13 + 0xb0), 0)?;
        a.iretq()
    })?;
    let program = counted(program, 0, |a| {
        a.mov(r13, LAPIC)?;
        // Software enable; divide by 1; one shot; 100 µs of KVM's 1 GHz.
        a.mov(dword_ptr(r13 + 0xf0), 0x1ff)?;
        a.mov(dword_ptr(r13 + 0x3e0), 0xb)?;
        a.mov(dword_ptr(r13 + 0x320), i32::from(VECTOR))?;
        a.mov(dword_ptr(r13 + 0x380), 100_000)?;
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
    let (ran, _) = super::region::run(lab, &super::region::setup(), program)?;
    let rounds = ran.word(ROUNDS)?;
    ensure!(rounds > 0, "the guest made {rounds} rounds");
    let handler = Counts {
        kernel: 2,
        loads: 1,
        stores: 2,
        ..NONE
    };
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
        .and(handler)
        .and(IRET);
    // The last round's branch falls through.
    expected.taken -= 1;
    super::region::check_counts(&ran, 0, expected)?;
    ensure!(ran.word(FLAG)? == 1, "{} interrupts", ran.word(FLAG)?);
    no_tf(ran.word(DATA + 8)?)
}
