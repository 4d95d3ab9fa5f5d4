//! Every permutation of what decides about an access in long mode: all bits of two levels of page
//! tables, CR0.WP, SMEP, SMAP, NXE, AC, both rings; error code, CR2, and the A and D bits that are
//! left. A guest has one setting of the control registers, and tries the rest in a loop, which
//! on KVM exits nowhere.

use std::time::Duration;

use anyhow::{Result, ensure};
use guest_tests::micro::{Lab, Program, Setup, Written, exit};
use iced_x86::code_asm::{
    CodeAssembler, al, cr2, eax, edx, ptr, qword_ptr, r8, r8d, r9d, r10, r11, r11d, r11w, r12,
    r13d, r15, rax, rbp, rbx, rsp, word_ptr,
};
use vmm::micro::{KERNEL_STACK, USER_CODE, USER_CS, USER_SS, USER_STACK};

use super::paging::{LINEAR, PAGE, PD, PDPT, PML4_1, PT, SMAP, SMEP, set_controls, user};
use super::{begin, imm};

/// Two bytes of each case.
const RESULTS: u64 = 0x11_0000;
/// Entries by number.
const LEAVES: u64 = 0x1b_0000;
const ABOVE: u64 = LEAVES + 8 * LEAF_COUNT;
const LARGE: u64 = ABOVE + 8 * ABOVE_COUNT;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const PAGE_SIZE: u64 = 1 << 7;
const NEVER: u64 = 1 << 63;
/// Beyond anybody's addresses, and in a large page's own.
const BEYOND: u64 = 1 << 47;
const IN_LARGE: u64 = 1 << 13;

/// P, W, U, A, NX, a reserved bit; of the last entry D too.
const ABOVE_COUNT: u64 = 64;
const LEAF_COUNT: u64 = 128;
/// Reads, writes and fetches, at both rings, with AC and without.
const ACCESSES: u64 = 12;
const SMALL_CASES: u64 = ACCESSES * ABOVE_COUNT * LEAF_COUNT;
const LARGE_CASES: u64 = ACCESSES * LEAF_COUNT;
/// NXE, SMAP, SMEP and WP.
const SETTINGS: u64 = 16;
/// Each of them on and off, beside others on and off: the guests of a run that has not minutes for
/// all, which `--whole` asks for.
const SOME: [u64; 4] = [0b0000, 0b0101, 0b1010, 0b1111];

/// Bits of a result above the error code: #UD, which ends an access that is allowed, #PF, and
/// whether CR2 was right, or RIP of the #UD; then A and D of the last entry and of the one above.
const ALLOWED: i32 = 1 << 8;
const REFUSED: i32 = 1 << 9;
const PLACE: i32 = 10;
const LEAF_MARKS: i32 = 11;
const ABOVE_MARKS: i32 = 13;

/// The entry that so many bits of a number choose.
fn entry(number: u64, reserved: u64) -> u64 {
    let bits = [PRESENT, WRITABLE, USER, ACCESSED, NEVER, reserved, DIRTY];
    let chosen = bits.iter().enumerate();
    let chosen = chosen.filter(|(at, _)| number >> at & 1 != 0);
    chosen.map(|(_, bit)| bit).sum()
}

/// On KVM and on a processor in software.
pub(super) fn all(lab: &Lab) -> Result<()> {
    let emulated = Lab::emulated();
    let mut allowed = 0;
    let is_whole = std::env::args().any(|word| word == "--whole");
    let settings: Vec<u64> = (0..SETTINGS)
        .filter(|setting| is_whole || SOME.contains(setting))
        .collect();
    for &setting in &settings {
        let program = guest(setting)?;
        let (kvm, emu) = (results(lab, &program)?, results(&emulated, &program)?);
        let mut wrong = Vec::new();
        for (number, (kvm, emu)) in (0..).zip(kvm.iter().zip(&emu)) {
            allowed += usize::from(i32::from(*emu) & ALLOWED != 0);
            if as_the_manual_says(*kvm) != as_left_open(*emu) {
                wrong.push(format!("{}: KVM {kvm:#x}, emu {emu:#x}", name(number)));
            }
        }
        ensure!(
            wrong.is_empty(),
            "{} accesses differ under setting {setting:04b} (NXE, SMAP, SMEP, WP):\n{}",
            wrong.len(),
            wrong[..wrong.len().min(20)].join("\n")
        );
    }
    let count = settings.len() * results_of_each();
    println!("{count} accesses, {allowed} of them allowed");
    ensure!(allowed > 0, "no access was allowed");
    Ok(())
}

