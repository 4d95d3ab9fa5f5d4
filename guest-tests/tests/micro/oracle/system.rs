//! Instructions of the system with operands that are anything: selectors of random descriptors,
//! far transfers, IRET, gates, control and debug registers, MSRs, flags, addresses that are not
//! canonical.

use std::cell::RefCell;
use std::collections::BTreeSet;

use anyhow::{Result, bail, ensure};
use guest_tests::l1;
use guest_tests::micro::{Lab, Program, Written, exit};
use iced_x86::code_asm::{
    CodeAssembler, ax, byte_ptr, cr0, cr4, cx, dr6, dr7, ds, eax, ecx, edx, es, fs, gs, ptr,
    qword_ptr, r12, rax, rbx, rcx, rdx, rsp, ss, word_ptr,
};
use vmm::micro::{KERNEL_CS, KERNEL_SS, USER_CS, USER_SS, USER_STACK};

use super::deviations::{BEYOND, DEVIATIONS, Deviation, Given};
use super::{
    ENTRY, Random, STATE, VECTORS, announce, begin, begin_case, both, compare, imm, program,
};

const GUESTS: u64 = 12;
const CASES: usize = 220;

/// A descriptor table of our own: the machine's, and random ones behind it.
const GDT: u64 = 0x1e_8000;
const GDT_LEN: u64 = 64;
/// Its task.
const TASK: u64 = 0x28;
/// Of 0x68 bytes at 0x7000, available.
const TASK_DESCRIPTOR: u64 = 0x8900_7000_0067;
/// Descriptors of the machine's: null, two of each ring, and the task of two entries.
const MACHINES: u64 = 7;
const MACHINES_GDT: u64 = 0x5000;
const IDT: u64 = 0x6000;
/// Vectors whose gates are random.
const GATES: u8 = 0x40;
const GATE_COUNT: u8 = 16;
/// What LGDT loads, and far pointers.
const POINTER: u64 = 0x1e_7000;
/// Where far transfers go: UD2, in any width of code, and with any base behind it.
const LAND: u64 = 0x20_0000;
const BASES: u64 = 0x10_0000;

/// An instruction with its operands.
#[derive(Clone, Copy, Debug)]
pub(super) enum Case {
    Load(u8, u16),
    Lar(u16),
    Lsl(u16),
    Verr(u16),
    Verw(u16),
    Lldt(u16),
    Ltr(u16),
    Retf {
        code: u16,
        stack: u16,
    },
    Iret {
        code: u16,
        stack: u16,
        flags: u64,
        far: bool,
    },
    Jump {
        code: u16,
        call: bool,
    },
    Interrupt(u8),
    Cr0(u64),
    Cr4(u64),
    Dr6(u64),
    Dr7(u64),
    Wrmsr(u32, u64),
    Popf(u64),
    Read {
        at: u64,
        stack: bool,
    },
}

fn selector(random: &mut Random) -> u16 {
    let index = match random.below(8) {
        0 => random.below(MACHINES),
        1 => GDT_LEN + random.below(4),
        _ => MACHINES + random.below(GDT_LEN - MACHINES),
    };
    let table = if random.chance(12) { 4 } else { 0 };
    u16::try_from((index * 8) | table | random.below(4)).unwrap_or(0)
}

