//! Random code that nothing interrupts: `step` on KVM and the processor in software count the
//! same of each event.

use anyhow::{Result, ensure};
use guest_tests::micro::{DATA, Lab, Program, Written};
use iced_x86::code_asm::{
    CodeAssembler, ax, bl, eax, ecx, edi, edx, esi, qword_ptr, r8, r9, rax, rbp, rbx, rcx, rdi,
    rdx, rsi, rsp, ss,
};

use super::Random;
use crate::step::region::{counted, run, setup};

const GUESTS: u64 = 8;
const ITEMS: u64 = 60;

/// On KVM by single steps, and on a processor in software.
pub(super) fn random(lab: &Lab) -> Result<()> {
    let emulated = Lab::emulated();
    for seed in 0..GUESTS {
        for cpl in [0, 3] {
            let program = || {
                counted(Program::new()?, cpl, |a| {
                    let mut random = Random::new(seed);
                    for _ in 0..ITEMS {
                        let kind = random.below(24);
                        item(a, kind, &mut random)?;
                    }
                    a.nop()
                })
            };
            let (_, kvm) = run(lab, &setup(), program()?)?;
            let (_, emu) = run(&emulated, &setup(), program()?)?;
            ensure!(
                kvm == emu,
                "seed {seed}, CPL {cpl}: step {kvm:?}, emu {emu:?}"
            );
            ensure!(
                kvm.loads > 10 && kvm.stores > 10 && kvm.taken > 5,
                "{kvm:?}"
            );
        }
    }
    Ok(())
}

fn data(random: &mut Random) -> u64 {
    DATA + 0x100 + random.below(0x1000)
}

/// A few instructions that end where they should.
fn item(a: &mut CodeAssembler, kind: u64, random: &mut Random) -> Written {
    let at = data(random);
    match kind {
        0 => a.nop(),
        1 => a.mov(qword_ptr(at), rax),
        2 => a.mov(rax, qword_ptr(at)),
        3 => a.add(qword_ptr(at), rbx),
        4 => a.lock().xadd(qword_ptr(at), rbx),
        5 => a.xchg(qword_ptr(at), rax),
        6 => a.cmpxchg(qword_ptr(at), rbx),
        7 => {
            a.push(rax)?;
            a.pop(rbx)
        }
        8 => {
            a.mov(rdx, at)?;
            a.push(qword_ptr(rdx))?;
            a.pop(qword_ptr(rdx + 8))
        }
        9 => strings(a, random),
        10 => looped(a, random),
        11 => called(a, random),
        12 => jumps(a, random),
        13 => {
            a.mov(ax, ss)?;
            a.mov(ss, ax)?;
            a.nop()
        }
        14 => {
            a.mov(r8, rsp)?;
            a.mov(r9, rbp)?;
            a.mov(rbp, rsp)?;
            a.enter(16, u32::try_from(random.below(4)).unwrap_or(0))?;
            a.leave()?;
            a.mov(rbp, r9)?;
            a.mov(rsp, r8)
        }
        15 => {
            a.mov(ecx, 77)?;
            a.bts(qword_ptr(at), rcx)
        }
        16 => a.cmove(rax, qword_ptr(at)),
        17 => a.setb(bl),
        18 => {
            a.pushfq()?;
            a.pop(rax)
        }
        19 => a.imul_3(eax, edx, 77),
        20 => a.shld(rax, rbx, u32::try_from(random.below(64)).unwrap_or(0)),
        21 => a.lea(rax, qword_ptr(rbx + rcx * 4)),
        22 => a.not(qword_ptr(at)),
        _ => a.bswap(rax),
    }
}

fn strings(a: &mut CodeAssembler, random: &mut Random) -> Written {
    a.mov(rsi, data(random))?;
    a.mov(rdi, data(random))?;
    a.mov(ecx, u32::try_from(random.below(6)).unwrap_or(0))?;
    match random.below(6) {
        0 => a.rep().movsb(),
        1 => a.rep().stosq(),
        2 => a.repe().cmpsb(),
        3 => a.repne().scasb(),
        4 => a.rep().lodsd(),
        _ => a.movsw(),
    }?;
    a.mov(esi, 0)?;
    a.mov(edi, 0)
}

fn looped(a: &mut CodeAssembler, random: &mut Random) -> Written {
    a.mov(ecx, u32::try_from(random.below(5) + 1).unwrap_or(1))?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.inc(rbx)?;
    match random.below(3) {
        0 => a.loop_(again),
        1 => {
            a.dec(ecx)?;
            a.jne(again)
        }
        _ => {
            a.cmp(rbx, rbx)?;
            a.loope(again)
        }
    }
}

fn called(a: &mut CodeAssembler, random: &mut Random) -> Written {
    let (mut function, mut over) = (a.create_label(), a.create_label());
    a.jmp(over)?;
    a.set_label(&mut function)?;
    a.inc(rax)?;
    if random.chance(2) {
        a.ret()?;
    } else {
        a.ret_1(8)?;
    }
    a.set_label(&mut over)?;
    a.mov(r8, rsp)?;
    a.push(rax)?;
    match random.below(3) {
        0 => a.call(function)?,
        1 => {
            a.lea(rdx, qword_ptr(function))?;
            a.call(rdx)?;
        }
        _ => {
            a.lea(rdx, qword_ptr(function))?;
            a.mov(qword_ptr(DATA), rdx)?;
            a.call(qword_ptr(DATA))?;
        }
    }
    a.mov(rsp, r8)
}

fn jumps(a: &mut CodeAssembler, random: &mut Random) -> Written {
    let mut over = a.create_label();
    a.cmp(eax, i32::try_from(random.below(2)).unwrap_or(0))?;
    match random.below(5) {
        0 => a.je(over),
        1 => a.jne(over),
        2 => a.jb(over),
        3 => a.jg(over),
        _ => a.jmp(over),
    }?;
    a.nop()?;
    a.set_label(&mut over)?;
    a.nop()
}
