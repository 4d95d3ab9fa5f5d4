//! Attacks on registers, ports and memory.

use iced_x86::code_asm::{
    CodeAssembler, al, ax, byte_ptr, dword_ptr, dx, eax, ecx, edx, esi, qword_ptr, rax, rbx, rdi,
    rsi, word_ptr,
};
use vmm::micro::{LAPIC, SCRATCH};

use super::Facts;
use super::rng::Rng;
use crate::micro::{Written, wrmsr};

/// MSRs that are KVM's, apart from the PMU's: time stamp counter, APIC base,
/// MISC_ENABLE, MTRRs, PAT, DEBUGCTL, the deadline timer, XSS, PV features of
/// KVM and Hyper-V, EFER to TSC_AUX, SYSCFG, HWCR, VM_CR.
const OTHER_MSRS: [u32; 40] = [
    0x10,
    0x11,
    0x12,
    0x1b,
    0x3a,
    0x3b,
    0x48,
    0x49,
    0x79,
    0x8b,
    0xfe,
    0x10b,
    0x122,
    0x174,
    0x175,
    0x176,
    0x17a,
    0x1a0,
    0x1d9,
    0x1dd,
    0x200,
    0x250,
    0x277,
    0x2ff,
    0x309,
    0x480,
    0x600,
    0x6e0,
    0xda0,
    0x4000_0000,
    0x4b56_4d00,
    0x4b56_4d01,
    0x4b56_4d02,
    0x4b56_4d04,
    0xc000_0080,
    0xc000_0081,
    0xc000_0084,
    0xc000_0103,
    0xc001_0015,
    0xc001_0114,
];
const X2APIC: u32 = 0x800;
const LVTPC: u64 = LAPIC + 0x340;

/// Ports of real devices, of KVM's own, and of nothing.
const PORTS: [u16; 30] = [
    0x20, 0x21, 0x40, 0x42, 0x43, 0x60, 0x61, 0x64, 0x70, 0x71, 0x80, 0x92, 0xa1, 0xed, 0xf3, 0xf4,
    0x3f8, 0x3f9, 0x3fa, 0x3fb, 0x3fc, 0x3ff, 0x4d0, 0x600, 0x604, 0x608, 0xcf8, 0xcf9, 0xcfc,
    0xffff,
];
/// i8042 command, port A, test exit, PM1a control, reset control.
const ENDING_PORTS: [u16; 8] = [0x64, 0x92, 0xf4, 0xf5, 0xf6, 0x604, 0x605, 0xcf9];

/// An LVTPC for PMIs, in an APIC that is mostly switched on.
pub(super) fn open_apic(a: &mut CodeAssembler, rng: &mut Rng) -> Written {
    if !rng.one_in(4) {
        // The LVT of a software-disabled APIC stays masked.
        write_apic(a, LAPIC + 0xf0, 0x1ff)?;
    }
    write_apic(a, LVTPC, lvtpc(rng))
}

pub(super) fn read_msr(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    a.mov(ecx, msr(rng, facts))?;
    a.rdmsr()
}

pub(super) fn write_msr(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    let msr = msr(rng, facts);
    wrmsr(a, msr, pmu_value(rng))
}

fn msr(rng: &mut Rng, facts: &Facts) -> u32 {
    match rng.below(8) {
        0 => rng.bits32(),
        1 => rng.pick(&OTHER_MSRS),
        2 => X2APIC + rng.below(0x40),
        3 => {
            let (first, last) = rng.pick(&pmu_virt::all_pmu_msr_ranges());
            first.saturating_add(rng.below(last - first + 3))
        }
        _ => pmu_msr(rng, facts),
    }
}

fn pmu_msr(rng: &mut Rng, facts: &Facts) -> u32 {
    let (first, last) = rng.pick(&facts.pmu_msrs);
    first + rng.below(last - first + 1)
}

/// An event select that counts, a count close to overflow, or anything.
fn pmu_value(rng: &mut Rng) -> u64 {
    const USR_OS_INT_EN: u64 = 0x53 << 16;
    match rng.below(4) {
        0 => USR_OS_INT_EN | rng.pick(&[0x3c, 0x13c, 0x76, 0xc0, 0xc4, 0xc2, 0x29]),
        1 => (1 << 48) - u64::from(rng.below(0x1_0000)),
        2 => 0u64.wrapping_sub(u64::from(rng.below(0x1000))),
        _ => rng.nasty(),
    }
}

/// RDPMC at CPL 0; CPL 3 has its own in `state::user_code`.
pub(super) fn read_counter(a: &mut CodeAssembler, rng: &mut Rng, _: &Facts) -> Written {
    a.mov(ecx, counter(rng))?;
    a.rdpmc()
}

pub(super) fn counter(rng: &mut Rng) -> u32 {
    match rng.below(4) {
        0 => rng.bits32(),
        1 => 1 << 30 | rng.below(8),
        _ => rng.below(8),
    }
}

/// A port that the guest may use with an access of `width` bytes.
fn some_port(rng: &mut Rng, facts: &Facts, width: u16) -> u16 {
    let ends = |port: u16| {
        ENDING_PORTS
            .iter()
            .any(|&ending| (port..=port.saturating_add(width - 1)).contains(&ending))
    };
    loop {
        let port = match rng.below(8) {
            0 => (rng.bits32() & 0xffff).try_into().unwrap_or(0),
            _ => rng.pick(&PORTS),
        };
        if facts.may_end || !ends(port) {
            return port;
        }
    }
}