fn case(random: &mut Random) -> Case {
    const WILD: [u64; 6] = [
        0x8000_0000_0000,
        0xffff_7fff_ffff_fff8,
        0x7fff_ffff_fffc,
        0x4000_0000_0000_0000,
        0xffff_8000_0000_0000,
        0x1e_0000,
    ];
    let kept = [KERNEL_CS, KERNEL_SS, USER_CS, USER_SS];
    let usual = |random: &mut Random, usual: u16| {
        if random.chance(3) {
            usual
        } else {
            selector(random)
        }
    };
    match random.below(24) {
        0..=3 => {
            let segment = random.one_of(&[0, 1, 2, 3, 4]);
            let selector = if random.chance(6) {
                random.one_of(&kept)
            } else {
                selector(random)
            };
            Case::Load(segment, selector)
        }
        4 => Case::Lar(selector(random)),
        5 => Case::Lsl(selector(random)),
        6 => Case::Verr(selector(random)),
        7 => Case::Verw(selector(random)),
        8 => Case::Lldt(selector(random)),
        9 => Case::Ltr(selector(random)),
        10 | 11 => Case::Retf {
            code: usual(random, USER_CS),
            stack: usual(random, USER_SS),
        },
        12..=14 => Case::Iret {
            code: usual(random, USER_CS),
            stack: usual(random, USER_SS),
            // Neither TF nor IF, VM or NT.
            flags: random.next() & 0x25_3cd5 | 2,
            far: random.chance(8),
        },
        15 | 16 => Case::Jump {
            code: usual(random, KERNEL_CS),
            call: random.chance(2),
        },
        17 => Case::Interrupt(GATES + random.below(u64::from(GATE_COUNT)).to_le_bytes()[0]),
        18 => Case::Cr0(random.one_of(&[
            0x8000_0000,
            0xa001_0033,
            0x1_8001_0033,
            0x8001_0033,
            0x8005_0033,
        ])),
        19 => Case::Cr4(random.one_of(&[
            0x200,
            0x8000_0220,
            0x1_0000_0220,
            0x220,
            0x2a0,
            0x320,
            0x224,
        ])),
        20 => {
            let value = random.next() & 0xffff_0fff & !0x2000;
            let value = if random.chance(4) {
                value | 1 << 33
            } else {
                value
            };
            if random.chance(2) {
                Case::Dr6(value)
            } else {
                // No breakpoint is on.
                Case::Dr7(value & !0xff)
            }
        }
        21 => {
            let msr = random.one_of(&[
                0xc000_0080,
                0xc000_0082,
                0xc000_0084,
                0xc000_0100,
                0xc000_0101,
                0xc000_0102,
                0x176,
                0x277,
            ]);
            let value = if random.chance(2) {
                random.one_of(&WILD)
            } else {
                random.next()
            };
            Case::Wrmsr(msr, value)
        }
        22 => Case::Popf(random.next() & 0x3f_fcd5 & !0x100 & !0x200 | 2),
        _ => {
            let at = random.one_of(&WILD[..4]) + random.below(8);
            let stack = random.chance(2);
            Case::Read { at, stack }
        }
    }
}

/// A descriptor or a gate of any kind.
fn descriptor(random: &mut Random) -> u64 {
    let kind = random.below(16) | if random.chance(3) { 0 } else { 16 };
    let attributes = kind
        | random.below(4) << 5
        | if random.chance(8) { 0 } else { 1 << 7 }
        | random.below(16) << 12;
    // Code of 64 bits with a default size of 32 raises #GP (SDM vol. 3A, 3.4.5), but QEMU's
    // processor loads it, and no VMRUN takes it then.
    let attributes = if attributes >> 13 & 1 != 0 {
        attributes & !(1 << 14)
    } else {
        attributes
    };
    let base = random.below(BASES) & !1;
    let limit = random.one_of(&[0xfff, 0xffff, 0xf_ffff]) - random.below(0x100);
    limit & 0xffff | base << 16 | attributes << 40 | (limit >> 16) << 48
}

fn gate(random: &mut Random, vector: u8) -> [u64; 2] {
    let to = if random.chance(8) {
        1 << 47
    } else {
        Program::handler_address(vector)
    };
    let kind = random.one_of(&[0xe, 0xf, 0xe, 0xf, 0x6, 0x5, 0xc]);
    let attributes = kind | random.below(4) << 5 | if random.chance(6) { 0 } else { 0x80 };
    let cs = if random.chance(2) {
        KERNEL_CS
    } else {
        selector(random)
    };
    let low = to & 0xffff | u64::from(cs) << 16 | attributes << 40 | (to >> 16 & 0xffff) << 48;
    [low, to >> 32]
}