fn results_of_each() -> usize {
    usize::try_from(SMALL_CASES + LARGE_CASES).unwrap_or(usize::MAX)
}

/// What QEMU's processor does otherwise: as for the random ones ([`super::paging`]).
fn as_the_manual_says(result: u16) -> u16 {
    const RESERVED: u16 = 8;
    let refused = i32::from(result) & REFUSED != 0;
    as_left_open(result | u16::from(refused && result & RESERVED != 0))
}

/// A of the entries before a fault is left to the processor (SDM vol. 3A, 4.8).
fn as_left_open(result: u16) -> u16 {
    if i32::from(result) & REFUSED != 0 {
        result | 1 << ABOVE_MARKS
    } else {
        result
    }
}

fn name(number: u64) -> String {
    let (large, rest) = match number.checked_sub(SMALL_CASES) {
        Some(rest) => (true, rest),
        None => (false, number),
    };
    let of_entries = if large {
        LEAF_COUNT
    } else {
        LEAF_COUNT * ABOVE_COUNT
    };
    let leaf = entry(rest % LEAF_COUNT, if large { IN_LARGE } else { BEYOND });
    let above = entry(rest % of_entries / LEAF_COUNT, BEYOND);
    let how = rest / of_entries;
    let access = ["read", "write", "fetch"][usize::try_from(how / 4).unwrap_or(0).min(2)];
    format!(
        "{access} at CPL {}, AC {}, last entry {leaf:#x}, above {above:#x}, large {large}",
        how / 2 % 2 * 3,
        how % 2
    )
}

fn results(lab: &Lab, program: &Program) -> Result<Vec<u16>> {
    let setup = Setup {
        timeout: Duration::from_secs(120),
        ..Setup::clock("none")
    };
    let ran = lab.run(&setup, &program.clone().start(0))?;
    let mut all = Vec::new();
    for at in (RESULTS..RESULTS + 2 * (SMALL_CASES + LARGE_CASES)).step_by(8) {
        let four = ran.word(at)?.to_le_bytes();
        all.extend(
            four.chunks_exact(2)
                .map(|two| u16::from_le_bytes([two[0], two[1]])),
        );
    }
    Ok(all)
}

fn guest(setting: u64) -> Result<Program> {
    let words = |all: &mut dyn Iterator<Item = u64>| -> Vec<u8> {
        all.flat_map(u64::to_le_bytes).collect()
    };
    let leaves = words(&mut (0..LEAF_COUNT).map(|n| PAGE | entry(n, BEYOND)));
    let above = words(&mut (0..ABOVE_COUNT).map(|n| PT | entry(n, BEYOND)));
    let large = words(&mut (0..LEAF_COUNT).map(|n| PAGE_SIZE | entry(n, IN_LARGE)));
    Program::new()?
        .handler(14, refused)?
        .handler(6, ended)?
        .data(PAGE, vec![0x0f, 0x0b])
        .data(LEAVES, leaves)
        .data(ABOVE, above)
        .data(LARGE, large)
        .user(user)?
        .kernel(|a| {
            begin(a)?;
            for (at, value) in [(PML4_1, PDPT | 7), (PDPT, PD | 7)] {
                a.mov(rax, value)?;
                a.mov(qword_ptr(at), rax)?;
            }
            control(a, setting)?;
            a.mov(r12, RESULTS)?;
            // Where the page is in its large page, which begins at 0.
            a.mov(rbx, LINEAR + PAGE)?;
            sweep(a, false)?;
            sweep(a, true)?;
            exit(a)
        })
}

fn control(a: &mut CodeAssembler, setting: u64) -> Written {
    let bit = |at: u32| setting >> at & 1 != 0;
    let on = if bit(1) { SMEP } else { 0 } | if bit(2) { SMAP } else { 0 };
    set_controls(a, bit(3), bit(0), on)
}