pub(super) fn port(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    let width = rng.pick(&[1, 2, 4]);
    a.mov(edx, u32::from(some_port(rng, facts, width)))?;
    a.mov(eax, rng.bits32())?;
    match (rng.one_in(2), width) {
        (true, 1) => a.in_(al, dx),
        (true, 2) => a.in_(ax, dx),
        (true, _) => a.in_(eax, dx),
        (false, 1) => a.out(dx, al),
        (false, 2) => a.out(dx, ax),
        (false, _) => a.out(dx, eax),
    }
}

/// INS or OUTS of up to 64 Ki elements, forwards or backwards.
pub(super) fn string_port(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    let width = rng.pick(&[1, 2, 4]);
    a.mov(edx, u32::from(some_port(rng, facts, width)))?;
    let count = match rng.below(4) {
        0 => rng.below(0x1_0000),
        _ => rng.below(64),
    };
    a.mov(ecx, count)?;
    a.mov(rdi, address(rng, facts))?;
    a.mov(rsi, address(rng, facts))?;
    if rng.one_in(4) {
        a.std()?;
    }
    match (rng.one_in(2), width) {
        (true, 1) => a.rep().insb()?,
        (true, 2) => a.rep().insw()?,
        (true, _) => a.rep().insd()?,
        (false, 1) => a.rep().outsb()?,
        (false, 2) => a.rep().outsw()?,
        (false, _) => a.rep().outsd()?,
    }
    a.cld()
}

/// RAM, the tables in it, the holes, the APICs' pages, or what is not mapped.
pub(super) fn address(rng: &mut Rng, facts: &Facts) -> u64 {
    let offset = u64::from(rng.below(0x1000));
    match rng.below(10) {
        // The guest's own tables.
        0 if facts.deadly => 0x1000 + u64::from(rng.below(0x8000)),
        0..=3 => SCRATCH + u64::from(rng.below(0xc000)),
        // The end of the RAM.
        4 => 0x40_0000 - 8 + u64::from(rng.below(16)),
        5 => u64::from(rng.below(0x4000_0000)),
        6 => LAPIC + offset,
        7 => {
            rng.pick(&[
                0xc000_0000,
                0xfec0_0000,
                0xfed0_0000,
                0xfffb_c000,
                0xffff_f000,
            ]) + offset
        }
        8 => 0xc000_0000 + u64::from(rng.below(0x4000_0000)),
        _ => rng.nasty(),
    }
}

pub(super) fn memory(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    a.mov(rbx, address(rng, facts))?;
    a.mov(rax, rng.nasty())?;
    match rng.below(12) {
        0 => a.mov(byte_ptr(rbx), al),
        1 => a.mov(word_ptr(rbx), ax),
        2 => a.mov(dword_ptr(rbx), eax),
        3 => a.mov(qword_ptr(rbx), rax),
        4 => a.mov(al, byte_ptr(rbx)),
        5 => a.mov(ax, word_ptr(rbx)),
        6 => a.mov(eax, dword_ptr(rbx)),
        7 => a.mov(rax, qword_ptr(rbx)),
        8 => a.xchg(qword_ptr(rbx), rax),
        9 => a.lock().add(dword_ptr(rbx), eax),
        10 => a.push(qword_ptr(rbx)),
        _ => {
            a.mov(rsi, rbx)?;
            a.mov(rdi, address(rng, facts))?;
            a.mov(ecx, rng.below(512))?;
            a.rep().movsq()
        }
    }
}

/// An LVTPC: mostly one that a PMI gets through.
fn lvtpc(rng: &mut Rng) -> u32 {
    match rng.below(4) {
        0 => 0x400,
        1 => 32 + rng.below(224),
        2 => rng.bits32() & 0x1_07ff,
        _ => rng.bits32(),
    }
}

/// The local APIC's registers: LVTs, timer, interrupt command, ID, SVR.
pub(super) fn local_apic(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    const ICR_LOW: u64 = LAPIC + 0x300;
    const ICR_HIGH: u64 = LAPIC + 0x310;
    let register = LAPIC + 0x10 * u64::from(rng.below(0x40));
    match rng.below(5) {
        0 => write_apic(a, LVTPC, lvtpc(rng)),
        1 => {
            a.mov(rbx, register)?;
            a.mov(esi, dword_ptr(rbx))
        }
        2 => {
            // An IPI of any kind to any vCPU, this one and INIT included.
            let to = rng.pick(&[0, 1, u32::from(facts.vcpu), 0xff]) << 24;
            write_apic(a, ICR_HIGH, to)?;
            let mode = match rng.below(24) {
                // INIT and start-up take a vCPU out of the test.
                0 if facts.deadly => rng.pick(&[0x4500, 0x0600]),
                1..=8 => 0x400,
                _ => rng.pick(&[0, 0x100, 0x200, 0x300, 0x700]),
            };
            let shorthand = rng.below(4) << 18;
            write_apic(
                a,
                ICR_LOW,
                0x4000 | mode | shorthand | u32::from(rng.byte()),
            )
        }
        _ => write_apic(a, register, rng.bits32()),
    }
}

fn write_apic(a: &mut CodeAssembler, register: u64, value: u32) -> Written {
    a.mov(rbx, register)?;
    a.mov(eax, value)?;
    a.mov(dword_ptr(rbx), eax)
}
