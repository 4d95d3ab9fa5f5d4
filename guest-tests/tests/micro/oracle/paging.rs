//! Rights of pages: bits of two levels of tables, CR0.WP, CR4.SMEP and SMAP, EFER.NXE, AC, at both
//! rings; error code, CR2, and the A and D bits that are left.

use anyhow::Result;
use guest_tests::micro::{Lab, Written, exit};
use iced_x86::code_asm::{
    CodeAssembler, cr0, cr4, eax, ecx, edx, ptr, qword_ptr, r12, r13, r14, r15, rax, rbx, rdx,
};
use vmm::micro::{USER_CODE, USER_CS, USER_SS, USER_STACK};

use super::{
    ENTRY, Random, STATE, VECTORS, announce, begin, begin_case, both, compare, imm, program,
};

const GUESTS: u64 = 12;
const CASES: usize = 250;

/// Tables below the second entry of the root.
pub(super) const PML4_1: u64 = 0x1008;
pub(super) const PDPT: u64 = 0x1e_0000;
pub(super) const PD: u64 = 0x1e_1000;
pub(super) const PT: u64 = 0x1e_2000;
/// What is tested: its first byte is a RET.
pub(super) const PAGE: u64 = 0x1e_3000;
pub(super) const LINEAR: u64 = 1 << 39;

const PAGE_FAULT: u64 = 0x10e;

const EFER: u32 = 0xc000_0080;
const NXE: u32 = 1 << 11;
const WP: i32 = 1 << 16;
pub(super) const SMEP: u64 = 1 << 20;
pub(super) const SMAP: u64 = 1 << 21;
const AC: i32 = 1 << 18;

#[derive(Clone, Copy, Debug)]
enum Access {
    Read,
    Write,
    Fetch,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    /// P, W, U, A, D, PS or PAT, NX, and some bit that is reserved.
    leaf: u64,
    above: u64,
    write_protect: bool,
    control: u64,
    no_execute: bool,
    open: bool,
    cpl: u8,
    access: Access,
}

fn case(random: &mut Random) -> Case {
    const RESERVED: u64 = 1 << 47;
    let entry = |random: &mut Random, to: u64| {
        let mut bits = to | random.next() & 0x66 | u64::from(!random.chance(6));
        if random.chance(4) {
            bits |= 1 << 63;
        }
        if random.chance(16) {
            bits |= RESERVED;
        }
        bits
    };
    let leaf = entry(random, PAGE);
    let above = entry(random, PT) & !0x40;
    Case {
        leaf,
        above,
        write_protect: random.chance(2),
        control: random.next() & (SMEP | SMAP),
        no_execute: !random.chance(4),
        open: random.chance(2),
        cpl: random.one_of(&[0, 3]),
        access: random.one_of(&[Access::Read, Access::Write, Access::Fetch]),
    }
}

/// On KVM and on a processor in software.
pub(super) fn random(lab: &Lab) -> Result<()> {
    for seed in 0..GUESTS {
        let mut random = Random::new(seed);
        let all: Vec<Case> = (0..CASES).map(|_| case(&mut random)).collect();
        let program = program(VECTORS)?
            .data(PAGE, vec![0xc3])
            .user(user)?
            .kernel(|a| {
                begin(a)?;
                for (at, value) in [(PML4_1, PDPT | 7), (PDPT, PD | 7)] {
                    a.mov(rax, value)?;
                    a.mov(qword_ptr(at), rax)?;
                }
                for (number, case) in all.iter().enumerate() {
                    try_case(a, number, *case)?;
                }
                exit(a)
            })?;
        let names: Vec<String> = all.iter().map(|case| format!("{case:x?}")).collect();
        let logs = both(lab, &program, 0)?;
        compare(&logs, &names, |_, kvm, emu| {
            as_the_manual_says(kvm) == as_left_open(emu)
        })?;
    }
    Ok(())
}

/// What this KVM's processor, which is QEMU's, does otherwise: a fault by a reserved bit has P in
/// its code, because entries that are not present have no reserved bits (SDM vol. 3A, 4.7).
fn as_the_manual_says(log: &[[u64; 4]]) -> Vec<[u64; 4]> {
    const RESERVED: u64 = 8;
    let mut log = as_left_open(log);
    for entry in log.iter_mut().filter(|entry| entry[0] == PAGE_FAULT) {
        if entry[1] & RESERVED != 0 {
            entry[1] |= 1;
        }
    }
    log
}

