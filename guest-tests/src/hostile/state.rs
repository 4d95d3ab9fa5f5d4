//! Attacks that change how the processor runs: rings, flags, debug registers,
//! tables, control registers, and code that is none.

use iced_x86::code_asm::{
    CodeAssembler, ax, byte_ptr, dr0, dr1, dr2, dr3, dr6, dr7, ds, dword_ptr, eax, ecx, qword_ptr,
    rax, rbx, rsp, ss,
};
use iced_x86::code_asm::{cr0, cr3, cr4, cr8};
use vmm::micro::{SCRATCH, USER_CS, USER_SS, USER_STACK};

use super::rng::Rng;
use super::{Facts, accesses};
use crate::micro::Written;

const TF: u32 = 1 << 8;
const IF: u32 = 1 << 9;
const PAE: u64 = 1 << 5;
const PCE: u64 = 1 << 8;

/// `LIDT [address]`; the address is below 2 GiB.
pub(super) fn load_idtr(a: &mut CodeAssembler, address: u64) -> Written {
    let [b0, b1, b2, b3, ..] = address.to_le_bytes();
    a.db(&[0x0f, 0x01, 0x1c, 0x25, b0, b1, b2, b3])
}

/// A stretch of code at CPL 3.
pub(super) fn user_code(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    user(a, rng, facts, |a, rng, facts| {
        for _ in 0..1 + rng.below(3) {
            match rng.below(8) {
                0..=2 => {
                    a.mov(ecx, accesses::counter(rng))?;
                    a.rdpmc()?;
                }
                3 => accesses::memory(a, rng, facts)?,
                4 => crate::micro::spin(a, rng.below(0x2_0000) + 1)?,
                5 => a.syscall()?,
                6 => a.db(&[0xcd, rng.byte()])?,
                _ => garbage(a, rng, facts)?,
            }
        }
        Ok(())
    })
}

/// `code` at CPL 3, with random flags, back by an exception.
fn user(
    a: &mut CodeAssembler,
    rng: &mut Rng,
    facts: &Facts,
    code: impl FnOnce(&mut CodeAssembler, &mut Rng, &Facts) -> Written,
) -> Written {
    let mut user = a.create_label();
    let flags = 2 | match rng.below(4) {
        0 => 0,
        1 => IF,
        2 => IF | TF,
        // Nested task, resume, virtual-8086 and the rest.
        _ => rng.bits32() & 0x3f_7fd5,
    };
    a.push(i32::from(USER_SS))?;
    a.mov(rax, USER_STACK - u64::from(facts.vcpu) * 0x4000)?;
    a.push(rax)?;
    a.mov(eax, flags)?;
    a.push(rax)?;
    a.push(i32::from(USER_CS))?;
    a.lea(rax, qword_ptr(user))?;
    a.push(rax)?;
    a.iretq()?;
    a.set_label(&mut user)?;
    code(a, rng, facts)?;
    a.ud2()
}

/// Random breakpoints, on code, data and ports, all four slots included.
pub(super) fn debug_registers(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    for slot in [dr0, dr1, dr2, dr3] {
        if rng.one_in(2) {
            let mut here = a.create_label();
            match rng.below(4) {
                // On code that runs: this attack, or the #GP handler itself.
                0 => a.mov(rax, facts.handler)?,
                1 => a.mov(rax, accesses::address(rng, facts))?,
                _ => a.lea(rax, qword_ptr(here))?,
            }
            a.set_label(&mut here)?;
            a.mov(slot, rax)?;
        }
    }
    if rng.one_in(4) {
        a.mov(rax, rng.nasty())?;
        a.mov(dr6, rax)?;
    }
    let dr7_value = match rng.below(3) {
        0 => 0x400,
        1 => u64::from(rng.bits32()) | 0x400,
        _ => u64::from(rng.bits32() & 0xff),
    };
    a.mov(rax, dr7_value)?;
    a.mov(dr7, rax)?;
    a.mov(rax, dr7)
}

/// TF at CPL 0, also behind a MOV SS.
pub(super) fn trap_flag(a: &mut CodeAssembler, rng: &mut Rng, _: &Facts) -> Written {
    a.pushfq()?;
    a.or(qword_ptr(rsp), TF.cast_signed())?;
    a.popfq()?;
    match rng.below(4) {
        0 => a.rdpmc(),
        1 => {
            a.mov(ax, ss)?;
            a.mov(ss, ax)?;
            a.db(&[0xcc])
        }
        2 => a.pushfq(),
        _ => a.cpuid(),
    }
}

