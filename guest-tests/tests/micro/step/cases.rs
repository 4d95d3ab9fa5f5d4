//! Exact counts of code that no event interrupts.

use super::region::{Counts, NONE, check, counted};
use anyhow::{Result, ensure};
use guest_tests::micro::{DATA, Lab, Program, Test, Written};
use iced_x86::code_asm::{CodeAssembler, ax, eax, ecx, edi, edx, esi, qword_ptr, rax, ss};

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
        name: "step::counters_read_in_the_region",
        run: counters_read,
    },
    Test {
        name: "step::counters_read_in_one_step_with_what_was_before",
        run: counters_read_in_a_shadow,
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
        name: "KVM may lose the trap behind a fence",
        instructions: 9,
        counts: Counts {
            branches: 1,
            taken: 1,
            ..NONE
        },
        region: |a| {
            let mut over = a.create_label();
            a.mfence()?;
            a.nop()?;
            a.mfence()?;
            a.lfence()?;
            a.nop()?;
            a.sfence()?;
            a.jmp(over)?;
            a.set_label(&mut over)?;
            a.endbr64()?;
            a.lfence()
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

pub(super) fn in_ring(cpl: u8, instructions: u64) -> Counts {
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
pub(super) fn no_tf(flags: u64) -> Result<()> {
    ensure!(flags & 0x100 == 0, "the guest saw TF in {flags:#x}");
    Ok(())
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

/// An RDPMC counts, and reads, what came to no trap of its own before it.
fn counters_read_in_a_shadow(lab: &Lab) -> Result<()> {
    let program = counted(Program::new()?, 0, |a| {
        a.xor(ecx, ecx)?;
        a.lfence()?;
        a.rdpmc()?;
        a.mov(qword_ptr(DATA + 16), rax)?;
        a.mov(ax, ss)?;
        a.mov(ss, ax)?;
        a.rdpmc()?;
        a.mov(qword_ptr(DATA + 24), rax)
    })?;
    let stores = Counts { stores: 2, ..NONE };
    let ran = check(lab, program, 0, in_ring(0, 8).and(stores))?;
    let read = (ran.word(DATA + 16)?, ran.word(DATA + 24)?);
    ensure!(read == (2, 6), "RDPMC read {read:?}");
    Ok(())
}