/// On KVM and on a processor in software.
pub(super) fn random(lab: &Lab) -> Result<()> {
    let mut wrong = Vec::new();
    let met = RefCell::new(BTreeSet::new());
    for seed in 0..GUESTS {
        let mut random = Random::new(seed);
        let descriptors: Vec<u64> = (MACHINES..GDT_LEN)
            .map(|_| descriptor(&mut random))
            .collect();
        let gates: Vec<_> = (GATES..GATES + GATE_COUNT)
            .map(|vector| gate(&mut random, vector))
            .collect();
        let all: Vec<Case> = (0..CASES).map(|_| case(&mut random)).collect();
        let tables = descriptors
            .iter()
            .flat_map(|one| one.to_le_bytes())
            .collect();
        let program = program(VECTORS.into_iter().chain(GATES..GATES + GATE_COUNT))?
            .data(GDT + 8 * MACHINES, tables)
            .data(LAND, [0x0f, 0x0b].repeat((BASES / 2) as usize))
            .kernel(|a| {
                begin(a)?;
                load_tables(a, &gates)?;
                for (number, case) in all.iter().enumerate() {
                    try_case(a, number, *case)?;
                }
                exit(a)
            })?;
        let names: Vec<String> = all.iter().map(|case| name(*case, &descriptors)).collect();
        let logs = both(lab, &program, 0)?;
        let deviates = |number: usize, kvm: &[[u64; 4]], emu: &[[u64; 4]]| {
            let (name, given) = (&names[number], given(all[number], &descriptors));
            let known = |one: &&Deviation| {
                name.starts_with(one.case)
                    && name.contains(one.with)
                    && (one.given)(&given)
                    && (one.is_it)(kvm, emu)
            };
            let found = DEVIATIONS.iter().find(known);
            if let Some(one) = found {
                met.borrow_mut().insert(one.manual);
            }
            found.is_some()
        };
        if let Err(error) = compare(&logs, &names, deviates) {
            wrong.push(format!("seed {seed}: {error}"));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    let met = met.into_inner();
    for manual in &met {
        println!("KVM's processor does otherwise: {manual}");
    }
    // L1's processor is known: an excuse that it does not need would hide what is wrong in ours.
    let never = DEVIATIONS.iter().find(|one| !met.contains(one.manual));
    if let (true, Some(never)) = (l1::inside(), never) {
        bail!("a deviation that was not met: {}", never.manual);
    }
    Ok(())
}

/// What a deviation is told of a case.
fn given(case: Case, descriptors: &[u64]) -> Given {
    let upper = match case {
        Case::Ltr(selector) | Case::Lldt(selector) => {
            let slot = (u64::from(selector >> 3) + 1).checked_sub(MACHINES);
            let slot = slot.and_then(|slot| usize::try_from(slot).ok());
            slot.and_then(|slot| descriptors.get(slot).copied())
        }
        _ => None,
    };
    Given { case, upper }
}

/// The case, with the descriptors that it names.
fn name(case: Case, descriptors: &[u64]) -> String {
    let selectors = match case {
        Case::Load(_, selector)
        | Case::Lar(selector)
        | Case::Lsl(selector)
        | Case::Verr(selector)
        | Case::Verw(selector)
        | Case::Lldt(selector)
        | Case::Ltr(selector)
        | Case::Jump { code: selector, .. } => vec![selector],
        Case::Retf { code, stack } | Case::Iret { code, stack, .. } => vec![code, stack],
        _ => Vec::new(),
    };
    let of = |selector: &u16| {
        let index = u64::from(selector >> 3).checked_sub(MACHINES)?;
        descriptors.get(usize::try_from(index).ok()?)
    };
    let named: Vec<_> = selectors.iter().filter_map(of).collect();
    let beyond = match selectors.first().and_then(of) {
        Some(code) if is_beyond(*code) => BEYOND,
        _ => "",
    };
    format!("{case:x?} {named:x?} {beyond}")
}

/// Whether [`LAND`] is beyond a segment of code of less than 64 bits.
fn is_beyond(descriptor: u64) -> bool {
    let limit = descriptor & 0xffff | descriptor >> 32 & 0xf_0000;
    let in_pages = descriptor >> 55 & 1 != 0;
    let limit = if in_pages { limit << 12 | 0xfff } else { limit };
    descriptor >> 53 & 1 == 0 && LAND > limit
}

/// The machine's descriptors are copied, and our gates put in place.
fn load_tables(a: &mut CodeAssembler, gates: &[[u64; 2]]) -> Written {
    for slot in 0..MACHINES {
        a.mov(rax, qword_ptr(MACHINES_GDT + 8 * slot))?;
        a.mov(qword_ptr(GDT + 8 * slot), rax)?;
    }
    // The machine has its task without a descriptor.
    a.mov(rax, TASK_DESCRIPTOR)?;
    a.mov(qword_ptr(GDT + TASK), rax)?;
    for (n, words) in (0..).zip(gates) {
        for (at, word) in [0, 8].into_iter().zip(words) {
            a.mov(rax, *word)?;
            a.mov(qword_ptr(IDT + 16 * (u64::from(GATES) + n) + at), rax)?;
        }
    }
    a.mov(word_ptr(POINTER), imm(GDT_LEN * 8 - 1))?;
    a.mov(rax, GDT)?;
    a.mov(qword_ptr(POINTER + 2), rax)?;
    a.lgdt(ptr(POINTER))
}

fn try_case(a: &mut CodeAssembler, number: usize, case: Case) -> Written {
    let (mut at, mut after) = (a.create_label(), a.create_label());
    begin_case(a, number)?;
    announce(a, at, after)?;
    a.mov(eax, 0x1122_3344)?;
    a.mov(edx, 0)?;
    a.xor(ecx, ecx)?;
    prepare(a, case)?;
    a.set_label(&mut at)?;
    execute(a, case)?;
    a.set_label(&mut after)?;
    if matches!(case, Case::Ltr(_)) {
        // The machine's task again, which is busy by now.
        a.and(byte_ptr(GDT + TASK + 5), !2)?;
        a.mov(ecx, imm(TASK))?;
        a.ltr(cx)?;
    }
    // Flags, RAX, and the selectors.
    a.mov(rsp, vmm::micro::KERNEL_STACK - 0x800)?;
    a.pushfq()?;
    a.pop(rdx)?;
    a.and(edx, 0x40)?;
    a.mov(qword_ptr(r12), STATE)?;
    a.mov(qword_ptr(r12 + 8), rax)?;
    a.mov(qword_ptr(r12 + 16), rdx)?;
    a.mov(word_ptr(r12 + 24), ds)?;
    a.mov(word_ptr(r12 + 26), es)?;
    a.mov(word_ptr(r12 + 28), fs)?;
    a.mov(word_ptr(r12 + 30), gs)?;
    a.add(r12, ENTRY)
}

/// What is on the stack and in registers before it.
fn prepare(a: &mut CodeAssembler, case: Case) -> Written {
    match case {
        Case::Load(_, selector)
        | Case::Lar(selector)
        | Case::Lsl(selector)
        | Case::Verr(selector)
        | Case::Verw(selector)
        | Case::Lldt(selector)
        | Case::Ltr(selector) => a.mov(ecx, u32::from(selector)),
        Case::Retf { code, stack } => {
            a.push(i32::from(stack))?;
            a.push(imm(USER_STACK))?;
            a.push(i32::from(code))?;
            a.push(imm(LAND))
        }
        Case::Iret {
            code,
            stack,
            flags,
            far,
        } => {
            a.push(i32::from(stack))?;
            a.push(imm(USER_STACK))?;
            a.push(imm(flags))?;
            a.push(i32::from(code))?;
            a.mov(rax, if far { 1 << 47 } else { LAND })?;
            a.push(rax)
        }
        Case::Jump { code, .. } => {
            a.mov(rbx, POINTER + 16)?;
            a.mov(rax, LAND)?;
            a.mov(qword_ptr(rbx), rax)?;
            a.mov(word_ptr(rbx + 8), i32::from(code))
        }
        Case::Cr0(value) | Case::Cr4(value) | Case::Dr6(value) | Case::Dr7(value) => {
            a.mov(rax, value)
        }
        Case::Wrmsr(msr, value) => {
            a.mov(ecx, msr)?;
            a.mov(rax, value & 0xffff_ffff)?;
            a.mov(rdx, value >> 32)
        }
        Case::Popf(flags) => a.push(imm(flags)),
        Case::Read { at, .. } => a.mov(rbx, at),
        Case::Interrupt(_) => Ok(()),
    }
}

fn execute(a: &mut CodeAssembler, case: Case) -> Written {
    match case {
        Case::Load(0, _) => a.mov(ds, cx),
        Case::Load(1, _) => a.mov(es, cx),
        Case::Load(2, _) => a.mov(fs, cx),
        Case::Load(3, _) => a.mov(gs, cx),
        Case::Load(..) => a.mov(ss, cx),
        Case::Lar(_) => a.lar(eax, ecx),
        Case::Lsl(_) => a.lsl(eax, ecx),
        Case::Verr(_) => a.verr(cx),
        Case::Verw(_) => a.verw(cx),
        Case::Lldt(_) => {
            a.lldt(cx)?;
            a.sldt(ax)?;
            a.xor(ecx, ecx)?;
            a.lldt(cx)
        }
        Case::Ltr(_) => {
            a.ltr(cx)?;
            a.str(ax)
        }
        Case::Retf { .. } => a.db(&[0x48, 0xcb]),
        Case::Iret { .. } => a.iretq(),
        Case::Jump { call: false, .. } => a.db(&[0x48, 0xff, 0x2b]),
        Case::Jump { call: true, .. } => a.db(&[0x48, 0xff, 0x1b]),
        Case::Interrupt(vector) => a.int(i32::from(vector)),
        Case::Cr0(_) => {
            a.mov(cr0, rax)?;
            a.mov(rax, cr0)?;
            a.mov(ecx, 0x8001_0033u32)?;
            a.mov(cr0, rcx)
        }
        Case::Cr4(_) => {
            a.mov(cr4, rax)?;
            a.mov(rax, cr4)?;
            a.mov(ecx, 0x220)?;
            a.mov(cr4, rcx)
        }
        Case::Dr6(_) => {
            a.mov(dr6, rax)?;
            a.mov(rax, dr6)
        }
        Case::Dr7(_) => {
            a.mov(dr7, rax)?;
            a.mov(rax, dr7)
        }
        Case::Wrmsr(0xc000_0080, _) => {
            // What is reserved, and what is not.
            a.wrmsr()?;
            a.rdmsr()?;
            a.mov(rbx, rax)?;
            a.mov(eax, 0xd01)?;
            a.xor(edx, edx)?;
            a.wrmsr()?;
            a.mov(rax, rbx)
        }
        Case::Wrmsr(..) => {
            a.wrmsr()?;
            a.rdmsr()?;
            a.shl(rdx, 32)?;
            a.or(rax, rdx)
        }
        Case::Popf(_) => {
            a.popfq()?;
            a.pushfq()?;
            a.pop(rax)?;
            a.push(2)?;
            a.popfq()
        }
        Case::Read { stack: false, .. } => a.mov(rax, qword_ptr(rbx)),
        Case::Read { stack: true, .. } => a.mov(rax, qword_ptr(rbx).ss()),
    }
}