/// Descriptor tables that point anywhere; most are put right again.
pub(super) fn descriptor_tables(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    if !facts.deadly {
        return accesses::read_counter(a, rng, facts);
    }
    const IMAGE: u64 = SCRATCH + 0xf000;
    let image = IMAGE + 0x20 * u64::from(facts.vcpu);
    a.mov(rax, accesses::address(rng, facts))?;
    a.mov(qword_ptr(image + 2), rax)?;
    let limit = rng.pick(&[0, 7, 0x6f, 0xdf, 0xfff, 0xffff]);
    a.mov(dword_ptr(image), limit)?;
    // The limit's upper half was the base's lower one.
    a.mov(qword_ptr(image + 2), rax)?;
    load_idtr(a, image)?;
    // A counter started now has the watch look at this table.
    accesses::write_msr(a, rng, facts)?;
    match rng.below(4) {
        0 => software_interrupt(a, rng, facts),
        1 => accesses::read_counter(a, rng, facts),
        _ => load_idtr(a, facts.idtr),
    }
}

/// INT n, STI, HLT, and stack switches.
pub(super) fn interrupt(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    match rng.below(6) {
        0 => a.sti(),
        1 => a.cli(),
        2 if rng.one_in(4) => {
            // Interrupts are off as often as not; then only an NMI wakes it.
            a.hlt()
        }
        3 if facts.deadly => {
            a.mov(rsp, accesses::address(rng, facts))?;
            a.push(rax)
        }
        4 => {
            a.mov(rax, rng.bits64())?;
            a.mov(ds, ax)
        }
        _ => {
            load_idtr(a, facts.idtr)?;
            software_interrupt(a, rng, facts)
        }
    }
}

pub(super) fn control_registers(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    let bit = 1u64 << rng.below(32);
    match rng.below(8) {
        0..=3 => {
            // Without PAE the next fetch is a #PF for ever.
            let bit = if bit == PAE && !facts.deadly {
                PCE
            } else {
                bit
            };
            a.mov(rax, cr4)?;
            a.xor(rax, flip(bit))?;
            a.mov(cr4, rax)
        }
        4 if facts.deadly => {
            a.mov(rax, cr0)?;
            a.xor(rax, flip(bit))?;
            a.mov(cr0, rax)
        }
        5 => {
            a.mov(rax, rng.nasty())?;
            a.mov(cr8, rax)
        }
        6 => {
            a.mov(rax, cr3)?;
            a.mov(cr3, rax)
        }
        7 if facts.deadly => {
            a.mov(rax, rng.nasty())?;
            a.mov(cr3, rax)
        }
        _ => a.clts(),
    }
}

/// `bit` as an operand of XOR, sign-extended where it is the highest of 32.
fn flip(bit: u64) -> i32 {
    u32::try_from(bit).unwrap_or(0).cast_signed()
}

/// Instructions that hypervisors treat specially.
///
/// A KVM that emulates CPL 0 gives a guest up at the first one that it lacks, so
/// these are rare there.
pub(super) fn odd_instruction(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    if facts.emulated && !rng.one_in(8) {
        return a.cpuid();
    }
    a.mov(rbx, accesses::address(rng, facts))?;
    a.mov(ecx, rng.bits32())?;
    a.mov(eax, rng.bits32())?;
    match rng.below(14) {
        0 => a.cpuid(),
        1 => a.wbinvd(),
        2 => a.invlpg(byte_ptr(rbx)),
        3 => a.db(&[0x0f, 0x01, 0xc1]),                    // VMCALL
        4 => a.db(&[0x0f, 0x01, 0xd9]),                    // VMMCALL
        5 => a.db(&[0x0f, 0x01, 0xd8]),                    // VMRUN
        6 => a.db(&[0x0f, 0x01, 0xd1]),                    // XSETBV
        7 => a.db(&[0x0f, 0x01, 0xc8]),                    // MONITOR
        8 => a.db(&[0x0f, 0x01, 0xc9]),                    // MWAIT
        9 => a.db(&[0x0f, 0xc7, 0x33]),                    // VMPTRLD-like: group 9 /6
        10 => a.db(&[0x0f, 0xaa]),                         // RSM
        11 => a.db(&[0x0f, 0x00, 0xd8]),                   // LTR
        12 => a.db(&[0xf3, 0x90, 0xf3, 0x90, 0xf3, 0x90]), // PAUSE
        _ => a.db(&[0x0f, 0x01, 0xf9]),                    // RDTSCP
    }
}

/// Bytes that are no code, executed as code.
pub(super) fn random_bytes(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    if facts.emulated && !rng.one_in(8) {
        return user(a, rng, facts, garbage);
    }
    garbage(a, rng, facts)
}

fn garbage(a: &mut CodeAssembler, rng: &mut Rng, _: &Facts) -> Written {
    let bytes: Vec<u8> = (0..4 + rng.below(12)).map(|_| rng.byte()).collect();
    a.db(&bytes)?;
    // An instruction that the last bytes began ends within these.
    a.db(&[0x90; 15])
}

/// INT n.
fn software_interrupt(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    let vector = rng.byte();
    if facts.emulated && !rng.one_in(8) {
        return user(a, rng, facts, |a, _, _| a.db(&[0xcd, vector]));
    }
    a.db(&[0xcd, vector])
}