/// Whether a walk that comes to a fault sets A in the entries before is left to the processor
/// (SDM vol. 3A, 4.8, is about translations alone).
fn as_left_open(log: &[[u64; 4]]) -> Vec<[u64; 4]> {
    const ACCESSED: u64 = 1 << 5;
    let mut log = log.to_vec();
    if log.iter().any(|entry| entry[0] == PAGE_FAULT)
        && let Some(state) = log.iter_mut().find(|entry| entry[0] == STATE as u64)
    {
        state[1] |= ACCESSED;
    }
    log
}

/// By R13: reads, writes or calls RBX, and ends at an UD2.
pub(super) fn user(a: &mut CodeAssembler) -> Written {
    let (mut write, mut fetch) = (a.create_label(), a.create_label());
    a.cmp(r13, 1)?;
    a.je(write)?;
    a.ja(fetch)?;
    a.mov(rax, qword_ptr(rbx + 8))?;
    a.ud2()?;
    a.set_label(&mut write)?;
    a.mov(qword_ptr(rbx + 8), rax)?;
    a.ud2()?;
    a.set_label(&mut fetch)?;
    // What comes behind the RET is an UD2 as well.
    a.jmp(rbx)
}

/// Sets EFER.NXE, CR0.WP, and of CR4 SMEP and SMAP as they are in `control`.
pub(super) fn set_controls(
    a: &mut CodeAssembler,
    no_execute: bool,
    write_protect: bool,
    control: u64,
) -> Written {
    a.mov(ecx, EFER)?;
    a.rdmsr()?;
    a.and(eax, !NXE.cast_signed())?;
    if no_execute {
        a.or(eax, NXE.cast_signed())?;
    }
    a.wrmsr()?;
    a.mov(rax, cr0)?;
    a.and(rax, !WP)?;
    if write_protect {
        a.or(rax, WP)?;
    }
    a.mov(cr0, rax)?;
    a.mov(rax, cr4)?;
    a.and(rax, !imm(SMEP | SMAP))?;
    a.or(rax, imm(control))?;
    a.mov(cr4, rax)
}

fn try_case(a: &mut CodeAssembler, number: usize, case: Case) -> Written {
    let (mut at, mut after) = (a.create_label(), a.create_label());
    begin_case(a, number)?;
    a.mov(rax, case.above)?;
    a.mov(qword_ptr(PD), rax)?;
    a.mov(rax, case.leaf)?;
    a.mov(qword_ptr(PT), rax)?;
    set_controls(a, case.no_execute, case.write_protect, case.control)?;
    a.mov(rbx, LINEAR)?;
    a.invlpg(ptr(rbx))?;
    announce(a, at, after)?;
    let flags = 2 | if case.open { AC } else { 0 };
    if case.cpl == 3 {
        a.mov(r13, case.access as u64)?;
        a.push(i32::from(USER_SS))?;
        a.mov(rax, USER_STACK)?;
        a.push(rax)?;
        // AC would check alignment here, where all is aligned.
        a.push(flags)?;
        a.push(i32::from(USER_CS))?;
        a.mov(rax, USER_CODE)?;
        a.push(rax)?;
        a.set_label(&mut at)?;
        a.iretq()?;
    } else {
        a.push(flags)?;
        a.popfq()?;
        a.set_label(&mut at)?;
        match case.access {
            Access::Read => a.mov(rax, qword_ptr(rbx + 8)),
            Access::Write => a.mov(qword_ptr(rbx + 8), rax),
            Access::Fetch => a.call(rbx),
        }?;
    }
    a.set_label(&mut after)?;
    a.mov(qword_ptr(r12), STATE)?;
    a.mov(rax, qword_ptr(PD))?;
    a.mov(qword_ptr(r12 + 8), rax)?;
    a.mov(rdx, qword_ptr(PT))?;
    a.mov(qword_ptr(r12 + 16), rdx)?;
    a.add(r12, ENTRY)?;
    a.xor(edx, edx)?;
    a.mov(r14, rdx)?;
    a.mov(r15, rdx)
}