/// The cases of small or large pages, by their numbers in R8: bits of the entries, AC, ring and
/// access from the lowest bit on.
fn sweep(a: &mut CodeAssembler, large: bool) -> Written {
    let (mut next, mut after) = (a.create_label(), a.create_label());
    let (mut at_user, mut write, mut fetch) =
        (a.create_label(), a.create_label(), a.create_label());
    let bits = if large { 7 } else { 13 };
    // The page table's entry of the page.
    let leaf_at = PT + 8 * (PAGE >> 12);
    a.lea(r15, qword_ptr(after))?;
    a.xor(r8d, r8d)?;
    a.set_label(&mut next)?;
    set_entries(a, large, leaf_at)?;
    a.mov(r9d, r8d)?;
    a.shr(r9d, bits)?;
    // RFLAGS with AC or without.
    a.mov(eax, r9d)?;
    a.and(eax, 1)?;
    a.shl(eax, 18)?;
    a.or(eax, 2)?;
    a.mov(r10, rax)?;
    a.mov(r13d, r9d)?;
    a.shr(r13d, 2)?;
    // CR2 of a fault: an access to data is 8 bytes behind the code.
    a.lea(rbp, qword_ptr(rbx + 8))?;
    a.cmp(r13d, 2)?;
    a.cmove(rbp, rbx)?;
    a.mov(r11d, ALLOWED | 1 << PLACE)?;
    a.mov(rsp, KERNEL_STACK - 0x800)?;
    a.test(r9d, 2)?;
    a.jne(at_user)?;
    a.push(r10)?;
    a.popfq()?;
    a.cmp(r13d, 1)?;
    a.je(write)?;
    a.ja(fetch)?;
    a.mov(rax, qword_ptr(rbx + 8))?;
    a.jmp(after)?;
    a.set_label(&mut write)?;
    a.mov(qword_ptr(rbx + 8), rax)?;
    a.jmp(after)?;
    a.set_label(&mut fetch)?;
    a.jmp(rbx)?;
    a.set_label(&mut at_user)?;
    a.push(i32::from(USER_SS))?;
    a.mov(rax, USER_STACK)?;
    a.push(rax)?;
    a.push(r10)?;
    a.push(i32::from(USER_CS))?;
    a.mov(rax, USER_CODE)?;
    a.push(rax)?;
    a.iretq()?;
    a.set_label(&mut after)?;
    keep(a, large, leaf_at)?;
    a.inc(r8)?;
    a.cmp(r8d, imm(if large { LARGE_CASES } else { SMALL_CASES }))?;
    a.jb(next)
}

fn set_entries(a: &mut CodeAssembler, large: bool, leaf_at: u64) -> Written {
    a.mov(eax, r8d)?;
    a.and(eax, imm(LEAF_COUNT - 1))?;
    if large {
        a.mov(rax, qword_ptr(rax * 8 + LARGE))?;
        a.mov(qword_ptr(PD), rax)?;
    } else {
        a.mov(rax, qword_ptr(rax * 8 + LEAVES))?;
        a.mov(qword_ptr(leaf_at), rax)?;
        a.mov(eax, r8d)?;
        a.shr(eax, 7)?;
        a.and(eax, imm(ABOVE_COUNT - 1))?;
        a.mov(rax, qword_ptr(rax * 8 + ABOVE))?;
        a.mov(qword_ptr(PD), rax)?;
    }
    a.invlpg(ptr(rbx))
}

/// R11 with the marks of the entries becomes a result.
fn keep(a: &mut CodeAssembler, large: bool, leaf_at: u64) -> Written {
    let mut marks = |at: u64, to: i32| -> Written {
        a.mov(rax, qword_ptr(at))?;
        a.shr(eax, 5)?;
        a.and(eax, 3)?;
        a.shl(eax, to)?;
        a.or(r11d, eax)
    };
    if large {
        marks(PD, LEAF_MARKS)?;
    } else {
        marks(leaf_at, LEAF_MARKS)?;
        marks(PD, ABOVE_MARKS)?;
    }
    a.mov(word_ptr(r12), r11w)?;
    a.add(r12, 2)
}

/// #PF.
fn refused(a: &mut CodeAssembler) -> Written {
    a.pop(r11)?;
    a.mov(rax, cr2)?;
    a.cmp(rax, rbp)?;
    place(a, REFUSED)
}

/// #UD: behind an access, or at the page itself.
fn ended(a: &mut CodeAssembler) -> Written {
    let mut behind = a.create_label();
    a.mov(r11d, 1 << PLACE)?;
    a.cmp(r13d, 2)?;
    a.jne(behind)?;
    a.xor(r11d, r11d)?;
    a.set_label(&mut behind)?;
    a.mov(rax, qword_ptr(rsp))?;
    a.cmp(rax, rbx)?;
    place(a, ALLOWED)
}

/// Whether the last comparison was equal, beside R11; and on.
fn place(a: &mut CodeAssembler, what: i32) -> Written {
    a.sete(al)?;
    a.movzx(edx, al)?;
    a.shl(edx, PLACE)?;
    a.or(r11d, edx)?;
    a.or(r11d, what)?;
    a.jmp(r15)
}
